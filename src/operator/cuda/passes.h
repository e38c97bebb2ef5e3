// Forward and backward of one call on a GPU. The sums are copied to the host to be exchanged; all
// other data stays on the device.
#ifndef GLUON_SYNCBN_CUDA_PASSES_H_
#define GLUON_SYNCBN_CUDA_PASSES_H_

#include <functional>
#include <string>
#include <vector>

#include "cuda/device.h"
#include "numerics/running_statistics.h"

namespace gluon_syncbn {

// Replaces the sums of C channels and their count by those of all devices. Empty if each part has
// its own statistics.
using AllReduceSums = std::function<void(ChannelSums* sums, double* count)>;

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
  AllReduceSums all_reduce;
  // mean, variance, and the number of batches or null, of the type of gamma.
  void* running[3];
  // Updates host copies of `running`. Returns whether to write them back.
  std::function<bool(const std::vector<BatchPtr>&, void* const (&running)[3])> update;
  // Arrays of `rows` x C doubles. If there are fewer parts than rows, the values repeat.
  Result mean, inv_std;
  int64_t rows;
};

// Writes y and the running statistics. Returns the statistics that normalized each part.
std::vector<BatchPtr> forward_on_gpu(const GpuForward& task);

struct GpuBackward {
  int device;
  DType dtype;
  std::string what;
  // Null dx is not computed; `sums` are not used.
  std::vector<BackwardShard> parts;
  // The statistics of each part.
  std::vector<BatchPtr> batches;
  bool from_batch;
  AllReduceSums all_reduce;
  // Of this device alone, summed over the parts.
  Result dgamma, dbeta;
};

void backward_on_gpu(const GpuBackward& task);

}  // namespace gluon_syncbn

#endif  // GLUON_SYNCBN_CUDA_PASSES_H_
