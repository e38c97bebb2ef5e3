// Launches of kernels.
#ifndef GLUON_SYNCBN_TESTS_PTXSIM_LAUNCH_H_
#define GLUON_SYNCBN_TESTS_PTXSIM_LAUNCH_H_

#include <random>

#include "memory.h"
#include "ptx.h"
#include "ptxsim.h"
#include "warp.h"

namespace ptxsim {

struct Launch {
  const Kernel& kernel;
  Dimensions grid, block;
  // As for cudaLaunchKernel.
  void** arguments;
  int device;
  // Whether memory accesses are counted.
  bool counted;
  // Null: races between streams are not looked for.
  Races* races = nullptr;
  // How many blocks run, if the grid has more.
  unsigned most_blocks = ~0u;
};

// Runs all blocks, and their warps, in random order, or in order if `random` is null.
Counts run(const Launch& launch, const Memory& memory, std::mt19937* random);

}  // namespace ptxsim

#endif  // GLUON_SYNCBN_TESTS_PTXSIM_LAUNCH_H_
