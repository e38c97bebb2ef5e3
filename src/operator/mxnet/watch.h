// Waits for an array that MXNet may never write: the answer of a store.
#ifndef GLUON_SYNCBN_MXNET_WATCH_H_
#define GLUON_SYNCBN_MXNET_WATCH_H_

#include <memory>

#include "mxnet/api.h"

namespace gluon_syncbn {

enum class Waited { kWritten = 0, kTimeIsUp, kInterrupted, kClosed };

// Waits for all operations pushed for an array so far. It may be destroyed at any time, also after
// the array.
class Watch {
 public:
  // Throws std::runtime_error.
  explicit Watch(Handle array);

  // Also returns kWritten if the array holds an error, which MXNet raises when the array is read.
  Waited wait(double seconds);

  // For the end of the process: all waits, also later ones, return kClosed.
  static void close();

 private:
  struct State;
  // Shared with the engine, which may call back after the destruction.
  std::shared_ptr<State> state_;
};

}  // namespace gluon_syncbn

#endif  // GLUON_SYNCBN_MXNET_WATCH_H_
