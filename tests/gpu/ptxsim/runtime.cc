// The functions of the CUDA runtime that runtime.cu and nvcc's code call, and those of the driver.
// What CUDA forbids is refused, or ends the process. Kernels of all devices run one at a time.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "calls.h"
#include "launch.h"
#include "memory.h"
#include "ptx.h"
#include "ptxsim.h"
#include "streams.h"

struct dim3 {
  unsigned x, y, z;
};

namespace ptxsim {
namespace {

constexpr int kMultiprocessors = 2;
enum Error {
  kSuccess = 0,
  kInvalidValue = 1,
  kOutOfMemory = 2,
  kInvalidConfiguration = 9,
  kInvalidFunction = 98,
  kInvalidDevice = 101,
  kPeerAccessUnsupported = 217,
  kInvalidHandle = 400,
  kPeerAccessAlreadyEnabled = 704
};
constexpr int kMultiprocessorCount = 16;

struct Event {
  int device;
  // Of its last record.
  std::optional<Mark> mark{};
};

// Which devices may have access to the memory of others. kRefused: none, which shows when it is
// enabled.
enum class Peers { kAll, kNone, kOneWay, kRefused };
Peers peers_of(const std::string& name) {
  static const std::map<std::string, Peers> all = {{"", Peers::kAll},
                                                   {"none", Peers::kNone},
                                                   {"one way", Peers::kOneWay},
                                                   {"refused", Peers::kRefused}};
  const auto found = all.find(name);
  if (found == all.end()) stop("peers are 'none', 'one way' or 'refused', not " + name);
  return found->second;
}

std::string variable(const char* name) {
  const char* const value = std::getenv(name);
  return value ? value : "";
}

struct State {
  std::mutex mutex;
  std::map<std::string, Kernel> kernels;
  // By the address of the function on the host.
  std::map<const void*, std::string> names;
  Races races{stop};
  Memory memory{&races};
  Streams streams{std::getenv("PTXSIM_STREAMS"), &races};
  std::map<void*, Event> events;
  std::set<int> contexts;
  Calls calls;
  Peers peers = peers_of(variable("PTXSIM_PEERS"));
  std::optional<std::mt19937> random;
  bool counts_wanted = false;
  std::vector<LaunchCounts> counts;
  RunOnHost run_on_host = nullptr;
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

int device_count() {
  static const int count = [] {
    const char* const text = std::getenv("PTXSIM_DEVICES");
    return text ? std::atoi(text) : 64;
  }();
  return count;
}

thread_local int current_device = 0;
thread_local int last_error = kSuccess;
thread_local dim3 pushed_grid, pushed_block;
thread_local void* pushed_stream;

int fail(int error) { return last_error = error; }

// Ends the function that the project or MXNet has called, where it is to fail or is dropped.
std::optional<int> enter(const char* function, void* caller) {
  const Lock lock(state().mutex);
  const std::optional<int> error = state().calls.enter(function, caller);
  if (error && *error) fail(*error);
  return error;
}
#define ENTER_AS(function) \
  if (const auto error = enter(function, __builtin_return_address(0))) return *error
#define ENTER ENTER_AS(__func__)

// PTX is a text between two zeros, unless it is compressed. "": there is machine code only.
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
  return "";
}

// The device of a stream; null is the one of each device.
std::optional<int> device_of(void* stream) {
  if (!stream) return current_device;
  return state().streams.device_of(stream);
}

bool fits(void* stream) { return device_of(stream) == current_device; }

void access(const void* memory, size_t bytes, bool writes) {
  state().memory.access(memory, bytes, writes);
}

int launch(const void* function, dim3 grid, dim3 block, void** arguments, void* stream) {
  State& s = state();
  const Lock lock(s.mutex);
  const auto name = s.names.find(function);
  if (name == s.names.end()) return fail(kInvalidFunction);
  if (!fits(stream)) return fail(kInvalidHandle);
  const uint64_t threads = uint64_t{block.x} * block.y * block.z;
  const bool empty = grid.x == 0 || grid.y == 0 || grid.z == 0 || threads == 0;
  if (empty || grid.y > 65535 || grid.z > 65535 || threads > 1024) {
    return fail(kInvalidConfiguration);
  }
  const auto found = s.kernels.find(name->second);
  if (found == s.kernels.end()) {
    bool is_known = false;
    s.streams.queue(stream, current_device, name->second.c_str(), [&] {
      is_known = s.run_on_host && s.run_on_host(name->second, arguments, access);
    });
    s.streams.catch_up(stream, current_device);
    if (is_known) return kSuccess;
    std::fprintf(stderr, "ptxsim: there is no PTX of %s\n", name->second.c_str());
    return fail(kInvalidFunction);
  }
  const Kernel& kernel = found->second;
  std::vector<std::vector<char>> values;
  for (size_t i = 0; i < kernel.parameters.size(); ++i) {
    const char* const value = static_cast<const char*>(arguments[i]);
    values.emplace_back(value, value + kernel.parameters[i].size);
  }
  const int device = current_device;
  const auto work = [&s, &kernel, grid, block, device, values]() mutable {
    std::vector<void*> pointers;
    for (std::vector<char>& value : values) pointers.push_back(value.data());
    const Launch launch{kernel,
                        {grid.x, grid.y, grid.z},
                        {block.x, block.y, block.z},
                        pointers.data(),
                        device,
                        s.counts_wanted,
                        &s.races};
    const Counts counts = run(launch, s.memory, s.random ? &*s.random : nullptr);
    if (s.counts_wanted) s.counts.push_back({kernel.name, counts});
  };
  s.streams.queue(stream, device, kernel.name.c_str(), work);
  return kSuccess;
}

int allocate(void** memory, size_t bytes, int device) {
  const Lock lock(state().mutex);
  *memory = state().memory.allocate(bytes, device);
  return *memory ? kSuccess : fail(kOutOfMemory);
}

int release(void* memory) {
  const Lock lock(state().mutex);
  state().streams.act("giving it back");
  return state().memory.release(memory) ? kSuccess : fail(kInvalidValue);
}

// A copy to or from a device. The other side may be any memory of the host, which counts as what it
// is when the function is called: so it is copied then, or waited for.
int copy(void* to, const void* from, size_t bytes, int kind, void* stream) {
  enum Kind { kHostToDevice = 1, kDeviceToHost = 2, kDeviceToDevice = 3 };
  State& s = state();
  const Lock lock(s.mutex);
  // Unlike a launch, on whatever device the stream is.
  const std::optional<int> device = device_of(stream);
  if (!device) return fail(kInvalidHandle);
  const bool to_device = kind == kHostToDevice || kind == kDeviceToDevice;
  const bool from_device = kind == kDeviceToHost || kind == kDeviceToDevice;
  const bool writes_known = s.memory.holds(to, bytes), reads_known = s.memory.holds(from, bytes);
  if ((to_device && !writes_known) || (from_device && !reads_known)) return fail(kInvalidValue);
  std::optional<std::vector<char>> staged;
  if (!reads_known && s.streams.defers()) {
    staged.emplace(static_cast<const char*>(from), static_cast<const char*>(from) + bytes);
  }
  s.calls.add("bytes copied", bytes);
  if (kind == kHostToDevice) s.calls.add("copies to a device", 1);
  s.streams.queue(stream, *device, "a copy", [=, &s] {
    if ((writes_known && !s.memory.holds(to, bytes)) ||
        (reads_known && !s.memory.holds(from, bytes))) {
      stop("memory is freed while a stream has yet to copy it");
    }
    if (!staged) s.memory.access(from, bytes, false);
    s.memory.access(to, bytes, true);
    std::memmove(to, staged ? staged->data() : from, bytes);
  });
  if (!writes_known) s.streams.finish(stream, *device);
  return kSuccess;
}

int fill(void* memory, int value, size_t bytes, void* stream) {
  State& s = state();
  const Lock lock(s.mutex);
  const std::optional<int> device = device_of(stream);
  if (!device) return fail(kInvalidHandle);
  if (!s.memory.holds(memory, bytes)) return fail(kInvalidValue);
  s.streams.queue(stream, *device, "a fill", [=, &s] {
    if (!s.memory.holds(memory, bytes)) stop("memory is freed while a stream has yet to fill it");
    s.memory.access(memory, bytes, true);
    std::memset(memory, value, bytes);
  });
  return kSuccess;
}

bool can_access(int device, int peer) {
  const Peers peers = state().peers;
  return device != peer && peers != Peers::kNone && (peers != Peers::kOneWay || device < peer);
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

void run_others_on_host(RunOnHost run) {
  const Lock lock(state().mutex);
  state().run_on_host = run;
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
  if (device < 0 || device >= device_count()) return fail(kInvalidDevice);
  const Lock lock(state().mutex);
  current_device = device;
  state().contexts.insert(device);
  return kSuccess;
}
int cudaGetDeviceCount(int* count) {
  *count = device_count();
  return kSuccess;
}
int cudaDeviceGetAttribute(int* value, int attribute, int) {
  ENTER;
  if (attribute != kMultiprocessorCount) return fail(kInvalidValue);
  *value = kMultiprocessors;
  return kSuccess;
}
int cudaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void*, int, size_t) {
  *blocks = 2;
  return kSuccess;
}
int cudaDeviceCanAccessPeer(int* can, int device, int peer) {
  ENTER;
  const Lock lock(state().mutex);
  *can = can_access(device, peer);
  return kSuccess;
}
int cudaDeviceEnablePeerAccess(int peer, unsigned) {
  ENTER;
  const Lock lock(state().mutex);
  if (!can_access(current_device, peer) || state().peers == Peers::kRefused) {
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
  const Lock lock(state().mutex);
  state().streams.finish_device(current_device);
  return kSuccess;
}

int cudaStreamCreateWithFlags(void** stream, unsigned flags) {
  ENTER;
  const Lock lock(state().mutex);
  *stream = state().streams.create(current_device, flags == 0);
  return kSuccess;
}
int cudaStreamDestroy(void* stream) {
  ENTER;
  const Lock lock(state().mutex);
  return state().streams.destroy(stream) ? kSuccess : fail(kInvalidHandle);
}
int cudaStreamSynchronize(void* stream) {
  ENTER;
  const Lock lock(state().mutex);
  const std::optional<int> device = device_of(stream);
  if (!device) return fail(kInvalidHandle);
  state().streams.finish(stream, *device);
  return kSuccess;
}

int cudaEventCreateWithFlags(void** event, unsigned) {
  ENTER;
  const Lock lock(state().mutex);
  *event = new char;
  state().events[*event] = {current_device};
  return kSuccess;
}
int cudaEventDestroy(void* event) {
  ENTER;
  const Lock lock(state().mutex);
  if (!state().events.erase(event)) return fail(kInvalidHandle);
  delete static_cast<char*>(event);
  return kSuccess;
}
int cudaEventRecord(void* event, void* stream) {
  ENTER;
  const Lock lock(state().mutex);
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
  const Lock lock(state().mutex);
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

// What runtime.cu asks the driver's library, which is not there (linked with --wrap=dlopen,dlsym).

int cuDeviceGet(int* handle, int ordinal) {
  *handle = ordinal;
  return kSuccess;
}
int cuDevicePrimaryCtxGetState(int handle, unsigned* flags, int* active) {
  const Lock lock(state().mutex);
  *flags = 0;
  *active = static_cast<int>(state().contexts.count(handle));
  return kSuccess;
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
  state().peers = peers_of(which);
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
#pragma GCC visibility pop

void* __real_dlopen(const char* name, int flags);
void* __wrap_dlopen(const char* name, int flags) {
  if (name && std::string(name) == "libcuda.so.1") return &driver;
  return __real_dlopen(name, flags);
}

void* __real_dlsym(void* library, const char* name);
void* __wrap_dlsym(void* library, const char* name) {
  if (library != &driver) return __real_dlsym(library, name);
  const std::string function = name;
  if (function == "cuDeviceGet") return reinterpret_cast<void*>(cuDeviceGet);
  if (function == "cuDevicePrimaryCtxGetState")
    return reinterpret_cast<void*>(cuDevicePrimaryCtxGetState);
  return nullptr;
}
}
