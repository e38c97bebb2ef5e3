// Forward and backward of one call on a GPU. Only sums leave the device. The GPUs of this process
// read each other's sums once an event has passed. If CPU devices or other processes take part, the
// sums are added on the host.
#ifndef GLUON_SYNCBN_CUDA_PASSES_H_
#define GLUON_SYNCBN_CUDA_PASSES_H_

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "cuda/device.h"
#include "numerics/running_statistics.h"

namespace gluon_syncbn {

// How the sums of all devices are combined if there are other devices: by one of the functions.
struct Together {
  // The GPUs of this process that may take part.
  std::vector<int> gpus;
  // Gives its sums to the other GPUs, and returns those of all, in rank order.
  std::function<std::vector<SharedSums>(const SharedSums& own)> meet;
  // Replaces sums on the host, and their count, with those of all.
  std::function<void(ChannelSums* sums, double* count)> reduce;
};

// A small output; null if it is not needed.
struct Result {
  void* to = nullptr;
  bool add = false;
};

struct GpuForward {
  int device;
  DType dtype;
  // Describes the data in errors.
  std::string what;
  double epsilon;
  // The batch, or the chunks of virtual devices; null y is not computed.
  std::vector<ForwardShard> parts;
  // Whether to use the statistics of the parts, or the running statistics.
  bool from_batch;
  Together together;
  // mean, variance, and the number of batches or null, of the type of gamma.
  void* running[3];
  // Whether and how the device updates them.
  bool updates;
  RunningRule rule;
  // If set, the statistics come from the host, which updates copies of `running`. Returns whether
  // to write them back.
  std::function<bool(const std::vector<BatchPtr>&, void* const (&running)[3])> update_on_host;
  // Arrays of `rows` x C doubles. If there are fewer parts than rows, the values repeat.
  Result mean, inv_std;
  int64_t rows;
};

// What backward needs of each part, in memory that is freed with the last copy.
struct KeptOnGpu : ForBackward {
  std::shared_ptr<Statistics> memory;
};

// Writes y and the running statistics.
KeptOnGpu forward_on_gpu(const GpuForward& task);

struct GpuBackward {
  int device;
  DType dtype;
  std::string what;
  // Null dx is not computed; `sums` are not used.
  std::vector<BackwardShard> parts;
  KeptOnGpu kept;
  bool from_batch;
  Together together;
  // Of this device alone, summed over the parts.
  Result dgamma, dbeta;
};

void backward_on_gpu(const GpuBackward& task);

}  // namespace gluon_syncbn

#endif  // GLUON_SYNCBN_CUDA_PASSES_H_
