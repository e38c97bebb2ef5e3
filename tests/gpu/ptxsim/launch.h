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
  // Its z is 1, and blocks have only an x.
  dim3 grid;
  unsigned threads;
  std::vector<char> parameters;
  int device;
  // Whether memory accesses are counted.
  bool counted;
  // Null: races between streams are not looked for.
  Races* races = nullptr;
  // How many blocks run, if the grid has more.
  unsigned most_blocks = ~0u;
};

// The arguments are as for cudaLaunchKernel.
std::vector<char> parameters_of(const Kernel& kernel, void** arguments);

// Runs all blocks, and their warps, in random order, or in order if `random` is null.
Counts run(const Launch& launch, const Memory& memory, std::mt19937* random);

}  // namespace ptxsim

#endif  // GLUON_SYNCBN_TESTS_PTXSIM_LAUNCH_H_
