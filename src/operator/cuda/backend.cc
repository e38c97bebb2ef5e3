// The backend in use: that of runtime.cu, which sets it when the library is loaded, or a test's. In
// a build without nvcc there is none.
#include "cuda/backend.h"

namespace gluon_syncbn {
namespace {
const CudaBackend* backend = nullptr;
}  // namespace

const CudaBackend* cuda_backend() { return backend; }
void set_cuda_backend(const CudaBackend* b) { backend = b; }

}  // namespace gluon_syncbn
