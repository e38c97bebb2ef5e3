// Waits for an array that MXNet may never write: the answer of a store.
#ifndef GLUON_SYNCBN_MXNET_WATCH_H_
#define GLUON_SYNCBN_MXNET_WATCH_H_

#include <algorithm>
#include <chrono>
#include <memory>

#include "mxnet/api.h"
#include "mxnet/interrupts.h"

namespace gluon_syncbn {

enum class Waited { kWritten = 0, kTimeIsUp, kInterrupted, kClosed };

// What ends a wait early: Ctrl-C since the construction, or the end of the process.
class Interruption {
 public:
  // kTimeIsUp: nothing.
  Waited what() const;
  // For the end of the process: all waits, also later ones, return kClosed.
  static void close();

 private:
  unsigned before_ = interrupts;
};

// Calls sleep(seconds), which returns true if what is waited for is there, until then or until
// something ends the wait.
template <typename Sleep>
Waited wait_in_slices(double seconds, const Interruption& interruption, const Sleep& sleep) {
  using Clock = std::chrono::steady_clock;
  constexpr double kSlice = 0.1;
  const auto end = Clock::now() + std::chrono::duration<double>(seconds);
  for (;;) {
    const double left = std::chrono::duration<double>(end - Clock::now()).count();
    if (sleep(std::clamp(left, 0.0, kSlice))) return Waited::kWritten;
    const Waited ended = interruption.what();
    if (ended != Waited::kTimeIsUp || left <= 0) return ended;
  }
}

// Waits for all operations pushed for an array so far. It may be destroyed at any time, also after
// the array.
class Watch {
 public:
  // Throws std::runtime_error.
  explicit Watch(Handle array);

  // Also returns kWritten if the array holds an error, which MXNet raises when the array is read.
  Waited wait(double seconds);

 private:
  struct State;
  // Shared with the engine, which may call back after the destruction.
  std::shared_ptr<State> state_;
};

}  // namespace gluon_syncbn

#endif  // GLUON_SYNCBN_MXNET_WATCH_H_
