// Waits for an array that MXNet may never write: the answer of a store.
#ifndef GLUON_SYNCBN_MXNET_ARRAY_WAIT_H_
#define GLUON_SYNCBN_MXNET_ARRAY_WAIT_H_

#include <algorithm>
#include <chrono>
#include <memory>

#include "mxnet/api.h"
#include "mxnet/interrupts.h"

namespace gluon_syncbn {

enum class Waited { kWritten = 0, kTimeIsUp, kInterrupted, kClosed };

// What ends a wait early: Ctrl-C after construction, or the end of the process.
class Interruption {
 public:
  // Returns kTimeIsUp if nothing has ended the wait early.
  Waited what() const;
  // Call this when the process ends: all waits, including later ones, return kClosed.
  static void close();

 private:
  unsigned before_ = interrupts;
};

// Calls sleep(seconds) until it returns true, meaning that the wait has succeeded, or until the
// time is up or the wait is interrupted.
template <typename Sleep>
Waited wait_in_slices(double seconds, const Interruption& interruption, const Sleep& sleep) {
  using Clock = std::chrono::steady_clock;
  const auto end = Clock::now() + std::chrono::duration<double>(seconds);
  for (;;) {
    const double left = std::chrono::duration<double>(end - Clock::now()).count();
    if (sleep(std::clamp(left, 0.0, kSlice.count()))) return Waited::kWritten;
    const Waited ended = interruption.what();
    if (ended != Waited::kTimeIsUp || left <= 0) return ended;
  }
}

// Waits for all operations pushed for an array so far. It may be destroyed at any time, even after
// the array.
class ArrayWait {
 public:
  // Throws std::runtime_error.
  explicit ArrayWait(Handle array);

  // Also returns kWritten if the array holds an error, which MXNet raises when the array is read.
  Waited wait(double seconds);

 private:
  struct State;
  // Shared with the engine, which may call back after the ArrayWait is destroyed.
  std::shared_ptr<State> state_;
};

}  // namespace gluon_syncbn

#endif  // GLUON_SYNCBN_MXNET_ARRAY_WAIT_H_
