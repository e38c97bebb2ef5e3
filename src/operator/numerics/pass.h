// A pass is the forward or the backward of one call on one device. It sums its shard; somebody else
// adds the sums of all devices that share the batch; and with these the pass writes its results. So
// kernels know nothing of other devices, and what adds the sums knows nothing of kernels.
#ifndef GLUON_SYNCBN_NUMERICS_PASS_H_
#define GLUON_SYNCBN_NUMERICS_PASS_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "numerics/running_statistics.h"
#include "numerics/shards.h"

namespace gluon_syncbn {

// Sums in the memory of a GPU, which others can read once the event (cudaEvent_t) has passed and
// while `owner` is held.
struct SharedSums {
  const ChannelSums* sums;
  double count;
  void* event;
  std::shared_ptr<void> owner;
};

// The sums of C channels and of `count` values in each: of one device, or of all. They are on the
// host, or each GPU's, in rank order, where those that share the batch can read them.
struct PassSums {
  int64_t C = 0;
  double count = 0;
  std::vector<ChannelSums> on_host;
  std::vector<SharedSums> on_gpus;
};

class Pass {
 public:
  virtual ~Pass() = default;

  // The sums of this device's shard, which may have no values.
  virtual PassSums sums() = 0;
  // Writes the results, given the sums of all devices. Must follow sums().
  virtual void finish(const PassSums& all) = 0;
  // Both sums() and finish(), for a device that needs the sums of no other: it is the only one that
  // has the batch, its batch is cut into virtual devices, or the statistics are constants.
  virtual void alone() = 0;
};

// What backward needs of a forward, in memory of the device that is freed with the last copy.
struct Kept : ForBackward {
  std::shared_ptr<Statistics> memory;
};

// A small output; null if it is not needed.
struct Result {
  void* to = nullptr;
  bool add = false;
};

// All arrays are in the memory of the device.
template <typename Shard>
struct PassTask {
  DType dtype = DType::kFloat32;
  // Describes the data in errors.
  std::string what;
  // The shard, or the chunks of virtual devices.
  std::vector<Shard> parts;
  // Whether to use the statistics of the batch, or the running statistics.
  bool from_batch = true;
};

struct ForwardTask : PassTask<ForwardShard> {
  double epsilon = 0;
  // mean, variance, and the number of batches or null, of the type of gamma.
  void* running[3] = {};
  // Whether and how they follow a batch that has values.
  bool updates = true;
  RunningRule rule;
  // Arrays of `rows` x C doubles. If there are fewer parts than rows, the values repeat.
  Result mean, inv_std;
  int64_t rows = 1;
  Kept* kept = nullptr;
};

// The pass itself sets `sums` of the parts.
struct BackwardTask : PassTask<BackwardShard> {
  Kept kept;
  // Of this device alone, summed over the parts.
  Result dgamma, dbeta;
};

template <typename Shard>
double count_of(const Shard& part) {
  return static_cast<double>(part.view.N * part.view.S);
}

// Of the parts of a task.
template <typename Shard>
BatchCounts counts_of(const std::vector<Shard>& parts) {
  BatchCounts counts{count_of(parts.front()), count_of(parts.back()), 0};
  for (const Shard& part : parts) counts.firsts += count_of(part) == counts.first;
  return counts;
}

}  // namespace gluon_syncbn

#endif  // GLUON_SYNCBN_NUMERICS_PASS_H_
