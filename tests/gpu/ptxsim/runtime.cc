// The functions of the CUDA runtime that runtime.cu and nvcc's code call.
// What CUDA forbids is refused, or ends the process. Kernels of all devices run one at a time.
#include <cstdlib>
#include <string>
#include <utility>

#include "state.h"

namespace ptxsim {
namespace {

using Lock = std::lock_guard<std::mutex>;

thread_local dim3 pushed_grid, pushed_block;
thread_local void* pushed_stream;

// Ends the function that the project or MXNet has called, where it is to fail.
#define ENTER_AS(function)                                                          \
  const Lock lock(state().mutex);                                                   \
  if (const int error = state().calls.enter(function, __builtin_return_address(0))) \
    return fail(error);
#define ENTER ENTER_AS(__func__)

int allocate(void** memory, size_t bytes, int device) {
  *memory = state().memory.allocate(bytes, device);
  return *memory ? kSuccess : fail(kOutOfMemory);
}

int release(void* memory) {
  state().streams.act("giving it back");
  return state().memory.release(memory) ? kSuccess : fail(kInvalidValue);
}

bool can_access(int device, int peer) {
  const std::string& peers = state().peers;
  return device != peer && peers != "none" && (peers != "one way" || device < peer);
}

}  // namespace

std::vector<LaunchCounts> take_counts() {
  const Lock lock(state().mutex);
  state().counts_wanted = true;
  std::vector<LaunchCounts> taken;
  taken.swap(state().counts);
  return taken;
}

void run_others_on_host(RunOnHost run) {
  const Lock lock(state().mutex);
  state().run_on_host = run;
}

void use_pages(Pages pages, int devices) {
  const Lock lock(state().mutex);
  state().memory.set_pages(pages);
  state().devices = devices;
}

}  // namespace ptxsim

using namespace ptxsim;

// For MXNet, whose library libcudart.so.11.0 this is a part of (simgpu).
#pragma GCC visibility push(default)
extern "C" {

// What nvcc's code calls.

void** __cudaRegisterFatBinary(void* fat_binary) {
  const Lock lock(state().mutex);
  for (auto& [name, kernel] : parse(ptx_of(fat_binary))) {
    state().kernels[name] = std::move(kernel);
  }
  static void* handle;
  return &handle;
}
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
char __cudaInitModule(void**) { return 1; }

void __cudaRegisterFunction(void**, const char* function, char*, const char* name, int, void*,
                            void*, void*, void*, int*) {
  const Lock lock(state().mutex);
  state().names[function] = name;
}

// Kernels with variables are refused: the parser stops at them.
void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}

unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t, void* stream) {
  pushed_grid = grid;
  pushed_block = block;
  pushed_stream = stream;
  return kSuccess;
}

int __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, void** stream) {
  *grid = pushed_grid;
  *block = pushed_block;
  *shared = 0;
  *stream = pushed_stream;
  return kSuccess;
}

int cudaLaunchKernel(const void* function, dim3 grid, dim3 block, void** arguments, size_t,
                     void* stream) {
  ENTER;
  return launch(function, grid, block, arguments, stream);
}

// Since CUDA 13: the handle of a kernel, and its launch.
int __cudaGetKernel(void** kernel, const void* function) {
  *kernel = const_cast<void*>(function);
  return kSuccess;
}
int __cudaLaunchKernel(const void* kernel, dim3 grid, dim3 block, void** arguments, size_t,
                       void* stream) {
  ENTER_AS("cudaLaunchKernel");
  return launch(kernel, grid, block, arguments, stream);
}

// What runtime.cu calls.

int cudaGetLastError() { return std::exchange(last_error, kSuccess); }
int cudaPeekAtLastError() { return last_error; }
const char* cudaGetErrorName(int error) {
  return error == kOutOfMemory ? "cudaErrorMemoryAllocation"
         : error               ? "cudaErrorUnknown"
                               : "cudaSuccess";
}
const char* cudaGetErrorString(int error) {
  return error == kOutOfMemory ? "out of memory" : error ? "unknown error" : "no error";
}

int cudaGetDevice(int* device) {
  ENTER;
  *device = current_device;
  return kSuccess;
}
int cudaSetDevice(int device) {
  ENTER;
  if (device < 0 || device >= state().devices) return fail(kInvalidDevice);
  current_device = device;
  return kSuccess;
}
int cudaGetDeviceCount(int* count) {
  *count = state().devices;
  return kSuccess;
}
int cudaDeviceCanAccessPeer(int* can, int device, int peer) {
  ENTER;
  *can = can_access(device, peer);
  return kSuccess;
}
int cudaDeviceEnablePeerAccess(int peer, unsigned) {
  ENTER;
  if (!can_access(current_device, peer) || state().peers == "refused") {
    return fail(kPeerAccessUnsupported);
  }
  const bool is_new = state().memory.enable_peer_access(current_device, peer);
  return is_new ? kSuccess : fail(kPeerAccessAlreadyEnabled);
}

int cudaMalloc(void** memory, size_t bytes) {
  ENTER;
  return allocate(memory, bytes, current_device);
}
int cudaFree(void* memory) {
  ENTER;
  return release(memory);
}
int cudaHostAlloc(void** memory, size_t bytes, unsigned) {
  ENTER;
  return allocate(memory, bytes, kHost);
}
int cudaFreeHost(void* memory) {
  ENTER;
  return release(memory);
}

int cudaDeviceSynchronize() {
  ENTER;
  state().streams.finish_device(current_device);
  return kSuccess;
}

int cudaStreamCreateWithFlags(void** stream, unsigned flags) {
  ENTER;
  *stream = state().streams.create(current_device, flags == 0);
  return kSuccess;
}
int cudaStreamDestroy(void* stream) {
  ENTER;
  return state().streams.destroy(stream) ? kSuccess : fail(kInvalidHandle);
}
int cudaStreamSynchronize(void* stream) {
  ENTER;
  const std::optional<int> device = device_of(stream);
  if (!device) return fail(kInvalidHandle);
  state().streams.finish(stream, *device);
  return kSuccess;
}

int cudaEventCreateWithFlags(void** event, unsigned) {
  ENTER;
  *event = new char;
  state().events[*event] = {current_device};
  return kSuccess;
}
int cudaEventDestroy(void* event) {
  ENTER;
  if (!state().events.erase(event)) return fail(kInvalidHandle);
  delete static_cast<char*>(event);
  return kSuccess;
}
int cudaEventRecord(void* event, void* stream) {
  ENTER;
  const auto found = state().events.find(event);
  if (found == state().events.end() || device_of(stream) != found->second.device) {
    return fail(kInvalidHandle);
  }
  found->second.mark = state().streams.record(stream, current_device);
  return kSuccess;
}
// CUDA does not wait for an event that has not been recorded, which no caller can want.
int cudaStreamWaitEvent(void* stream, void* event, unsigned) {
  ENTER;
  const auto found = state().events.find(event);
  const std::optional<int> device = device_of(stream);
  if (found == state().events.end() || !device) return fail(kInvalidHandle);
  if (!found->second.mark) stop("a stream waits for an event that has not been recorded");
  state().streams.wait(stream, *device, *found->second.mark);
  return kSuccess;
}

int cudaMemcpyAsync(void* to, const void* from, size_t bytes, int kind, void* stream) {
  ENTER;
  return copy(to, from, bytes, kind, stream);
}
int cudaMemsetAsync(void* memory, int value, size_t bytes, void* stream) {
  ENTER;
  return fill(memory, value, bytes, stream);
}

// What tests ask of the simulator; see ptxsim.h.

uint64_t ptxsim_calls(const char* name) {
  const Lock lock(state().mutex);
  return state().calls.count(name);
}
void ptxsim_fail_next(const char* function, int calls) {
  const Lock lock(state().mutex);
  state().calls.fail_next(function, calls);
}
void ptxsim_set_peers(const char* which) {
  const Lock lock(state().mutex);
  set_peers(&state(), which);
}
void ptxsim_set_order(const char* order) {
  const Lock lock(state().mutex);
  state().streams.set_order(order);
}
void ptxsim_work_on_host(const char* name, void* stream, const PtxsimArray* arrays, size_t count) {
  State& s = state();
  const Lock lock(s.mutex);
  const int device = device_of(stream).value();
  s.streams.queue(stream, device, name, [=, &s] {
    for (const PtxsimArray* a = arrays; a != arrays + count; ++a) {
      s.memory.access(a->memory, a->bytes, a->writes);
    }
  });
  s.streams.catch_up(stream, device);
}
}
#pragma GCC visibility pop
