// The kernels by dtype.
#ifndef GLUON_SYNCBN_CUDA_KERNELS_H_
#define GLUON_SYNCBN_CUDA_KERNELS_H_

#include "cuda/backend.h"
#include "numerics/dtypes.h"

namespace gluon_syncbn {

// Defined in kernels_*.cu.
template <typename T>
const CudaKernels& kernels_for();

inline const CudaKernels& kernels_of(DType dtype) {
  return with_dtype(dtype,
                    [](auto zero) -> const CudaKernels& { return kernels_for<decltype(zero)>(); });
}

}  // namespace gluon_syncbn

#endif  // GLUON_SYNCBN_CUDA_KERNELS_H_
