// MXNet's own wait for an array has no time limit and ignores Ctrl-C. So the engine runs an
// operation once the array is written, also with an error, and the wait is for that operation.
#include "mxnet/array_wait.h"

#include <future>
#include <stdexcept>

#include "mxnet/operations.h"

namespace gluon_syncbn {

struct ArrayWait::State {
  std::mutex mutex;
  std::condition_variable changed;
  bool written = false;
  Interruption interruption;
};

ArrayWait::ArrayWait(Handle array) : state_(std::make_shared<State>()) {
  const auto notify = [state = state_] {
    const std::lock_guard<std::mutex> lock(state->mutex);
    state->written = true;
    state->changed.notify_all();
  };
  constexpr int kPriority = 1;
  if (!push(notify, array, false, kNoSkip, "SyncBatchNormWait", kPriority)) {
    throw std::runtime_error("MXNet's engine takes no more operations.");
  }
}

Waited ArrayWait::wait(double seconds) {
  std::unique_lock<std::mutex> lock(state_->mutex);
  return wait_until(&lock, &state_->changed, seconds, state_->interruption,
                    [&] { return state_->written; });
}

bool holds_error(Handle array) {
  int dtype = -1;
  // An array without memory has none, and nothing to wait for.
  if (mxnet.ndarray_get_dtype(array, &dtype) != 0 || dtype < 0) return false;
  const auto skipped = std::make_shared<std::promise<bool>>();
  when_passed(array, false, "SyncBatchNormLook", [skipped](bool is) { skipped->set_value(is); });
  return skipped->get_future().get();
}

}  // namespace gluon_syncbn
