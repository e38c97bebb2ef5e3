// An operation that throws reports an error. MXNet records it twice: for that operation, and for
// the end of the custom operator, which reads what it wrote. So before the next error is reported,
// another operation on that array must have passed.
#include "mxnet/engine_errors.h"

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <new>
#include <string>
#include <thread>

namespace gluon_syncbn {
namespace {

using Clock = std::chrono::steady_clock;

// Enough for a thread to execute a few remaining instructions.
constexpr std::chrono::milliseconds kInstructions{5};
// Errors are reported after this time even if a device is still busy.
constexpr std::chrono::seconds kPatience{2};
// More than 512, so that the capacity of the list becomes 1024.
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

// Pushes an operation for threads of the engine that belong to no device. Device threads may be
// busy, or wait for their turn.
void push_for(Handle written, void (*run)(void*, void*), void* argument, void (*deleter)(void*)) {
  const int status = mxnet.engine_push_sync(run, argument, deleter, &kCpuContext, nullptr, 0,
                                            &written, 1, &kCpuPrioritized, 0, "SyncBatchNormError");
  if (status != 0) throw dmlc::Error("MXNet's engine takes no more operations.");
}

// Pushes an operation on the array that fails with this error.
void push_error(Handle written, const std::string& text) {
  push_for(
      written, [](void*, void* what) { throw dmlc::Error(*static_cast<std::string*>(what)); },
      new std::string(text), [](void* what) { delete static_cast<std::string*>(what); });
}

// Waits for all operations pushed for the array so far.
void wait_for(Handle array) {
  using LatchPtr = std::shared_ptr<Latch>;
  const auto latch = std::make_shared<Latch>();
  // Opened by the deleter, as MXNet skips the operation if the array holds an error.
  const auto open = [](void* argument) {
    const std::unique_ptr<LatchPtr> pointer(static_cast<LatchPtr*>(argument));
    (*pointer)->open();
  };
  push_for(array, [](void*, void*) {}, new LatchPtr(latch), open);
  latch->wait();
}

struct Turns {
  // Held while an error is reported.
  std::mutex mutex;
  // The output that holds the last error. MXNet ends its custom operator with an error too, on the
  // device's thread.
  Handle last = nullptr;
  bool is_on_first_cpu = false;
  // Whether drain() is waiting for that error on the thread of cpu(0), on which
  // await_turn_for_error() runs, and when another error last passed it there.
  std::atomic<bool> awaits_first_cpu{false};
  std::atomic<Clock::time_point> overtaken{Clock::time_point{}};
  Clock::time_point last_reported{};
  bool is_long = false;

  // Waits until the last error is in the list.
  void drain(bool on_first_cpu) {
    std::this_thread::sleep_until(last_reported + kInstructions);
    // Operations of one thread cannot run at the same time.
    if (!last || (on_first_cpu && is_on_first_cpu)) return;
    // By now MXNet has pushed the end of the custom operator, which reads the array.
    awaits_first_cpu = is_on_first_cpu;
    wait_for(last);
    awaits_first_cpu = false;
    std::this_thread::sleep_until(overtaken.load() + kInstructions);
    mxnet.ndarray_free(last);
    last = nullptr;
  }

  // Makes the list long, before the first error.
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
      // Clears the error: the next waitall() removes the empty entry. Nothing else is pending for
      // the array, so MXNet returns at once, without an operation on a thread that may wait for its
      // turn.
      mxnet.ndarray_wait_to_read(array);
    }
    mxnet.ndarray_free(array);
  }
};

// Not destroyed at exit: operations may still fail when the process ends.
Turns* turns = new Turns;

}  // namespace

void report_error(Handle written, const std::string& device, const std::string& text) {
  const std::lock_guard<std::mutex> lock(turns->mutex);
  turns->drain(false);
  turns->lengthen();
  push_error(written, text);
  turns->last = written;
  turns->is_on_first_cpu = device == "cpu(0)";
  turns->last_reported = Clock::now();
}

void await_turn_for_error() {
  const auto end = Clock::now() + kPatience;
  std::unique_lock<std::mutex> lock(turns->mutex, std::try_to_lock);
  while (!lock) {
    // The holder of the lock may be waiting for an operation queued behind this one on the same
    // thread.
    turns->overtaken = Clock::now();
    if (turns->awaits_first_cpu || Clock::now() > end) return;
    std::this_thread::sleep_for(std::chrono::microseconds(100));
    lock.try_lock();
  }
  turns->drain(true);
  turns->last_reported = Clock::now();
}

// Constructed in place: a mutex that another thread held at the fork would stay locked.
void forget_errors() { new (turns) Turns; }

}  // namespace gluon_syncbn
