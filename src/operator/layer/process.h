// The state of this process.
#ifndef GLUON_SYNCBN_LAYER_PROCESS_H_
#define GLUON_SYNCBN_LAYER_PROCESS_H_

#include <string>

#include "numerics/running_statistics.h"
#include "rendezvous/all_reduce.h"

namespace gluon_syncbn {

struct Process {
  // Marks the graphs of this process.
  std::string uuid;
  bool naive_engine = false;
  bool onednn = false;
  // Never destroyed: calls may still wait in it when the process ends.
  AllReduce* all_reduce = nullptr;
  RunningStates* running_states = nullptr;
};

inline Process process;

}  // namespace gluon_syncbn

#endif  // GLUON_SYNCBN_LAYER_PROCESS_H_
