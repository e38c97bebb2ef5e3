// Waits for an array that MXNet may never write: the answer of a store.
#ifndef GLUON_SYNCBN_MXNET_ARRAY_WAIT_H_
#define GLUON_SYNCBN_MXNET_ARRAY_WAIT_H_

#include <memory>

#include "mxnet/c_api.h"
#include "threads/waits.h"

namespace gluon_syncbn {

// Waits for all operations pushed for an array so far. It may be destroyed at any time, even after
// the array.
class ArrayWait {
 public:
  // Throws std::runtime_error.
  explicit ArrayWait(Handle array);

  // Also returns kDone if the array holds an error, which MXNet raises when the array is read.
  Waited wait(double seconds);

 private:
  struct State;
  // Shared with the engine, which may call back after the ArrayWait is destroyed.
  std::shared_ptr<State> state_;
};

// Waits for them too, without a limit, and returns whether the array then holds an error, which
// stays there. MXNet's own wait raises the error and clears it everywhere, so what is still queued
// behind it would run, with what has never been written.
bool holds_error(Handle array);

}  // namespace gluon_syncbn

#endif  // GLUON_SYNCBN_MXNET_ARRAY_WAIT_H_
