// Waiting for an array that MXNet may never write: what a store answers.
#ifndef GLUON_SYNCBN_MXNET_WATCH_H_
#define GLUON_SYNCBN_MXNET_WATCH_H_

#include <memory>

#include "mxnet/api.h"

namespace gluon_syncbn {

enum class Waited { kWritten = 0, kTimeIsUp, kInterrupted, kClosed };

// Watches for what was pushed for an array before. It may end at any time, whatever becomes of the
// array.
class Watch {
 public:
  // Throws std::runtime_error.
  explicit Watch(Handle array);

  // kWritten also where the array holds an error, which MXNet then tells to whoever waits for it.
  Waited wait(double seconds);

  // The process ends: all who wait, and all who come, get kClosed.
  static void close();

 private:
  struct State;
  // The engine holds it too, for as long as it may call.
  std::shared_ptr<State> state_;
};

}  // namespace gluon_syncbn

#endif  // GLUON_SYNCBN_MXNET_WATCH_H_
