// The kernels of a dtype. Each dtype has a file of its own, so that they compile in parallel.
#ifndef GLUON_SYNCBN_CUDA_KERNELS_CUH_
#define GLUON_SYNCBN_CUDA_KERNELS_CUH_

#include "cuda/finish.cuh"
#include "cuda/sums.cuh"

namespace gluon_syncbn {

template <typename T>
const CudaKernels& kernels_for() {
  static const CudaKernels kernels{work_size<T>,
                                   launch_forward_sums<T>,
                                   launch_backward_sums<T>,
                                   coefficients_size<Arithmetic<T>>,
                                   launch_finish_forward<T>,
                                   launch_count_batch<Arithmetic<T>>,
                                   launch_finish_backward<Arithmetic<T>>,
                                   launch_normalize<T>,
                                   launch_input_gradient<T>};
  return kernels;
}

}  // namespace gluon_syncbn

#endif  // GLUON_SYNCBN_CUDA_KERNELS_CUH_
