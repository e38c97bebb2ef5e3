// What the simulator's functions of CUDA share, and what they queue.
#ifndef GLUON_SYNCBN_TESTS_PTXSIM_STATE_H_
#define GLUON_SYNCBN_TESTS_PTXSIM_STATE_H_

#include <map>
#include <mutex>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "calls.h"
#include "launch.h"
#include "memory.h"
#include "ptx.h"
#include "ptxsim.h"
#include "streams.h"

namespace ptxsim {

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

struct Event {
  int device;
  // Of its last record.
  std::optional<Mark> mark{};
};

// Which devices may have access to the memory of others. kRefused: none, which shows when it is
// enabled.
enum class Peers { kAll, kNone, kOneWay, kRefused };
Peers peers_of(const std::string& name);

struct State {
  // Held by all functions of CUDA.
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
  Peers peers = Peers::kAll;
  std::optional<std::mt19937> random;
  bool counts_wanted = false;
  unsigned most_blocks = ~0u;
  std::vector<LaunchCounts> counts;
  RunOnHost run_on_host = nullptr;
};

State& state();

extern thread_local int current_device, last_error;
inline int fail(int error) { return last_error = error; }

// The text of the kernels in what nvcc has made. "": there is machine code only.
std::string ptx_of(const void* fat_binary);

// The device of a stream; null is the one of each device.
std::optional<int> device_of(void* stream);

// As the functions of CUDA. They return an error.
int launch(const void* function, dim3 grid, dim3 block, void** arguments, void* stream);
int copy(void* to, const void* from, size_t bytes, int kind, void* stream);
int fill(void* memory, int value, size_t bytes, void* stream);

}  // namespace ptxsim

#endif  // GLUON_SYNCBN_TESTS_PTXSIM_STATE_H_
