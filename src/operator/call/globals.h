// What all calls of this process share. It is set when Python registers the operator.
#ifndef GLUON_SYNCBN_CALL_GLOBALS_H_
#define GLUON_SYNCBN_CALL_GLOBALS_H_

#include <string>

#include "rendezvous/rendezvous.h"

namespace gluon_syncbn {

struct Globals {
  // Marks the graphs of this process.
  std::string uuid;
  bool naive_engine = false;
  bool onednn = false;
  // Never destroyed: calls may still wait in it when the process ends.
  Rendezvous* rendezvous = nullptr;
};

inline Globals globals;

}  // namespace gluon_syncbn

#endif  // GLUON_SYNCBN_CALL_GLOBALS_H_
