// What the simulator's functions of CUDA share, and what they queue.
#ifndef GLUON_SYNCBN_TESTS_PTXSIM_STATE_H_
#define GLUON_SYNCBN_TESTS_PTXSIM_STATE_H_

#include <map>
#include <mutex>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "memory.h"
#include "ptx.h"
#include "ptxsim.h"
#include "streams.h"
#include "warp.h"

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

// What is counted of the calls of CUDA's functions, and what may become of one instead of its work.
// Only of those that this program makes, or the library gluon_syncbn, and not MXNet.
class Calls {
 public:
  // A call of a function from this address. Returns the error that it ends with at once, or 0.
  int enter(const std::string& function, void* caller);

  // Adds to a count, if the thread's last call that entered was one of those.
  void add(const std::string& name, uint64_t count);
  uint64_t count(const std::string& name) const;

  // After `calls` more calls, one of this function fails. -1: none does.
  void fail_next(const std::string& function, int calls) { left_[function] = calls; }

 private:
  std::map<std::string, uint64_t> counts_;
  std::map<std::string, int> left_;
};

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
  int devices = 64;
  Calls calls;
  // See ptxsim_set_peers.
  std::string peers;
  std::optional<std::mt19937> random;
  bool counts_wanted = false;
  std::vector<LaunchCounts> counts;
  RunOnHost run_on_host = nullptr;
};

State& state();
void set_peers(State* state, const std::string& which);

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
