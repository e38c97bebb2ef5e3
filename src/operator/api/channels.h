// The C API for exchanges between processes: connections, channels, and watches.
#ifndef GLUON_SYNCBN_API_CHANNELS_H_
#define GLUON_SYNCBN_API_CHANNELS_H_

#include <cstdint>

#include "api/exports.h"
#include "exchange/channel.h"
#include "exchange/shared_memory.h"
#include "exchange/transports.h"

namespace gluon_syncbn {

// Of this process.
Channels& channels();

}  // namespace gluon_syncbn

// Returns 0 to go on with a wait, or writes why not to `error` (at most `size` bytes).
using gluon_syncbn_probe = int (*)(int64_t connection, const gluon_syncbn::Delay*, char* error,
                                   int size);

// A connection, which Python knows by this id. Never freed, as the process uses it to its end.
SBN_EXPORT void* gluon_syncbn_connect(int64_t id, gluon_syncbn_probe probe);

// Around each of Python's calls of the store's functions. The GIL must not be held.
SBN_EXPORT void gluon_syncbn_lock_calls(void* connection);
SBN_EXPORT void gluon_syncbn_unlock_calls(void* connection);

// Reports each entry of InFlightExchanges.
SBN_EXPORT void gluon_syncbn_in_flight(void* connection, void (*report)(const char* exchange,
                                                                        double since, int open));

// How many numbers a store adds up for a message of this size; 0 if it cannot. exact_bits: it adds
// whole numbers below 2^exact_bits exactly.
SBN_EXPORT int64_t gluon_syncbn_packed_size(int64_t size, int processes, int exact_bits);

// See FixedPoint. Python's own stores use it.
SBN_EXPORT void* gluon_syncbn_fixed_point(int64_t size, int processes, int exact_bits);
SBN_EXPORT int gluon_syncbn_fixed_point_ready(void* fixed_point);
SBN_EXPORT void gluon_syncbn_pack(void* fixed_point, const double* message, double* packed);
SBN_EXPORT int gluon_syncbn_unpack(void* fixed_point, const double* packed, double* message);
SBN_EXPORT void gluon_syncbn_follow(void* fixed_point, const double* messages);
SBN_EXPORT void gluon_syncbn_free_fixed_point(void* fixed_point);

// A channel for a key that all processes know. Python owns the arrays and the store. The sums may
// be null.
SBN_EXPORT void* gluon_syncbn_kvstore_channel(void* connection, const char* key, int exact_bits,
                                              const gluon_syncbn::KVStoreSlots*,
                                              const gluon_syncbn::KVStoreSums*);
SBN_EXPORT void* gluon_syncbn_horovod_channel(void* connection, const char* key, int exact_bits,
                                              const gluon_syncbn::HorovodArrays*,
                                              const gluon_syncbn::HorovodSums*);

// A segment of this process, whose descriptor it writes, or without one that of another process,
// from a file. Returns null and writes an error (at most error_size bytes) if it failed. Kept until
// the process ends.
SBN_EXPORT void* gluon_syncbn_segment(const char* file, const char* token, int* descriptor,
                                      char* error, int error_size);
// Nobody will open it any more.
SBN_EXPORT void gluon_syncbn_close_descriptor(void* segment);
// A channel between `ranks` processes of one machine, through the segment of the first. sums: they
// exchange a layer's messages. Returns null and writes an error if it failed.
SBN_EXPORT void* gluon_syncbn_shared_memory_channel(void* connection, const char* key,
                                                    void* segment, int rank, int ranks,
                                                    int64_t size, int sums, char* error,
                                                    int error_size);

SBN_EXPORT int64_t gluon_syncbn_channel_calls(void* channel);
SBN_EXPORT void gluon_syncbn_channel_restart(void* channel);

// Writes the values of all processes, by rank, and returns 0, or their sums, and returns 1. Returns
// -1 and writes an error (at most error_size bytes) if it failed.
SBN_EXPORT int gluon_syncbn_channel_exchange(void* channel, const char* title,
                                             double timeout_seconds, const double* mine,
                                             double* everyone, char* error, int error_size);

// From now on the layer's messages of this key take the channel; after clear, all go through
// Python.
SBN_EXPORT void gluon_syncbn_set_channel(int64_t layer, const char* key, void* channel);
SBN_EXPORT void gluon_syncbn_clear_channels();

// See Watch. begin returns null if MXNet's engine takes no more operations; wait returns a Waited.
SBN_EXPORT void* gluon_syncbn_watch_begin(void* array);
SBN_EXPORT int gluon_syncbn_watch_wait(void* watch, double seconds);
SBN_EXPORT void gluon_syncbn_watch_end(void* watch);

#endif  // GLUON_SYNCBN_API_CHANNELS_H_
