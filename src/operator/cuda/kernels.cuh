// The kernels of a dtype. Each has a file of its own, so that cores compile side by side: for GPUs,
// or by tests for the host, with cuda_on_host.h.
#ifndef GLUON_SYNCBN_CUDA_KERNELS_CUH_
#define GLUON_SYNCBN_CUDA_KERNELS_CUH_

#if defined(__CUDACC__)
#include <cuda_runtime.h>

#include <map>
#include <mutex>
#include <utility>

#define SBN_LAUNCH(kernel, grid, stream, ...) \
  kernel<<<(grid), kThreads, 0, static_cast<cudaStream_t>(stream)>>>(__VA_ARGS__)
#define SBN_LAUNCH_TOGETHER SBN_LAUNCH
#define SBN_RESIDENT(kernel) resident_blocks(kernel)

namespace gluon_syncbn {

inline int last_launch_error() { return cudaGetLastError(); }

template <typename... Arguments>
int resident_blocks(void (*kernel)(Arguments...));

}  // namespace gluon_syncbn
#endif

#include "cuda/launch.cuh"

namespace gluon_syncbn {

#if defined(__CUDACC__)

// Asks the runtime once for each device and kernel.
template <typename... Arguments>
int resident_blocks(void (*kernel)(Arguments...)) {
  static std::mutex mutex;
  static auto* const known = new std::map<std::pair<int, void (*)(Arguments...)>, int>;
  int device = 0;
  cudaGetDevice(&device);
  const std::lock_guard<std::mutex> lock(mutex);
  int& blocks = (*known)[{device, kernel}];
  const auto* const function = reinterpret_cast<const void*>(kernel);
  if (blocks == 0 && cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, function, kThreads,
                                                                   0) != cudaSuccess) {
    // The launch will report it.
    cudaGetLastError();
  }
  return blocks = std::max(blocks, 1);
}
#endif

template <typename T>
const CudaKernels& kernels_for() {
  static const CudaKernels kernels{work_size<T>,
                                   launch_forward_sums<T>,
                                   launch_backward_sums<T>,
                                   coefficients_size<Arithmetic<T>>,
                                   launch_finish_forward<Arithmetic<T>>,
                                   launch_start_backward<T>,
                                   launch_finish_backward<Arithmetic<T>>,
                                   launch_statistics_of_arrays<Arithmetic<T>>,
                                   launch_normalize<T>,
                                   launch_input_gradient<T>};
  return kernels;
}

}  // namespace gluon_syncbn

#endif  // GLUON_SYNCBN_CUDA_KERNELS_CUH_
