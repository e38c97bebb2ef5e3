// MXNet's own wait for an array has no time limit and ignores Ctrl-C. So the engine runs an
// operation once the array is written, also with an error, and the wait is for that operation.
#include "mxnet/array_wait.h"

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <stdexcept>

namespace gluon_syncbn {
namespace {

std::atomic<bool> closed{false};

}  // namespace

Waited Interruption::what() const {
  if (interrupts != before_) return Waited::kInterrupted;
  return closed ? Waited::kClosed : Waited::kTimeIsUp;
}

void Interruption::close() { closed = true; }

struct ArrayWait::State {
  std::mutex mutex;
  std::condition_variable changed;
  bool written = false;
  Interruption interruption;
};

ArrayWait::ArrayWait(Handle array) : state_(std::make_shared<State>()) {
  using StatePtr = std::shared_ptr<State>;
  const auto notify = [](void*, void* argument) {
    State& state = **static_cast<StatePtr*>(argument);
    const std::lock_guard<std::mutex> lock(state.mutex);
    state.written = true;
    state.changed.notify_all();
  };
  const int status = mxnet.engine_push_sync(
      notify, new StatePtr(state_), [](void* state) { delete static_cast<StatePtr*>(state); },
      &kCpuContext, &array, 1, nullptr, 0, &kNoSkip, 1, "SyncBatchNormWait");
  if (status != 0) throw std::runtime_error("MXNet's engine takes no more operations.");
}

Waited ArrayWait::wait(double seconds) {
  std::unique_lock<std::mutex> lock(state_->mutex);
  return wait_in_slices(seconds, state_->interruption, [&](double slice) {
    return state_->changed.wait_for(lock, std::chrono::duration<double>(slice),
                                    [&] { return state_->written; });
  });
}

}  // namespace gluon_syncbn
