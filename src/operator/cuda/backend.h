// The operator's interface to CUDA: a table of functions of the runtime and a table of kernels. A
// build with nvcc has both. No CUDA header is needed.
#ifndef GLUON_SYNCBN_CUDA_BACKEND_H_
#define GLUON_SYNCBN_CUDA_BACKEND_H_

#include <cstddef>
#include <cstdint>

#include "numerics/formulas.h"
#include "numerics/running_statistics.h"
#include "numerics/shards.h"

struct CUstream_st;
struct CUevent_st;

namespace gluon_syncbn {

// cudaStream_t and cudaEvent_t.
using Stream = CUstream_st*;
using Event = CUevent_st*;

// Functions of the CUDA runtime that return cudaError_t, 0 for success.
struct CudaRuntime {
  int (*set_device)(int device);
  int (*malloc)(void** memory, size_t bytes);
  int (*free)(void* memory);
  int (*malloc_host)(void** memory, size_t bytes);
  int (*free_host)(void* memory);
  int (*create_stream)(Stream* stream);
  int (*destroy_stream)(Stream stream);
  int (*synchronize)(Stream stream);
  // Without timing, on the thread's device.
  int (*create_event)(Event* event);
  int (*destroy_event)(Event event);
  int (*record)(Event event, Stream stream);
  int (*wait_for)(Stream stream, Event event);
  int (*can_access_peer)(int* can, int device, int peer);
  // For the thread's device. No error if it is enabled already.
  int (*enable_peer_access)(int peer);
  int (*copy_to_host)(void* to, const void* from, size_t bytes, Stream stream);
  int (*copy_to_device)(void* to, const void* from, size_t bytes, Stream stream);
  int (*clear)(void* memory, size_t bytes, Stream stream);
  // For example "cudaErrorMemoryAllocation" and "out of memory".
  const char* (*error_name)(int error);
  const char* (*error_text)(int error);
  void (*clear_error)();
};

// The sums of the devices that share a batch, each readable by the device of the kernel.
constexpr int kMaxDevices = 32;
struct SumsOfDevices {
  int size = 0;
  const ChannelSums* each[kMaxDevices] = {};
};

// The running statistics of a device, of the type of gamma, if they follow the batches; else `mean`
// is null. With `num_batches`, which does not include this step, they are the mean over all steps,
// otherwise a moving average.
struct RunningUpdate {
  void *mean, *variance;
  const void* num_batches;
  double momentum;
  bool unbiased;
};

// Arrays of `size` values that receive the statistics of all batches, again and again; or null.
struct SavedStatistics {
  double *mean, *inv_std;
  bool add_mean, add_inv_std;
  int64_t size;
};

// Null gamma means ones. Null results are not computed.
struct Finish {
  Finish() = default;
  // For batches of shards like this one.
  template <typename Shard>
  Finish(const Shard& shard, int64_t size, const ForBackward& k)
      : C(shard.view.C), batches(size), kept(k), gamma(shard.gamma), epilogue(shard.epilogue) {}

  int64_t C = 0, batches = 0;
  ForBackward kept;
  const void* gamma = nullptr;
  Epilogue epilogue;
  // Each has the sums of all batches.
  SumsOfDevices sums;
  BatchCounts counts = {};
  void* coefficients = nullptr;
  // Bytes per batch: coefficients_size(C).
  int64_t coefficients_stride = 0;
};

// Statistics are read, unless they are computed from the sums, or from a mean and a variance.
struct ForwardFinish : Finish {
  using Finish::Finish;
  const void* beta = nullptr;
  // Whether y determines the gates, rather than x.
  bool reads_y = false;
  double epsilon = 0;
  RunningUpdate running = {};
  SavedStatistics saved = {};
  const void *mean = nullptr, *variance = nullptr;
};

// Without `sums`, statistics are constant.
struct BackwardFinish : Finish {
  using Finish::Finish;
  const ChannelSums* own_sums = nullptr;
  // Whether the coefficients have gates.
  bool gated = false;
  void *dgamma = nullptr, *dbeta = nullptr;
  bool add_dgamma = false, add_dbeta = false;
};

// Whether dx takes coefficients with gates.
inline bool is_gated(const BackwardShard& shard) {
  return shard.epilogue.activation != Activation::kNone || shard.dresidual;
}

// The kernels for one dtype, on device pointers. Functions queue the work and return cudaError_t.
struct CudaKernels {
  // The length of the workspace `work` of forward_sums and backward_sums; may be 0.
  int64_t (*work_size)(const View&);
  // sums[c] = {sum(x), sum(x^2)}.
  int (*forward_sums)(const View&, const void* x, ChannelSums* work, ChannelSums* sums, Stream);
  // The sums of kernels.h, given what finish_forward has left for batch `batch`.
  int (*backward_sums)(const BackwardShard&, const ForBackward&, int64_t batch, ChannelSums* work,
                       ChannelSums* sums, Stream);
  // Bytes of the coefficients of C channels.
  int64_t (*coefficients_size)(int64_t C);
  int (*finish_forward)(const ForwardFinish&, Stream);
  // Adds one, after finish_forward, whose blocks all read the number.
  int (*count_batch)(void* num_batches, Stream);
  int (*finish_backward)(const BackwardFinish&, Stream);
  // y, given the coefficients of finish_forward; y may be x.
  int (*normalize)(const ForwardShard&, const void* coefficients, Stream);
  // dx and dresidual, given the coefficients of finish_backward; dx may be dy.
  int (*input_gradient)(const BackwardShard&, const void* coefficients, Stream);
};

struct CudaBackend {
  CudaRuntime runtime;
  const CudaKernels& (*kernels)(DType);
  // The compiler's version and the architectures.
  const char* description;
};

// Null in a build without CUDA.
const CudaBackend* cuda_backend();
void set_cuda_backend(const CudaBackend* backend);

}  // namespace gluon_syncbn

#endif  // GLUON_SYNCBN_CUDA_BACKEND_H_
