// The CUDA backend of backend.h: functions of the runtime in plain types, so that only .cu files
// need CUDA's headers.
#include <cuda_runtime.h>

#include "cuda/backend.h"
#include "numerics/dtypes.h"

namespace gluon_syncbn {

// In kernels_*.cu.
template <typename T>
const CudaKernels& kernels_for();

const CudaKernels& kernels_of(DType dtype) {
  return with_dtype(dtype,
                    [](auto zero) -> const CudaKernels& { return kernels_for<decltype(zero)>(); });
}

namespace {

// By name, as functions of one type could take each other's place.
CudaRuntime runtime() {
  CudaRuntime r{};
  r.set_device = [](auto... a) -> int { return cudaSetDevice(a...); };
  r.malloc = [](auto... a) -> int { return cudaMalloc(a...); };
  r.free = [](auto... a) -> int { return cudaFree(a...); };
  r.malloc_host = [](auto... a) -> int { return cudaHostAlloc(a..., cudaHostAllocPortable); };
  r.free_host = [](auto... a) -> int { return cudaFreeHost(a...); };
  r.create_stream = [](Stream* stream) -> int {
    return cudaStreamCreateWithFlags(stream, cudaStreamNonBlocking);
  };
  r.destroy_stream = [](auto... a) -> int { return cudaStreamDestroy(a...); };
  r.synchronize = [](auto... a) -> int { return cudaStreamSynchronize(a...); };
  r.create_event = [](Event* event) -> int {
    return cudaEventCreateWithFlags(event, cudaEventDisableTiming);
  };
  r.destroy_event = [](auto... a) -> int { return cudaEventDestroy(a...); };
  r.record = [](auto... a) -> int { return cudaEventRecord(a...); };
  r.wait_for = [](auto... a) -> int { return cudaStreamWaitEvent(a..., 0); };
  r.can_access_peer = [](auto... a) -> int { return cudaDeviceCanAccessPeer(a...); };
  r.enable_peer_access = [](int peer) -> int {
    const cudaError_t error = cudaDeviceEnablePeerAccess(peer, 0);
    if (error != cudaErrorPeerAccessAlreadyEnabled) return error;
    cudaGetLastError();
    return cudaSuccess;
  };
  r.copy_to_host = [](void* to, const void* from, size_t bytes, Stream stream) -> int {
    return cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToHost, stream);
  };
  r.copy_to_device = [](void* to, const void* from, size_t bytes, Stream stream) -> int {
    return cudaMemcpyAsync(to, from, bytes, cudaMemcpyHostToDevice, stream);
  };
  r.clear = [](void* memory, size_t bytes, Stream stream) -> int {
    return cudaMemsetAsync(memory, 0, bytes, stream);
  };
  r.error_name = [](int error) { return cudaGetErrorName(static_cast<cudaError_t>(error)); };
  r.error_text = [](int error) { return cudaGetErrorString(static_cast<cudaError_t>(error)); };
  r.clear_error = [] { static_cast<void>(cudaGetLastError()); };
  return r;
}

#define SBN_TEXT_OF(x) #x
#define SBN_TEXT(x) SBN_TEXT_OF(x)
#if !defined(GLUON_SYNCBN_CUDA_ARCHITECTURES)
#define GLUON_SYNCBN_CUDA_ARCHITECTURES "those of the compiler"
#endif

const CudaBackend kBackend{runtime(), kernels_of,
                           "CUDA " SBN_TEXT(__CUDACC_VER_MAJOR__) "." SBN_TEXT(
                               __CUDACC_VER_MINOR__) " for " GLUON_SYNCBN_CUDA_ARCHITECTURES};

// Runs when the library is loaded.
[[maybe_unused]] const bool ready = (set_cuda_backend(&kBackend), true);

}  // namespace
}  // namespace gluon_syncbn
