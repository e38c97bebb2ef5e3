// Operations of ours for MXNet's engine.
#ifndef GLUON_SYNCBN_MXNET_OPERATIONS_H_
#define GLUON_SYNCBN_MXNET_OPERATIONS_H_

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include "mxnet/c_api.h"

namespace gluon_syncbn {

// Pushes an operation on an array that calls run(), unless MXNet skips it, and then drops `run`.
// Returns whether MXNet took it; if not, `run` is dropped here.
//
// It has one array. MXNet queues an operation at its arrays one after the other, without a lock
// over all (threaded_engine.cc, Push). So of two operations with several arrays that two threads
// push at a time, each may be first at one of two arrays, and both wait forever.
inline bool push(std::function<void()> run, Handle array, bool writes, int kind, const char* name,
                 int priority = 0) {
  struct Operation {
    std::function<void()> run;
    std::shared_ptr<bool> is_deleted;
    ~Operation() { *is_deleted = true; }
  };
  const auto is_deleted = std::make_shared<bool>(false);
  auto* const operation = new Operation{std::move(run), is_deleted};
  const int status = mxnet.engine_push_sync(
      [](void*, void* argument) { static_cast<Operation*>(argument)->run(); }, operation,
      [](void* argument) { delete static_cast<Operation*>(argument); }, &kCpuContext, &array,
      writes ? 0 : 1, &array, writes ? 1 : 0, &kind, priority, name);
  // Where MXNet fails decides whether it has called the deleter.
  if (status != 0 && !*is_deleted) delete operation;
  return status == 0;
}

// Calls then(skipped) once the operations pushed so far that write this array have ended, and if
// `writes` those too that read it. skipped: whether MXNet skips what depends on the array, as it
// holds an error. If MXNet takes no more operations, it calls then(false) now.
inline void when_passed(Handle array, bool writes, const char* name,
                        std::function<void(bool)> then) {
  struct Task {
    std::function<void(bool)> then;
    bool has_run = false;
    ~Task() {
      if (!has_run) then(true);
    }
  };
  const std::shared_ptr<Task> task(new Task{std::move(then)});
  // Within the operation: MXNet starts what writes the array next before it drops `run`.
  const auto run = [task] {
    task->has_run = true;
    task->then(false);
  };
  if (!push(run, array, writes, kCpuPrioritized, name)) run();
}

// MXNet's engine appends errors to a list without a lock, at the end of the operation that fails.
// So our calls report one after the other: each waits until MXNet has recorded the one before.
class Reports {
 public:
  void begin() {
    std::unique_lock<std::mutex> lock(mutex_);
    while (is_open_ && changed_.wait_until(lock, until_) != std::cv_status::timeout) {
    }
    is_open_ = true;
    ++number_;
    until_ = Clock::now() + std::chrono::seconds(5);
  }
  // It has been recorded for the callback's copy of an output, and is going to be for the output.
  void soon() {
    const std::lock_guard<std::mutex> lock(mutex_);
    until_ = Clock::now() + std::chrono::milliseconds(20);
    changed_.notify_all();
  }
  // The call that reports writes this array, as MXNet knows, which then has the error.
  void expect(Handle array) {
    std::unique_lock<std::mutex> lock(mutex_);
    const int64_t number = number_;
    lock.unlock();
    when_passed(array, false, "SyncBatchNormReport", [this, number](bool) { end(number); });
  }

 private:
  using Clock = std::chrono::steady_clock;

  void end(int64_t number) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (number == number_) is_open_ = false;
    changed_.notify_all();
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  bool is_open_ = false;
  int64_t number_ = 0;
  Clock::time_point until_{};
};

// Never destroyed: calls may still report when the process ends.
inline Reports& reports = *new Reports;

// The error of a custom operator's callback: waiting for its outputs raises an MXNetError with this
// text. `written` is the callback's handle of an output. Throws dmlc::Error if MXNet's engine takes
// no more operations.
//
// Throwing in the callback would do the same, but MXNet keeps the exceptions of all custom
// operators in one variable, and whichever ends next takes it. So an operation that throws "writes"
// the callback's copy of the output. MXNet records the error for this operation, and then, as the
// end of the custom operator reads the copy, for that: one after the other. What depends on the
// outputs starts later and finds the error recorded.
inline void report_error(Handle written, const std::string& text) {
  reports.begin();
  const auto fail = [text] {
    reports.soon();
    throw dmlc::Error(text);
  };
  if (!push(fail, written, true, kCpuPrioritized, "SyncBatchNormError")) throw dmlc::Error(text);
}

}  // namespace gluon_syncbn

#endif  // GLUON_SYNCBN_MXNET_OPERATIONS_H_
