// Linked into the library, this makes MXNet's CPU contexts act as GPUs: cpu(1) is device 1 of the
// simulator. See test_ptx.py.
#include <cstdio>
#include <cstdlib>

#include "cuda/backend.h"
#include "ptxsim.h"

namespace {

// Linked behind runtime.cu, and therefore initialized after it.
[[maybe_unused]] const bool ready = [] {
  using namespace gluon_syncbn;
  if (!cuda_backend()) {
    std::fprintf(stderr, "cpu_contexts.cc must be linked behind runtime.cu\n");
    std::abort();
  }
  static CudaBackend backend = *cuda_backend();
  backend.device_type = "cpu";
  set_cuda_backend(&backend);
  ptxsim::take_host_memory();
  return true;
}();

}  // namespace
