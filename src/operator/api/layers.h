// What the library offers to _native.py of layers, and of the process. More stands in stores.h.
#ifndef GLUON_SYNCBN_API_LAYERS_H_
#define GLUON_SYNCBN_API_LAYERS_H_

#include <cstdint>

#include "api/exports.h"

// The version of the package that this library was built for.
SBN_EXPORT const char* gluon_syncbn_version();

// Writes to `all` the `size` numbers of every process, one after the other by rank. Returns 0, or
// writes what went wrong to `error` (at most error_size bytes).
using gluon_syncbn_exchange = int (*)(int64_t layer, const char* key, const char* title,
                                      int64_t channels, const double* mine, int64_t size,
                                      double* all, int64_t all_size, char* error, int error_size);

// Registers the operator. `api`: the functions of mxnet_api.h in order. `process` is a word for
// this process: graphs that come from another one do not find its layers. Returns 0, or what
// MXCustomOpRegister said.
SBN_EXPORT int gluon_syncbn_register(void* const* api, const char* process, int naive_engine,
                                     int onednn, void (*warn)(const char* text),
                                     void (*failed)(int64_t layer, int64_t generation,
                                                    const char* text),
                                     void (*waits)(int64_t layer, int64_t generation, int backward),
                                     gluon_syncbn_exchange exchange);

// In the child of a fork, before which nobody waited: no threads, and every layer starts anew.
SBN_EXPORT void gluon_syncbn_after_fork();

// An error that could not be raised where it was found: the next forward call of any layer does.
SBN_EXPORT void gluon_syncbn_tell_next(const char* text);

SBN_EXPORT void gluon_syncbn_configure(int64_t layer, const char* name, const char* const* devices,
                                       int num_devices, int expected, int group_size,
                                       double timeout_seconds, int processes, int first_rank,
                                       int end_rank, const char* misfit);

// Only these devices take part from the next forward calls on; none: all do.
SBN_EXPORT void gluon_syncbn_set_present(const char* const* devices, int num_devices);

// Whether this process takes part in exchanges with sums of nothing, as it has run out of data.
SBN_EXPORT void gluon_syncbn_set_absent(int absent);

// See AllReduce::give_up; an empty reason: go on.
SBN_EXPORT void gluon_syncbn_give_up(const char* reason);
SBN_EXPORT void gluon_syncbn_forget(int64_t layer);
// Somebody else writes the running mean, or the running variance: virtual devices go on from there.
SBN_EXPORT void gluon_syncbn_restart(int64_t layer, int variance);

// After a failure: frees the running statistics of a device from the error that they hold, once
// everything that was pushed before has gone by, and lets the device take part again. Whoever waits
// for a result of the failed step still gets the error. Without arrays the device takes part again
// at once.
SBN_EXPORT int gluon_syncbn_settle(int64_t layer, int64_t generation, const char* device,
                                   void** arrays, int num_arrays, const char* text);

// Finds out whether these arrays of a device hold an error, once everything that was pushed before
// has gone by. If they do, whoever waits for the device gets an error too: see AllReduce::lose.
SBN_EXPORT int gluon_syncbn_look_for_error(int64_t layer, int64_t generation, int backward,
                                           const char* device, void** arrays, int num_arrays);

// The process ends: releases all who wait, with an error.
SBN_EXPORT void gluon_syncbn_close(const char* reason);

// The number of calls that wait for other devices now.
SBN_EXPORT int gluon_syncbn_waiting();

// For how long some have waited without another's coming; 0 where none waits.
SBN_EXPORT double gluon_syncbn_stuck_seconds();

// What the CUDA kernels were compiled by and for; null where there are none.
SBN_EXPORT const char* gluon_syncbn_cuda();

// Gives back the streams and the memory that are kept for the next calls on GPUs.
SBN_EXPORT void gluon_syncbn_release();

// Ctrl-C also releases those who wait. The handler that was there before is called first.
SBN_EXPORT int gluon_syncbn_catch_interrupts();

#endif  // GLUON_SYNCBN_API_LAYERS_H_
