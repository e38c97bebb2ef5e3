// Forward and backward of one call on a GPU. The sums come to the host for the meeting; all else
// stays on the device.
#ifndef GLUON_SYNCBN_CUDA_PASSES_H_
#define GLUON_SYNCBN_CUDA_PASSES_H_

#include <functional>
#include <string>
#include <vector>

#include "cuda/device.h"
#include "numerics/running_statistics.h"

namespace gluon_syncbn {

// Replaces the sums of C channels and their count by those of all devices. None: a part has
// statistics of its own.
using Meet = std::function<void(ChannelSums* sums, double* count)>;

// A small array to be written; null where it is not wanted.
struct Result {
  void* to = nullptr;
  bool add = false;
};

struct GpuForward {
  int device;
  DType dtype;
  // What errors tell of the data.
  std::string what;
  double epsilon;
  // The whole, or the chunks of virtual devices; null y is not wanted.
  std::vector<ForwardShard> parts;
  // Statistics of the parts, or else those of the running arrays.
  bool from_batch;
  Meet meet;
  // mean, variance, and the number of batches or null, of the type of gamma.
  void* running[3];
  // Changes copies of those, on the host. Returns whether they are to be written.
  std::function<bool(const std::vector<BatchPtr>&, void* const (&running)[3])> update;
  // Of `rows` x C doubles; in rows that have no part of their own, the first's are repeated.
  Result mean, inv_std;
  int64_t rows;
};

// y and the running statistics. Returns those that y was normalized by, for each part.
std::vector<BatchPtr> forward_on_gpu(const GpuForward& task);

struct GpuBackward {
  int device;
  DType dtype;
  std::string what;
  // Null dx is not wanted; `sums` are not used.
  std::vector<BackwardShard> parts;
  // For each part.
  std::vector<BatchPtr> batches;
  bool from_batch;
  Meet meet;
  // Of this device alone, added over the parts.
  Result dgamma, dbeta;
};

void backward_on_gpu(const GpuBackward& task);

}  // namespace gluon_syncbn

#endif  // GLUON_SYNCBN_CUDA_PASSES_H_
