// The shared memory of a block, and a watch over races in it.
#ifndef GLUON_SYNCBN_TESTS_PTXSIM_SHARED_MEMORY_H_
#define GLUON_SYNCBN_TESTS_PTXSIM_SHARED_MEMORY_H_

#include <cstdint>
#include <vector>

#include "ptx.h"

namespace ptxsim {

class SharedMemory {
 public:
  explicit SharedMemory(int size);

  // Before a block starts.
  void reset();
  // When all threads of the block have met.
  void pass_barrier() { ++phase_; }

  bool holds(uint64_t address, int bytes) const { return address + bytes <= touched_.size(); }
  char* at(uint64_t address) { return memory_.data() + address; }

  // Notes an access. Returns a thread with whose access it races, or -1. Threads of one warp may
  // not rely on running together: there must be a shuffle or __syncwarp() between their accesses,
  // each of which begins a phase of the warp.
  int touch(int thread, uint32_t phase_of_warp, uint64_t address, int bytes, bool writes);

  // How often the banks are accessed for a request: those of 4 bytes for all lanes together, of 8
  // for a half of them, of 16 for a quarter. A bank gives one word at a time.
  static uint64_t waves(const uint64_t* addresses, uint32_t active, int bytes);

 private:
  // Who has accessed a byte in this phase: -1 is nobody.
  struct Touch {
    uint32_t phase = 0, phase_of_warp = 0;
    int16_t writer = -1, reader = -1, other_reader = -1;

    bool is_by_warp_alone(int warp) const;
  };
  static int race(const Touch& touch, int thread, uint32_t phase_of_warp, bool writes);

  std::vector<char> memory_;
  std::vector<Touch> touched_;
  uint32_t phase_ = 1;
};

}  // namespace ptxsim

#endif  // GLUON_SYNCBN_TESTS_PTXSIM_SHARED_MEMORY_H_
