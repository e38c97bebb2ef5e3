// Errors that are told to MXNet's engine, one at a time.
//
// The engine notes every error that an operation ends with in one list, on whichever of its threads
// that operation ran, and without a lock (threaded_engine.h, AddToGlobalExceptions). Two at a time
// damage the heap, and the process crashes or hangs later on. So errors take turns, and before the
// first one the list is made long enough not to move, as others read it meanwhile.
#ifndef GLUON_SYNCBN_MXNET_ENGINE_ERRORS_H_
#define GLUON_SYNCBN_MXNET_ENGINE_ERRORS_H_

#include <string>

#include "mxnet/api.h"

namespace gluon_syncbn {

// Within a callback of a custom operator on this device: whoever waits for what the callback writes
// gets an MXNetError of this text. `written` is its copy of an output, and is freed later.
//
// Throwing would do the same, but MXNet keeps what custom operators throw in one variable for all
// of them: of two that fail together, one could be lost.
void tell_error(Handle written, const std::string& device, const std::string& text);

// Within an operation that the engine runs for kCpuContext, and that is about to end with an error.
void await_turn_for_error();

// In the child of a fork, whose engine has no operation under way.
void forget_errors();

}  // namespace gluon_syncbn

#endif  // GLUON_SYNCBN_MXNET_ENGINE_ERRORS_H_
