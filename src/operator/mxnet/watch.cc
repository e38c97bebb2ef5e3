#include "mxnet/watch.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <stdexcept>

#include "mxnet/interrupts.h"

namespace gluon_syncbn {
namespace {

// How often a wait checks for Ctrl-C and the end of the process.
constexpr std::chrono::duration<double> kSlice{0.1};

std::atomic<bool> closed{false};

}  // namespace

struct Watch::State {
  std::mutex mutex;
  std::condition_variable changed;
  bool written = false;
  const unsigned interrupts_before = interrupts;
};

Watch::Watch(Handle array) : state_(std::make_shared<State>()) {
  using StatePtr = std::shared_ptr<State>;
  const auto notify = [](void*, void* argument) {
    State& state = **static_cast<StatePtr*>(argument);
    const std::lock_guard<std::mutex> lock(state.mutex);
    state.written = true;
    state.changed.notify_all();
  };
  const int status = mxnet.engine_push_sync(
      notify, new StatePtr(state_), [](void* state) { delete static_cast<StatePtr*>(state); },
      &kCpuContext, &array, 1, nullptr, 0, &kNoSkip, 1, "SyncBatchNormWatch");
  if (status != 0) throw std::runtime_error("MXNet's engine takes no more operations.");
}

Waited Watch::wait(double seconds) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
  std::unique_lock<std::mutex> lock(state_->mutex);
  while (!state_->written) {
    const std::chrono::duration<double> left = end - std::chrono::steady_clock::now();
    if (left.count() <= 0) return Waited::kTimeIsUp;
    state_->changed.wait_for(lock, std::min(left, kSlice));
    if (state_->written) break;
    if (interrupts != state_->interrupts_before) return Waited::kInterrupted;
    if (closed) return Waited::kClosed;
  }
  return Waited::kWritten;
}

void Watch::close() { closed = true; }

}  // namespace gluon_syncbn
