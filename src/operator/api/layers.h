// The C API for layers, and for the process.
#ifndef GLUON_SYNCBN_API_LAYERS_H_
#define GLUON_SYNCBN_API_LAYERS_H_

#include <cstdint>

#include "api/exports.h"

// The version of the package that this library was built for.
SBN_EXPORT const char* gluon_syncbn_version();

// See Message. `all` receives the `size` values of every process, by rank, or their sums.
struct gluon_syncbn_message {
  int64_t layer;
  const char *key, *title;
  int64_t channels;
  const double* values;
  int64_t size;
  double* all;
  int64_t all_size;
};

// See Observer. exchange returns 0 if it wrote the values of all processes, and 1 if it wrote their
// sums. On failure, it writes an error (at most error_size bytes) and returns -1.
struct gluon_syncbn_callbacks {
  void (*warn)(const char* text);
  void (*failed)(int64_t layer, int64_t epoch, const char* text);
  void (*waits)(int64_t layer, int64_t epoch, int backward);
  int (*exchange)(const gluon_syncbn_message*, char* error, int error_size);
};

// Registers the operator. `api`: the functions of mxnet/api.h in order. `process_uuid` keeps graphs
// of other processes from finding the layers of this one. Returns the result of MXCustomOpRegister.
SBN_EXPORT int gluon_syncbn_register(void* const* api, const char* process_uuid, int naive_engine,
                                     int onednn, const gluon_syncbn_callbacks*);

// Call this in the child of a fork, at which no call may have been waiting. Drops the threads and
// GPU memory, which the child cannot use, and starts a new epoch in every layer.
SBN_EXPORT void gluon_syncbn_after_fork();

// See Rendezvous::report_next.
SBN_EXPORT void gluon_syncbn_report_next(const char* text);

// See LayerConfig.
struct gluon_syncbn_layer_config {
  const char* name;
  const char* const* devices;
  int device_count;
  int num_devices, group_size;
  double timeout_seconds;
  int processes, first_rank, end_rank;
  const char *config_error, *notice;
};
SBN_EXPORT void gluon_syncbn_configure(int64_t layer, const gluon_syncbn_layer_config*);
SBN_EXPORT void gluon_syncbn_forget(int64_t layer);

// See Rendezvous.
SBN_EXPORT void gluon_syncbn_set_active_devices(const char* const* devices, int num_devices);
SBN_EXPORT void gluon_syncbn_set_joined(int joined);
SBN_EXPORT void gluon_syncbn_give_up(const char* reason);

// After a failure: once all operations pushed earlier have finished, clears the error of the failed
// step from a device's running statistics and lets the device take part again. Waiting for a result
// of the failed step still raises the error. If there are no arrays, the device takes part at once.
SBN_EXPORT int gluon_syncbn_drain(int64_t layer, int64_t epoch, const char* device, void** arrays,
                                  int num_arrays, const char* text);

// Once all operations pushed earlier have finished, checks whether these arrays of a device hold an
// error. If so, the devices that wait for this one get an error: see Rendezvous::unreachable.
SBN_EXPORT int gluon_syncbn_probe_arrays(int64_t layer, int64_t epoch, int backward,
                                         const char* device, void** arrays, int num_arrays);

// Begins to flush devices, each with num_arrays arrays. A device's flush ends once all operations
// pushed earlier for its arrays have finished: see Rendezvous::begin_flush.
SBN_EXPORT int gluon_syncbn_flush(int64_t layer, int backward, const char* const* devices,
                                  int num_devices, void** arrays, int num_arrays);
SBN_EXPORT int gluon_syncbn_flushing();

// Call this when the process ends: all waits end with an error.
SBN_EXPORT void gluon_syncbn_close(const char* reason);

// The number of calls that wait for other devices now, and the seconds since the last arrival; 0 if
// no call waits.
SBN_EXPORT int gluon_syncbn_waiting();
SBN_EXPORT double gluon_syncbn_stuck_seconds();

// The compiler version and the architectures of the CUDA kernels; null if there are no kernels.
SBN_EXPORT const char* gluon_syncbn_cuda();

// See peer_access.
SBN_EXPORT int gluon_syncbn_peer_access();

// Frees the streams and the memory kept for the next calls on GPUs.
SBN_EXPORT void gluon_syncbn_release();

// Makes Ctrl-C end waits too. The previous handler is still called.
SBN_EXPORT int gluon_syncbn_catch_interrupts();

#endif  // GLUON_SYNCBN_API_LAYERS_H_
