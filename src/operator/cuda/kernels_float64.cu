// The kernels for float64 data, compiled in parallel with those of other dtypes.
#include "cuda/kernels.cuh"

template const gluon_syncbn::CudaKernels& gluon_syncbn::kernels_for<double>();
