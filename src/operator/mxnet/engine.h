// Operations for MXNet's engine.
#ifndef GLUON_SYNCBN_MXNET_ENGINE_H_
#define GLUON_SYNCBN_MXNET_ENGINE_H_

#include <memory>
#include <vector>

#include "mxnet/api.h"

namespace gluon_syncbn {

// Pushes an operation that runs run(state), unless it is skipped, and then drops the state. Returns
// whether MXNet's engine took it.
//
// It may share only one array with operations of others. MXNet queues an operation at its arrays
// one after the other, without a lock over all (threaded_engine.cc, Push). So of two operations
// that two threads push at a time, each may be first at one of two arrays, and both wait forever.
template <typename T>
bool push(const std::shared_ptr<T>& state, void (*run)(T*), const std::vector<Handle>& read,
          const std::vector<Handle>& written, int kind, const char* name, int priority = 0) {
  struct Owner {
    std::shared_ptr<T> state;
    void (*run)(T*);
    std::shared_ptr<bool> is_deleted;
    ~Owner() { *is_deleted = true; }
  };
  const auto is_deleted = std::make_shared<bool>(false);
  auto* const owner = new Owner{state, run, is_deleted};
  const int status = mxnet.engine_push_sync(
      [](void*, void* argument) {
        const Owner& o = *static_cast<Owner*>(argument);
        o.run(o.state.get());
      },
      owner, [](void* argument) { delete static_cast<Owner*>(argument); }, &kCpuContext,
      const_cast<Handle*>(read.data()), static_cast<int>(read.size()),
      const_cast<Handle*>(written.data()), static_cast<int>(written.size()), &kind, priority, name);
  // Where MXNet fails decides whether it has called the deleter.
  if (status != 0 && !*is_deleted) delete owner;
  return status == 0;
}

}  // namespace gluon_syncbn

#endif  // GLUON_SYNCBN_MXNET_ENGINE_H_
