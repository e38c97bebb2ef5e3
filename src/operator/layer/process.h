// What the library knows of the process that it is in.
#ifndef GLUON_SYNCBN_LAYER_PROCESS_H_
#define GLUON_SYNCBN_LAYER_PROCESS_H_

#include <string>

#include "rendezvous/all_reduce.h"
#include "numerics/running_statistics.h"

namespace gluon_syncbn {

struct Process {
  // Graphs that another process made do not have it.
  std::string word;
  bool naive_engine = false;
  bool onednn = false;
  // Never destroyed: calls may still wait in it when the process ends.
  AllReduce* all_reduce = nullptr;
  RunningStates* running_states = nullptr;
};

inline Process process;

}  // namespace gluon_syncbn

#endif  // GLUON_SYNCBN_LAYER_PROCESS_H_
