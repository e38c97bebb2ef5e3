// The functions of the CUDA runtime that runtime.cu and nvcc's code call, and those of the driver.
// Work is done when it is queued. What CUDA forbids is refused, or ends the process.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "launch.h"
#include "memory.h"
#include "ptx.h"
#include "ptxsim.h"

struct dim3 {
  unsigned x, y, z;
};

namespace ptxsim {
namespace {

constexpr int kDevices = 64, kMultiprocessors = 2;
enum Error {
  kSuccess = 0,
  kInvalidValue = 1,
  kOutOfMemory = 2,
  kInvalidConfiguration = 9,
  kInvalidFunction = 98,
  kInvalidDevice = 101,
  kInvalidHandle = 400,
  kPeerAccessAlreadyEnabled = 704
};
constexpr int kMultiprocessorCount = 16;

struct Event {
  int device;
  bool recorded = false;
};

struct State {
  std::mutex mutex;
  std::map<std::string, Kernel> kernels;
  // By the address of the function on the host.
  std::map<const void*, std::string> names;
  Memory memory;
  // The devices of streams.
  std::map<void*, int> streams;
  std::map<void*, Event> events;
  std::set<int> contexts;
  std::optional<std::mt19937> random;
  bool counts_wanted = false;
  std::vector<LaunchCounts> counts;
};

using Lock = std::lock_guard<std::mutex>;

// How often each instruction ran, in a file that PTXSIM_COVERAGE names: a line for the kernel, and
// one for each instruction.
void write_coverage();

State& state() {
  static State* const all = [] {
    State* const created = new State;
    if (const char* seed = std::getenv("PTXSIM_SEED")) {
      created->random.emplace(static_cast<unsigned>(std::atoi(seed)));
    }
    std::atexit(write_coverage);
    return created;
  }();
  return *all;
}

void write_coverage() {
  const char* const path = std::getenv("PTXSIM_COVERAGE");
  if (!path) return;
  std::ofstream file(path);
  for (const auto& [name, kernel] : state().kernels) {
    file << "kernel " << name << "\n";
    for (size_t i = 0; i < kernel.code.size(); ++i) {
      file << kernel.code[i].line << " " << kernel.ran[i] << " " << kernel.code[i].text << "\n";
    }
  }
  if (!file) stop(std::string("cannot write ") + path);
}

thread_local int current_device = 0;
thread_local int last_error = kSuccess;
thread_local dim3 pushed_grid, pushed_block;
thread_local void* pushed_stream;

int fail(int error) { return last_error = error; }

// PTX is a text between two zeros, unless it is compressed.
std::string ptx_of(const void* fat_binary) {
  if (const char* const path = std::getenv("PTXSIM_PTX")) {
    std::ifstream file(path);
    if (!file) stop(std::string("cannot read ") + path);
    return {std::istreambuf_iterator<char>(file), {}};
  }
  struct Wrapper {
    uint32_t magic, version;
    const char* data;
  };
  const auto number = [](const char* from, auto zero) {
    std::memcpy(&zero, from, sizeof(zero));
    return zero;
  };
  const char* at = static_cast<const Wrapper*>(fat_binary)->data;
  const char* const begin = at + number(at + 6, uint16_t{});
  const char* const end = begin + number(at + 8, uint64_t{});
  constexpr uint16_t kPtx = 1;
  for (at = begin; at < end;) {
    const uint32_t head = number(at + 4, uint32_t{});
    const uint64_t size = number(at + 8, uint64_t{});
    if (number(at, uint16_t{}) == kPtx) {
      if (number(at + 16, uint32_t{})) stop("the PTX is compressed: compile with --no-compress");
      return {at + head, strnlen(at + head, size)};
    }
    at += head + size;
  }
  stop("there is no PTX: compile for code=compute_75 or another");
}

// The device of a stream; null is the one of each device.
std::optional<int> device_of(void* stream) {
  if (!stream) return current_device;
  const auto found = state().streams.find(stream);
  if (found == state().streams.end()) return {};
  return found->second;
}

bool fits(void* stream) { return device_of(stream) == current_device; }

int launch(const void* function, dim3 grid, dim3 block, void** arguments, void* stream) {
  State& s = state();
  const Lock lock(s.mutex);
  const auto name = s.names.find(function);
  if (name == s.names.end() || !s.kernels.count(name->second)) return fail(kInvalidFunction);
  if (!fits(stream)) return fail(kInvalidHandle);
  const uint64_t threads = uint64_t{block.x} * block.y * block.z;
  const bool empty = grid.x == 0 || grid.y == 0 || grid.z == 0 || threads == 0;
  if (empty || grid.y > 65535 || grid.z > 65535 || threads > 1024) {
    return fail(kInvalidConfiguration);
  }
  const Launch launch{
      s.kernels[name->second], {grid.x, grid.y, grid.z}, {block.x, block.y, block.z}, arguments,
      current_device,          s.counts_wanted};
  const Counts counts = run(launch, s.memory, s.random ? &*s.random : nullptr);
  if (s.counts_wanted) s.counts.push_back({name->second, counts});
  return kSuccess;
}

int allocate(void** memory, size_t bytes, int device) {
  const Lock lock(state().mutex);
  *memory = state().memory.allocate(bytes, device);
  return *memory ? kSuccess : fail(kOutOfMemory);
}

int release(void* memory) {
  const Lock lock(state().mutex);
  return state().memory.release(memory) ? kSuccess : fail(kInvalidValue);
}

// A copy to or from a device. The other side may be any memory of the host.
int copy(void* to, const void* from, size_t bytes, int kind, void* stream) {
  enum Kind { kHostToDevice = 1, kDeviceToHost = 2, kDeviceToDevice = 3 };
  const Lock lock(state().mutex);
  if (!fits(stream)) return fail(kInvalidHandle);
  const Memory& memory = state().memory;
  const bool to_device = kind == kHostToDevice || kind == kDeviceToDevice;
  const bool from_device = kind == kDeviceToHost || kind == kDeviceToDevice;
  if (to_device && !memory.holds(to, bytes)) return fail(kInvalidValue);
  if (from_device && !memory.holds(from, bytes)) return fail(kInvalidValue);
  std::memcpy(to, from, bytes);
  return kSuccess;
}

int fill(void* memory, int value, size_t bytes, void* stream) {
  const Lock lock(state().mutex);
  if (!fits(stream)) return fail(kInvalidHandle);
  if (!state().memory.holds(memory, bytes)) return fail(kInvalidValue);
  std::memset(memory, value, bytes);
  return kSuccess;
}

int get_driver_device(int* handle, int ordinal) {
  *handle = ordinal;
  return kSuccess;
}

int get_context_state(int handle, unsigned* flags, int* active) {
  const Lock lock(state().mutex);
  *flags = 0;
  *active = static_cast<int>(state().contexts.count(handle));
  return kSuccess;
}

// The handle of the driver's library, whatever is at the address.
char driver;

}  // namespace

void stop(const std::string& what) {
  std::fprintf(stderr, "ptxsim: %s\n", what.c_str());
  std::abort();
}

std::vector<LaunchCounts> take_counts() {
  const Lock lock(state().mutex);
  state().counts_wanted = true;
  std::vector<LaunchCounts> taken;
  taken.swap(state().counts);
  return taken;
}

void take_host_memory() {
  const Lock lock(state().mutex);
  state().memory.take_unknown();
}

}  // namespace ptxsim

using namespace ptxsim;

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

void __cudaRegisterVar(void**, char*, char*, const char* name, int, size_t, int, int) {
  stop(std::string("variables on the device are not supported: ") + name);
}

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
  return launch(function, grid, block, arguments, stream);
}

// Since CUDA 13: the handle of a kernel, and its launch.
int __cudaGetKernel(void** kernel, const void* function) {
  *kernel = const_cast<void*>(function);
  return kSuccess;
}
int __cudaLaunchKernel(const void* kernel, dim3 grid, dim3 block, void** arguments, size_t,
                       void* stream) {
  return launch(kernel, grid, block, arguments, stream);
}

// What runtime.cu calls.

int cudaGetLastError() { return std::exchange(last_error, kSuccess); }
const char* cudaGetErrorName(int error) { return error ? "cudaErrorUnknown" : "cudaSuccess"; }
const char* cudaGetErrorString(int error) { return error ? "unknown error" : "no error"; }

int cudaGetDevice(int* device) {
  *device = current_device;
  return kSuccess;
}
int cudaSetDevice(int device) {
  if (device < 0 || device >= kDevices) return fail(kInvalidDevice);
  const Lock lock(state().mutex);
  current_device = device;
  state().contexts.insert(device);
  return kSuccess;
}
int cudaGetDeviceCount(int* count) {
  *count = kDevices;
  return kSuccess;
}
int cudaDeviceGetAttribute(int* value, int attribute, int) {
  if (attribute != kMultiprocessorCount) return fail(kInvalidValue);
  *value = kMultiprocessors;
  return kSuccess;
}
int cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void*, int, size_t) {
  *blocks = 2;
  return kSuccess;
}
int cudaDeviceCanAccessPeer(int* can, int device, int peer) {
  *can = device != peer;
  return kSuccess;
}
int cudaDeviceEnablePeerAccess(int peer, unsigned) {
  const Lock lock(state().mutex);
  const bool is_new = state().memory.enable_peer_access(current_device, peer);
  return is_new ? kSuccess : fail(kPeerAccessAlreadyEnabled);
}

int cudaMalloc(void** memory, size_t bytes) { return allocate(memory, bytes, current_device); }
int cudaFree(void* memory) { return release(memory); }
int cudaHostAlloc(void** memory, size_t bytes, unsigned) { return allocate(memory, bytes, kHost); }
int cudaFreeHost(void* memory) { return release(memory); }

int cudaStreamCreateWithFlags(void** stream, unsigned) {
  const Lock lock(state().mutex);
  *stream = new char;
  state().streams[*stream] = current_device;
  return kSuccess;
}
int cudaStreamDestroy(void* stream) {
  const Lock lock(state().mutex);
  if (!state().streams.erase(stream)) return fail(kInvalidHandle);
  delete static_cast<char*>(stream);
  return kSuccess;
}
int cudaStreamSynchronize(void* stream) {
  const Lock lock(state().mutex);
  return device_of(stream) ? kSuccess : fail(kInvalidHandle);
}

int cudaEventCreateWithFlags(void** event, unsigned) {
  const Lock lock(state().mutex);
  *event = new char;
  state().events[*event] = {current_device};
  return kSuccess;
}
int cudaEventDestroy(void* event) {
  const Lock lock(state().mutex);
  if (!state().events.erase(event)) return fail(kInvalidHandle);
  delete static_cast<char*>(event);
  return kSuccess;
}
int cudaEventRecord(void* event, void* stream) {
  const Lock lock(state().mutex);
  const auto found = state().events.find(event);
  if (found == state().events.end() || device_of(stream) != found->second.device) {
    return fail(kInvalidHandle);
  }
  found->second.recorded = true;
  return kSuccess;
}
// CUDA does not wait for an event that has not been recorded, which no caller can want.
int cudaStreamWaitEvent(void* stream, void* event, unsigned) {
  const Lock lock(state().mutex);
  const auto found = state().events.find(event);
  if (found == state().events.end() || !device_of(stream)) return fail(kInvalidHandle);
  if (!found->second.recorded) stop("a stream waits for an event that has not been recorded");
  return kSuccess;
}

int cudaMemcpyAsync(void* to, const void* from, size_t bytes, int kind, void* stream) {
  return copy(to, from, bytes, kind, stream);
}
int cudaMemsetAsync(void* memory, int value, size_t bytes, void* stream) {
  return fill(memory, value, bytes, stream);
}

// runtime.cu asks the driver's library, which is not there (linked with --wrap=dlopen,dlsym).

void* __real_dlopen(const char* name, int flags);
void* __wrap_dlopen(const char* name, int flags) {
  if (name && std::string(name) == "libcuda.so.1") return &driver;
  return __real_dlopen(name, flags);
}

void* __real_dlsym(void* library, const char* name);
void* __wrap_dlsym(void* library, const char* name) {
  if (library != &driver) return __real_dlsym(library, name);
  const std::string function = name;
  if (function == "cuDeviceGet") return reinterpret_cast<void*>(get_driver_device);
  if (function == "cuDevicePrimaryCtxGetState") return reinterpret_cast<void*>(get_context_state);
  return nullptr;
}
}
