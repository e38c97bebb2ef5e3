// What the library offers to _native.py of stores: connections, the lines over them, watches.
#ifndef GLUON_SYNCBN_API_CHANNELS_H_
#define GLUON_SYNCBN_API_CHANNELS_H_

#include <cstdint>

#include "exchange/transports.h"
#include "exchange/channel.h"
#include "api/exports.h"

namespace gluon_syncbn {

// Of this process.
Lines& lines();

}  // namespace gluon_syncbn

// Looks at a wait: see Delay. Returns 0 to go on, or writes why not to `text` (at most size bytes).
using gluon_syncbn_look = int (*)(int64_t connection, int waited, const char* title,
                                  const char* meeting, const char* error, double seconds,
                                  double timeout, int looks, char* text, int size);

// What connects this process with others, by a number of Python's. Never freed, as nothing here is
// before the process ends.
SBN_EXPORT void* gluon_syncbn_connect(int64_t number, gluon_syncbn_look look);

// For each call of the store's functions that Python makes. Without Python's own lock.
SBN_EXPORT void gluon_syncbn_lock_calls(void* connection);
SBN_EXPORT void gluon_syncbn_unlock_calls(void* connection);

// Tells of each meeting to which this process has come: see Attendance.
SBN_EXPORT void gluon_syncbn_attendance(void* connection,
                                        void (*tell)(const char* meeting, double since, int open));

// A key that all processes know: see the carriers. Arrays and the store stay Python's.
SBN_EXPORT void* gluon_syncbn_kvstore_line(void* connection, const char* key, int64_t size,
                                           int rank, int ranks, void* pushpull, void* kvstore,
                                           int number, void* slots, float* parts);
SBN_EXPORT void* gluon_syncbn_horovod_line(void* connection, const char* key, int64_t size,
                                           int ranks, void* allgather, void* input, double* values,
                                           void* output);
SBN_EXPORT int64_t gluon_syncbn_line_calls(void* line);

// Writes the numbers of all processes, by rank. Returns 0, or writes what went wrong to `error` (at
// most error_size bytes).
SBN_EXPORT int gluon_syncbn_line_exchange(void* line, const char* title, double timeout_seconds,
                                          const double* mine, double* everyone, char* error,
                                          int error_size);

// From now on the layer's messages of this key take the line; after clear(), none does.
SBN_EXPORT void gluon_syncbn_set_line(int64_t layer, const char* key, void* line);
SBN_EXPORT void gluon_syncbn_clear_lines();

// begin() starts to watch an array, see Watch, or returns null; wait() returns a Waited; end()
// stops.
SBN_EXPORT void* gluon_syncbn_watch_begin(void* array);
SBN_EXPORT int gluon_syncbn_watch_wait(void* watch, double seconds);
SBN_EXPORT void gluon_syncbn_watch_end(void* watch);

#endif  // GLUON_SYNCBN_API_CHANNELS_H_
