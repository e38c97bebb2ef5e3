// Operations of ours for MXNet's engine.
#ifndef GLUON_SYNCBN_MXNET_OPERATIONS_H_
#define GLUON_SYNCBN_MXNET_OPERATIONS_H_

#include <atomic>
#include <functional>
#include <memory>
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

// Calls then(skipped) once the operations pushed so far that write these arrays have ended.
// skipped: whether MXNet skips what reads them, as one holds an error. Ours only read them, so they
// do not wait for others that do. Without arrays, or if MXNet takes no more operations, it calls
// then(false) now.
inline void when_written(Handle* arrays, int count, const char* name,
                         std::function<void(bool)> then) {
  struct Task {
    // How many operations have neither run nor failed to be pushed.
    std::atomic<int> left;
    std::function<void(bool)> then;
    ~Task() {
      if (left > 0) then(true);
    }
  };
  if (count == 0) return then(false);
  const auto task = std::shared_ptr<Task>(new Task{{count}, std::move(then)});
  // Within the operation: MXNet starts what writes the array next before it drops `run`.
  const auto one_less = [task] {
    if (--task->left == 0) task->then(false);
  };
  for (int i = 0; i < count; ++i) {
    if (!push(one_less, arrays[i], false, kCpuPrioritized, name)) one_less();
  }
}

// The error of a custom operator's callback: waiting for its outputs raises an MXNetError with this
// text. `written` is the callback's handle of an output. Throws dmlc::Error if MXNet's engine takes
// no more operations.
//
// Throwing in the callback would do the same, but MXNet keeps the exceptions of all custom
// operators in one variable, and whichever ends next takes it. So an operation that throws "writes"
// the callback's copy of the output. MXNet records the error for this operation, and then, as the
// end of the custom operator reads the copy, for that: one after the other. What depends on the
// outputs starts later and finds the error recorded. So no two threads append to the engine's list
// of errors, which has no lock, because of one report.
inline void report_error(Handle written, const std::string& text) {
  if (!push([text] { throw dmlc::Error(text); }, written, true, kCpuPrioritized,
            "SyncBatchNormError")) {
    throw dmlc::Error(text);
  }
}

}  // namespace gluon_syncbn

#endif  // GLUON_SYNCBN_MXNET_OPERATIONS_H_
