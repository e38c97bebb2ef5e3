// The execution of a kernel.
#ifndef GLUON_SYNCBN_TESTS_PTXSIM_WARP_H_
#define GLUON_SYNCBN_TESTS_PTXSIM_WARP_H_

#include <random>
#include <string>
#include <vector>

#include "memory.h"
#include "ptx.h"
#include "ptxsim.h"

struct dim3 {
  unsigned x, y, z;
};

namespace ptxsim {

struct Launch {
  const Kernel& kernel;
  // Its z is 1, and blocks have only an x.
  dim3 grid;
  unsigned threads;
  std::vector<char> parameters;
  int device;
  // Whether memory accesses are counted.
  bool counted;
};

// The arguments are as for cudaLaunchKernel.
std::vector<char> parameters_of(const Kernel& kernel, void** arguments);

// Runs all blocks, and their warps, in random order, or in order if `random` is null.
Counts run(const Launch& launch, const Memory& memory, std::mt19937* random);

// The shared memory of a block, and a watch over races in it.
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

// What the warps of a block share.
struct Block {
  const Launch& launch;
  const Memory& memory;
  SharedMemory shared;
  // Its place in the grid.
  dim3 place{};
  Counts counts{};
  // The sectors accessed.
  std::vector<uint64_t> loaded{}, stored{};
};

// 32 lanes that run in lockstep while they take the same branches. Of those that are apart, the
// ones that are furthest behind in the text run first, so that they meet again.
class Warp {
 public:
  Warp(Block* block, int index);

  void start();
  // Until all lanes that have not ended wait for the other warps.
  void advance();
  bool waits_for_block() const { return waits_for_block_; }
  void pass_barrier();

  // Ends the process. The message has the block, the thread and the instruction.
  [[noreturn]] void refuse(const std::string& what, const Instruction* i, int lane = 0) const;

 private:
  Block& block_;
  const int index_;
  uint64_t* const registers_;
  int next_[kLanes];
  // Lanes that have not ended, and those that wait at a shuffle, vote or barrier.
  uint32_t alive_ = 0, waiting_ = 0;
  bool waits_for_block_ = false;
  // Counts the times that lanes have met. See SharedMemory.
  uint32_t phase_ = 1;
  // Where the last access went.
  Allocation last_;

  uint64_t* values(int number) { return registers_ + static_cast<size_t>(number) * kLanes; }
  uint64_t special(const std::string& name, unsigned thread) const;
  void go_to(uint32_t lanes, int place);

  void wait_for_block();
  void run(uint32_t lanes, int place);
  uint32_t guarded(const Instruction& i, uint32_t lanes);
  void count(const Instruction& i, int place, uint32_t active);
  void branch(const Instruction& i, uint32_t lanes, uint32_t active, int place);
  // Whether the lanes have left.
  bool meet(const Instruction& i, uint32_t lanes, uint32_t active, int place);

  void shuffle(const Instruction& i, uint32_t lanes);
  void vote(const Instruction& i, uint32_t lanes);
  void load_parameter(const Instruction& i, uint32_t active);
  void access(const Instruction& i, uint32_t active);
  // Tells the races of the block.
  void note_access(const uint64_t* addresses, uint32_t active, int bytes, bool writes);
  char* place_of(const Instruction& i, int lane, uint64_t address, int bytes);
  void load(const Instruction& i, int lane, const char* from);
  void store(const Instruction& i, int lane, char* to);
  void count_access(const Instruction& i, const uint64_t* addresses, uint32_t active);
};

}  // namespace ptxsim

#endif  // GLUON_SYNCBN_TESTS_PTXSIM_WARP_H_
