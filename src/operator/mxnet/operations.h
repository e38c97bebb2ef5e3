// Operations of ours for MXNet's engine.
#ifndef GLUON_SYNCBN_MXNET_OPERATIONS_H_
#define GLUON_SYNCBN_MXNET_OPERATIONS_H_

#include <memory>
#include <string>
#include <vector>

#include "mxnet/api.h"

namespace gluon_syncbn {

// Pushes an operation on an array that runs run(state), unless MXNet skips it, and then drops the
// state. Returns whether MXNet took it; if not, the state is dropped here.
//
// It has one array. MXNet queues an operation at its arrays one after the other, without a lock
// over all (threaded_engine.cc, Push). So of two operations with several arrays that two threads
// push at a time, each may be first at one of two arrays, and both wait forever.
template <typename State>
bool push(std::shared_ptr<State> state, void (*run)(State*), Handle array, bool writes, int kind,
          const char* name, int priority = 0) {
  struct Owner {
    std::shared_ptr<State> state;
    void (*run)(State*);
    std::shared_ptr<bool> is_deleted;
    ~Owner() { *is_deleted = true; }
  };
  const auto is_deleted = std::make_shared<bool>(false);
  auto* const owner = new Owner{std::move(state), run, is_deleted};
  const int status = mxnet.engine_push_sync(
      [](void*, void* argument) {
        const Owner& o = *static_cast<Owner*>(argument);
        o.run(o.state.get());
      },
      owner, [](void* argument) { delete static_cast<Owner*>(argument); }, &kCpuContext, &array,
      writes ? 0 : 1, &array, writes ? 1 : 0, &kind, priority, name);
  // Where MXNet fails decides whether it has called the deleter.
  if (status != 0 && !*is_deleted) delete owner;
  return status == 0;
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
  const auto fail = [](const std::string* what) { throw dmlc::Error(*what); };
  if (!push<const std::string>(std::make_shared<std::string>(text), fail, written, true,
                               kCpuPrioritized, "SyncBatchNormError")) {
    throw dmlc::Error(text);
  }
}

}  // namespace gluon_syncbn

#endif  // GLUON_SYNCBN_MXNET_OPERATIONS_H_
