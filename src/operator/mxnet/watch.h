// Waits for an array that MXNet may never write: the answer of a store.
#ifndef GLUON_SYNCBN_MXNET_WATCH_H_
#define GLUON_SYNCBN_MXNET_WATCH_H_

#include <memory>

#include "mxnet/api.h"

namespace gluon_syncbn {

enum class Waited { kWritten = 0, kTimeIsUp, kInterrupted, kClosed };

// Waits until all that was pushed for an array before has passed. It may be destroyed at any time,
// whatever happens to the array.
class Watch {
 public:
  // Throws std::runtime_error.
  explicit Watch(Handle array);

  // kWritten also if the array holds an error, which MXNet raises when the array is waited for.
  Waited wait(double seconds);

  // The process ends: all waits, also later ones, return kClosed.
  static void close();

 private:
  struct State;
  // Shared with the engine, which may call later.
  std::shared_ptr<State> state_;
};

}  // namespace gluon_syncbn

#endif  // GLUON_SYNCBN_MXNET_WATCH_H_
