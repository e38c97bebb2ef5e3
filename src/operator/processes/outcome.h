// How a function of Python ends that C++ has called.
#ifndef GLUON_SYNCBN_PROCESSES_OUTCOME_H_
#define GLUON_SYNCBN_PROCESSES_OUTCOME_H_

#include <string>

namespace gluon_syncbn {

// Preset to failure: a function that does not come to its end, whatever the reason, has failed.
struct Outcome {
  bool succeeded = false;
  // Why it has failed.
  std::string error = "A function of Python has failed and has not said why.";
};

}  // namespace gluon_syncbn

#endif  // GLUON_SYNCBN_PROCESSES_OUTCOME_H_
