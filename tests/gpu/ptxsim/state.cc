#include "state.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>

#include "decoder.h"

namespace ptxsim {

thread_local int current_device = 0, last_error = kSuccess;

void set_peers(State* state, const std::string& which) {
  const bool is_known = contains({"", "none", "one way", "refused"}, which);
  if (!is_known) stop("peers are 'none', 'one way' or 'refused', not " + which);
  state->peers = which;
}

namespace {

// How often each instruction ran, in a file that PTXSIM_COVERAGE names: a line for the kernel, and
// one for each instruction.
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

void access(const void* memory, size_t bytes, bool writes) {
  state().memory.access(memory, bytes, writes);
}

// The same of what was there when the work was queued.
void use(const void* memory, size_t bytes, bool writes) {
  if (!state().memory.holds(memory, bytes)) stop("memory is freed that a stream has yet to use");
  access(memory, bytes, writes);
}

}  // namespace

State& state() {
  static State* const all = [] {
    State* const created = new State;
    if (const char* seed = std::getenv("PTXSIM_SEED")) {
      created->random.emplace(static_cast<unsigned>(std::atoi(seed)));
    }
    if (const char* count = std::getenv("PTXSIM_DEVICES")) created->devices = std::atoi(count);
    if (const char* peers = std::getenv("PTXSIM_PEERS")) set_peers(created, peers);
    std::atexit(write_coverage);
    return created;
  }();
  return *all;
}

// PTX is a text between two zeros, unless it is compressed.
std::string ptx_of(const void* fat_binary) {
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

std::optional<int> device_of(void* stream) {
  if (!stream) return current_device;
  return state().streams.device_of(stream);
}

int launch(const void* function, dim3 grid, dim3 block, void** arguments, void* stream) {
  State& s = state();
  const auto name = s.names.find(function);
  if (name == s.names.end()) return fail(kInvalidFunction);
  if (device_of(stream) != current_device) return fail(kInvalidHandle);
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
  if (grid.z > 1 || block.x != threads)
    stop("a grid with a z, or a block with a y, is not supported");
  const Launch launch{kernel,         grid,           block.x, parameters_of(kernel, arguments),
                      current_device, s.counts_wanted};
  s.streams.queue(stream, current_device, kernel.name.c_str(), [&s, launch] {
    const Counts counts = run(launch, s.memory, s.random ? &*s.random : nullptr);
    if (!launch.counted) return;
    s.counts.push_back({launch.kernel.name, counts});
  });
  return kSuccess;
}

// A copy to or from a device. The other side may be any memory of the host, which counts as what it
// is when the function is called: so it is copied then, or waited for.
int copy(void* to, const void* from, size_t bytes, int kind, void* stream) {
  enum Kind { kHostToDevice = 1, kDeviceToHost = 2 };
  State& s = state();
  // Unlike a launch, on whatever device the stream is.
  const std::optional<int> device = device_of(stream);
  if (!device) return fail(kInvalidHandle);
  const bool writes_known = s.memory.holds(to, bytes), reads_known = s.memory.holds(from, bytes);
  if (kind != kDeviceToHost && !writes_known) return fail(kInvalidValue);
  if (kind != kHostToDevice && !reads_known) return fail(kInvalidValue);
  std::optional<std::vector<char>> staged;
  if (!reads_known && s.streams.defers()) {
    staged.emplace(static_cast<const char*>(from), static_cast<const char*>(from) + bytes);
  }
  s.calls.add("bytes copied", bytes);
  if (kind == kHostToDevice) s.calls.add("copies to a device", 1);
  s.streams.queue(stream, *device, "a copy", [=, &s] {
    if (reads_known) use(from, bytes, false);
    if (writes_known) use(to, bytes, true);
    std::memmove(to, staged ? staged->data() : from, bytes);
  });
  if (!writes_known) s.streams.finish(stream, *device);
  return kSuccess;
}

int fill(void* memory, int value, size_t bytes, void* stream) {
  State& s = state();
  const std::optional<int> device = device_of(stream);
  if (!device) return fail(kInvalidHandle);
  if (!s.memory.holds(memory, bytes)) return fail(kInvalidValue);
  s.streams.queue(stream, *device, "a fill", [=] {
    use(memory, bytes, true);
    std::memset(memory, value, bytes);
  });
  return kSuccess;
}

void stop(const std::string& what) {
  std::fprintf(stderr, "ptxsim: %s\n", what.c_str());
  std::abort();
}

}  // namespace ptxsim
