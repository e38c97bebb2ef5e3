// Reports errors to MXNet's engine, one at a time.
//
// The engine appends the error of an operation to a global list without a lock, on whichever of its
// threads the operation ran (threaded_engine.h, AddToGlobalExceptions). Two at a time corrupt the
// heap, and the process crashes or hangs later. So errors take turns, and before the first one the
// list is made so long that it does not move while others read it.
#ifndef GLUON_SYNCBN_MXNET_ENGINE_ERRORS_H_
#define GLUON_SYNCBN_MXNET_ENGINE_ERRORS_H_

#include <string>

#include "mxnet/api.h"

namespace gluon_syncbn {

// In a callback of a custom operator on this device: waiting for what the callback writes raises an
// MXNetError of this text. `written` is its copy of an output, and is freed later.
//
// Throwing would do the same, but MXNet keeps what custom operators throw in one variable for all
// of them: if two fail together, one error could be lost.
void report_error(Handle written, const std::string& device, const std::string& text);

// In an operation that the engine runs for kCpuContext, and that is about to end with an error.
void await_turn_for_error();

// In the child of a fork, whose engine has no operation in progress.
void forget_errors();

}  // namespace gluon_syncbn

#endif  // GLUON_SYNCBN_MXNET_ENGINE_ERRORS_H_
