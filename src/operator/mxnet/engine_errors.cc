#include "mxnet/engine_errors.h"

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

namespace gluon_syncbn {
namespace {

using Clock = std::chrono::steady_clock;

// A thread that has nothing but some instructions left does them in that time.
constexpr std::chrono::milliseconds kInstructions{5};
// Errors are told in any case, however long a device is at work.
constexpr std::chrono::seconds kPatience{2};
// More than half of a power of two, which the list's capacity is then.
constexpr int kListed = 520;

class Latch {
 public:
  void open() {
    const std::lock_guard<std::mutex> lock(mutex_);
    is_open_ = true;
    opened_.notify_all();
  }
  void wait() {
    std::unique_lock<std::mutex> lock(mutex_);
    opened_.wait_for(lock, kPatience, [this] { return is_open_; });
  }

 private:
  std::mutex mutex_;
  std::condition_variable opened_;
  bool is_open_ = false;
};

// Runs on threads that the engine has beside those of the devices, which may be at work or wait for
// their turn.
void push_for(Handle written, void (*run)(void*, void*), void* argument, void (*deleter)(void*)) {
  const int status = mxnet.engine_push_sync(run, argument, deleter, &kCpuContext, nullptr, 0,
                                            &written, 1, &kCpuPrioritized, 0, "SyncBatchNormError");
  if (status != 0) throw dmlc::Error("MXNet's engine takes no more operations.");
}

// An operation on the array that ends with this error.
void push_error(Handle written, const std::string& text) {
  push_for(
      written, [](void*, void* what) { throw dmlc::Error(*static_cast<std::string*>(what)); },
      new std::string(text), [](void* what) { delete static_cast<std::string*>(what); });
}

// Until all that was pushed for the array so far is done.
void wait_for(Handle array) {
  using LatchPtr = std::shared_ptr<Latch>;
  const auto latch = std::make_shared<Latch>();
  // Not by what it runs, which is skipped where the array holds an error.
  const auto open = [](void* argument) {
    const std::unique_ptr<LatchPtr> pointer(static_cast<LatchPtr*>(argument));
    (*pointer)->open();
  };
  push_for(array, [](void*, void*) {}, new LatchPtr(latch), open);
  latch->wait();
}

struct Turns {
  // Held by who is about to tell an error.
  std::mutex mutex;
  // The last output that was told of. MXNet ends its custom operator with an error too, on the
  // device's thread.
  Handle last = nullptr;
  bool is_on_first_cpu = false;
  // Whether that is waited for, on the thread that await_turn_for_error() runs on, and when an
  // error went ahead of it there.
  std::atomic<bool> awaits_first_cpu{false};
  std::atomic<Clock::time_point> went_ahead{Clock::time_point{}};
  // When the last error was on its way.
  Clock::time_point told{};
  bool is_long = false;

  // Until the last error is in the list.
  void settle(bool on_first_cpu) {
    std::this_thread::sleep_until(told + kInstructions);
    // What runs on this very thread is no danger, and comes later.
    if (!last || (on_first_cpu && is_on_first_cpu)) return;
    // By now MXNet has pushed what ends the custom operator. It reads the array, and so is waited
    // for.
    awaits_first_cpu = is_on_first_cpu;
    wait_for(last);
    awaits_first_cpu = false;
    std::this_thread::sleep_until(went_ahead.load() + kInstructions);
    mxnet.ndarray_free(last);
    last = nullptr;
  }

  // Makes the list long, at the first error.
  void lengthen() {
    if (is_long) return;
    is_long = true;
    const uint32_t one = 1;
    constexpr int kFloat32 = 0;
    Handle array = nullptr;
    if (mxnet.ndarray_create(&one, 1, kCpuContext.device_type, kCpuContext.device_id, 0, kFloat32,
                             &array) != 0) {
      return;
    }
    for (int i = 0; i < kListed; ++i) {
      push_error(array, "");
      wait_for(array);
      // Takes the error back: what stays in the list holds nothing, and goes with the next
      // waitall(). Nothing else is under way for the array, so MXNet answers at once, and not by
      // an operation on a thread that waits for its turn.
      mxnet.ndarray_wait_to_read(array);
    }
    mxnet.ndarray_free(array);
  }
};

// Never destroyed: operations may still fail when the process ends.
Turns* turns = new Turns;

}  // namespace

void tell_error(Handle written, const std::string& device, const std::string& text) {
  const std::lock_guard<std::mutex> lock(turns->mutex);
  turns->settle(false);
  turns->lengthen();
  push_error(written, text);
  turns->last = written;
  turns->is_on_first_cpu = device == "cpu(0)";
  turns->told = Clock::now();
}

void await_turn_for_error() {
  const auto end = Clock::now() + kPatience;
  std::unique_lock<std::mutex> lock(turns->mutex, std::try_to_lock);
  while (!lock) {
    // Who has the turn waits for what comes after this error, on this thread.
    turns->went_ahead = Clock::now();
    if (turns->awaits_first_cpu || Clock::now() > end) return;
    std::this_thread::sleep_for(std::chrono::microseconds(100));
    lock.try_lock();
  }
  turns->settle(true);
  turns->told = Clock::now();
}

void forget_errors() { turns = new Turns; }

}  // namespace gluon_syncbn
