// Reports errors to MXNet's engine, one at a time.
//
// The engine appends the error of an operation to a global list without a lock, on the thread that
// ran the operation (threaded_engine.h, AddToGlobalExceptions). Two simultaneous errors corrupt the
// heap, and the process crashes or hangs later. So errors are reported in turn. Before the first
// one, the list is made long enough that it is not reallocated while other threads read it.
#ifndef GLUON_SYNCBN_MXNET_ENGINE_ERRORS_H_
#define GLUON_SYNCBN_MXNET_ENGINE_ERRORS_H_

#include <string>

#include "mxnet/api.h"

namespace gluon_syncbn {

// Reports the error of a custom operator's callback on this device: waiting for its outputs raises
// an MXNetError with this text. `written` is the callback's handle of an output, and is freed
// later.
//
// Throwing would do the same, but MXNet keeps the exceptions of all custom operators in one
// variable: if two fail together, one error could be lost.
void report_error(Handle written, const std::string& device, const std::string& text);

// Called by an operation that runs on kCpuContext and is about to fail: waits for its turn.
void await_turn_for_error();

// For the child of a fork, whose engine has no operations in progress.
void forget_errors();

}  // namespace gluon_syncbn

#endif  // GLUON_SYNCBN_MXNET_ENGINE_ERRORS_H_
