// What the launches of all kernels have in common.
#ifndef GLUON_SYNCBN_CUDA_LAUNCH_CUH_
#define GLUON_SYNCBN_CUDA_LAUNCH_CUH_

#include <cuda_runtime.h>

#include <initializer_list>
#include <type_traits>

#include "cuda/backend.h"
#include "cuda/epilogue.cuh"
#include "cuda/plans.h"

#define SBN_LAUNCH(kernel, grid, stream, ...) \
  kernel<<<(grid), kThreads, 0, static_cast<cudaStream_t>(stream)>>>(__VA_ARGS__)

namespace gluon_syncbn {

inline dim3 blocks_for(int64_t threads) {
  return dim3(static_cast<unsigned>(std::max<int64_t>(1, divide_up(threads, kThreads))));
}

// Whether arrays, of which some are null, are at multiples of a number of bytes.
inline bool is_aligned(std::initializer_list<const void*> arrays, int bytes) {
  return std::all_of(arrays.begin(), arrays.end(), [bytes](const void* array) {
    return reinterpret_cast<uintptr_t>(array) % bytes == 0;
  });
}

// Values of a vector of 8 bytes.
template <typename T>
constexpr int kHalfWidth = sizeof(T) < 8 ? static_cast<int>(8 / sizeof(T)) : 1;

// Returns f(width), where the width is a constant: that of a vector of 16 bytes, of 8, or 1.
template <typename T, typename F>
auto with_width(int width, const F& f) {
  if (width == 1) return f(std::integral_constant<int, 1>());
  if (width == kHalfWidth<T>) return f(std::integral_constant<int, kHalfWidth<T>>());
  return f(std::integral_constant<int, static_cast<int>(16 / sizeof(T))>());
}

template <typename A>
EpilogueTask<A> epilogue_of(const BackwardShard& p) {
  EpilogueTask<A> task{};
  task.activation = p.epilogue.activation;
  const bool activates = task.activation != Activation::kNone;
  task.slope = static_cast<A>(activates ? p.epilogue.slope : 1);
  task.inverse = static_cast<A>(p.from_y() ? 1 / p.epilogue.slope : 1);
  task.v = activates && p.y ? p.y : p.x;
  task.dresidual = p.dresidual;
  task.add_dresidual = p.dresidual && p.residual_mode == WriteMode::kAdd;
  return task;
}

}  // namespace gluon_syncbn

#endif  // GLUON_SYNCBN_CUDA_LAUNCH_CUH_
