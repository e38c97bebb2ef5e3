// What programs ask of the simulator, besides CUDA's functions.
#ifndef GLUON_SYNCBN_TESTS_PTXSIM_PTXSIM_H_
#define GLUON_SYNCBN_TESTS_PTXSIM_PTXSIM_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace ptxsim {

// A sector is 32 bytes of global memory at a multiple of 32, which a warp's request takes whole.
struct Counts {
  // Of threads, idle ones of a warp too, as they take its time: all instructions, and those that
  // take units for double: no moves, no changes of sign.
  uint64_t instructions = 0, doubles = 0;
  // What the requests of warps to global memory ask for, and the same of the whole launch, each
  // sector once.
  uint64_t load_sectors = 0, store_sectors = 0;
  uint64_t unique_load_sectors = 0, unique_store_sectors = 0;
};

struct LaunchCounts {
  // As the compiler has mangled it.
  std::string kernel;
  Counts counts;
};

// Of all launches since the last call; the first call starts the counting.
std::vector<LaunchCounts> take_counts();

// Kernels without PTX are given to `run`, by their mangled name, which returns whether it knows
// them. It tells of their accesses to memory.
using Access = void (*)(const void* memory, size_t bytes, bool writes);
using RunOnHost = bool (*)(const std::string& kernel, void** arguments, Access access);
void run_others_on_host(RunOnHost run);

// Where memory comes from, in place of the operating system, and how many devices there are, in
// place of PTXSIM_DEVICES: for a program whose kernels do not run here.
struct Pages {
  void* (*take)(size_t bytes);
  void (*give)(void* memory, size_t bytes);
};
void use_pages(Pages pages, int devices);

}  // namespace ptxsim

// Of what this program asks of CUDA, or the library gluon_syncbn inside MXNet.
extern "C" {

// How often a function of CUDA ("cudaMalloc") has been called, without calls that
// were to fail; or "bytes copied", or "copies to a
// device".
uint64_t ptxsim_calls(const char* name);

// After `calls` more calls, one of this function fails and does nothing. -1: none does.
void ptxsim_fail_next(const char* function, int calls);

// Which devices may have access to the memory of others: all of them (""), "none", "one way" (those
// with lower numbers), or "refused" (none, which shows when it is enabled).
void ptxsim_set_peers(const char* which);

// In which order streams do their work: at once (""), "late", or at random with a seed ("7"). By
// default that of PTXSIM_STREAMS.
void ptxsim_set_order(const char* order);

// What the host does in place of a kernel on this stream, after all that was queued there: it reads
// all of these arrays, or writes them.
struct PtxsimArray {
  const void* memory;
  size_t bytes;
  bool writes;
};
void ptxsim_work_on_host(const char* name, void* stream, const PtxsimArray* arrays, size_t count);
}

#endif  // GLUON_SYNCBN_TESTS_PTXSIM_PTXSIM_H_
