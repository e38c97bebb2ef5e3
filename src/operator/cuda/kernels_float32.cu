#include "cuda/kernels.cuh"

template const gluon_syncbn::CudaKernels& gluon_syncbn::kernels_for<float>();
