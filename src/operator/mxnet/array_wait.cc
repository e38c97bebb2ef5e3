// MXNet's own wait for an array has no time limit and ignores Ctrl-C. So the engine runs an
// operation once the array is written, also with an error, and the wait is for that operation.
#include "mxnet/array_wait.h"

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <stdexcept>

#include "mxnet/engine.h"

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
  const auto notify = [](State* state) {
    const std::lock_guard<std::mutex> lock(state->mutex);
    state->written = true;
    state->changed.notify_all();
  };
  constexpr int kPriority = 1;
  if (!push<State>(state_, notify, {array}, {}, kNoSkip, "SyncBatchNormWait", kPriority)) {
    throw std::runtime_error("MXNet's engine takes no more operations.");
  }
}

Waited ArrayWait::wait(double seconds) {
  std::unique_lock<std::mutex> lock(state_->mutex);
  return wait_in_slices(seconds, state_->interruption, [&](double slice) {
    return state_->changed.wait_for(lock, std::chrono::duration<double>(slice),
                                    [&] { return state_->written; });
  });
}

}  // namespace gluon_syncbn
