// What programs ask of the simulator, besides CUDA's functions.
#ifndef GLUON_SYNCBN_TESTS_PTXSIM_PTXSIM_H_
#define GLUON_SYNCBN_TESTS_PTXSIM_PTXSIM_H_

#include <cstdint>
#include <string>
#include <vector>

namespace ptxsim {

// A sector is 32 bytes of global memory at a multiple of 32, which a warp's request takes whole.
struct Counts {
  uint64_t warp_instructions = 0, thread_instructions = 0;
  // Instructions of threads that take units of floating point: no moves, no changes of sign.
  uint64_t floats = 0, doubles = 0;
  // Requests of warps to global memory, and what they ask for.
  uint64_t loads = 0, load_bytes = 0, load_sectors = 0;
  uint64_t stores = 0, store_bytes = 0, store_sectors = 0;
  // Sectors of the whole launch, each once.
  uint64_t unique_load_sectors = 0, unique_store_sectors = 0;
  // Requests to shared memory, and how often its banks are accessed for them.
  uint64_t shared_requests = 0, shared_waves = 0;
  uint64_t shuffles = 0, barriers = 0;
  // Branches that some lanes of a warp take and others do not.
  uint64_t divergent_branches = 0;
};

struct LaunchCounts {
  // As the compiler has mangled it.
  std::string kernel;
  Counts counts;
};

// Of all launches since the last call; the first call starts the counting.
std::vector<LaunchCounts> take_counts();

// From now on kernels may use all memory of the process, as MXNet's arrays are not allocated by the
// simulator.
void take_host_memory();

// Kernels without PTX are given to `run`, by their mangled name, which returns whether it knows
// them.
using RunOnHost = bool (*)(const std::string& kernel, void** arguments);
void run_others_on_host(RunOnHost run);

}  // namespace ptxsim

#endif  // GLUON_SYNCBN_TESTS_PTXSIM_PTXSIM_H_
