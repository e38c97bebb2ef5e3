// The CUDA backend of backend.h: functions of the runtime in plain types, so that only .cu files
// need CUDA's headers.
#include <cuda_runtime.h>
#include <dlfcn.h>

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

cudaStream_t native(Stream stream) { return static_cast<cudaStream_t>(stream); }

int get_device(int* device) { return cudaGetDevice(device); }
int set_device(int device) { return cudaSetDevice(device); }
// Only the driver API knows this. By now the runtime has loaded the driver's library. This library
// is not linked to it, so that it loads on machines without a driver.
int has_context(int* active, int device) {
  using Get = int (*)(int* handle, int ordinal);
  using GetState = int (*)(int handle, unsigned* flags, int* active);
  static void* const driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
  static const Get get = driver ? reinterpret_cast<Get>(dlsym(driver, "cuDeviceGet")) : nullptr;
  static const GetState get_state =
      driver ? reinterpret_cast<GetState>(dlsym(driver, "cuDevicePrimaryCtxGetState")) : nullptr;
  int handle = 0;
  unsigned flags = 0;
  *active = 0;
  if (!get || !get_state || get(&handle, device) || get_state(handle, &flags, active)) {
    return cudaErrorInitializationError;
  }
  return cudaSuccess;
}
int multiprocessors(int* count, int device) {
  return cudaDeviceGetAttribute(count, cudaDevAttrMultiProcessorCount, device);
}
int allocate(void** memory, size_t bytes) { return cudaMalloc(memory, bytes); }
int release(void* memory) { return cudaFree(memory); }
int allocate_host(void** memory, size_t bytes) {
  return cudaHostAlloc(memory, bytes, cudaHostAllocPortable);
}
int release_host(void* memory) { return cudaFreeHost(memory); }
int create_stream(Stream* stream) {
  cudaStream_t created = nullptr;
  const cudaError_t error = cudaStreamCreateWithFlags(&created, cudaStreamNonBlocking);
  *stream = created;
  return error;
}
int destroy_stream(Stream stream) { return cudaStreamDestroy(native(stream)); }
int synchronize(Stream stream) { return cudaStreamSynchronize(native(stream)); }
int create_event(Event* event) {
  cudaEvent_t created = nullptr;
  const cudaError_t error = cudaEventCreateWithFlags(&created, cudaEventDisableTiming);
  *event = created;
  return error;
}
int destroy_event(Event event) { return cudaEventDestroy(static_cast<cudaEvent_t>(event)); }
int record(Event event, Stream stream) {
  return cudaEventRecord(static_cast<cudaEvent_t>(event), native(stream));
}
int wait_for(Stream stream, Event event) {
  return cudaStreamWaitEvent(native(stream), static_cast<cudaEvent_t>(event), 0);
}
int can_access_peer(int* can, int device, int peer) {
  return cudaDeviceCanAccessPeer(can, device, peer);
}
int enable_peer_access(int peer) {
  const cudaError_t error = cudaDeviceEnablePeerAccess(peer, 0);
  if (error != cudaErrorPeerAccessAlreadyEnabled) return error;
  cudaGetLastError();
  return cudaSuccess;
}
int copy_to_host(void* to, const void* from, size_t bytes, Stream stream) {
  return cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToHost, native(stream));
}
int copy_to_device(void* to, const void* from, size_t bytes, Stream stream) {
  return cudaMemcpyAsync(to, from, bytes, cudaMemcpyHostToDevice, native(stream));
}
int clear(void* memory, size_t bytes, Stream stream) {
  return cudaMemsetAsync(memory, 0, bytes, native(stream));
}
const char* error_name(int error) { return cudaGetErrorName(static_cast<cudaError_t>(error)); }
const char* error_text(int error) { return cudaGetErrorString(static_cast<cudaError_t>(error)); }
void clear_error() { cudaGetLastError(); }

#define SBN_TEXT_OF(x) #x
#define SBN_TEXT(x) SBN_TEXT_OF(x)
#if !defined(GLUON_SYNCBN_CUDA_ARCHITECTURES)
#define GLUON_SYNCBN_CUDA_ARCHITECTURES "those of the compiler"
#endif

const CudaBackend kBackend{
    {get_device,     set_device,   has_context,   multiprocessors, allocate,           release,
     allocate_host,  release_host, create_stream, destroy_stream,  synchronize,        create_event,
     destroy_event,  record,       wait_for,      can_access_peer, enable_peer_access, copy_to_host,
     copy_to_device, clear,        error_name,    error_text,      clear_error},
    kernels_of,
    "CUDA " SBN_TEXT(__CUDACC_VER_MAJOR__) "." SBN_TEXT(
        __CUDACC_VER_MINOR__) " for " GLUON_SYNCBN_CUDA_ARCHITECTURES};

// Runs when the library is loaded.
[[maybe_unused]] const bool ready = (set_cuda_backend(&kBackend), true);

}  // namespace
}  // namespace gluon_syncbn
