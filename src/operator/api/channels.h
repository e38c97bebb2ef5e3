// The C API for exchanges between processes: connections, channels, and watches.
#ifndef GLUON_SYNCBN_API_CHANNELS_H_
#define GLUON_SYNCBN_API_CHANNELS_H_

#include <cstdint>

#include "api/exports.h"
#include "exchange/channel.h"
#include "exchange/shared_memory.h"
#include "exchange/transports.h"

namespace gluon_syncbn {

// The channels of this process.
Channels& channels();

}  // namespace gluon_syncbn

// Returns 0 to keep waiting. Otherwise writes the reason to stop to `error` (at most `size` bytes).
using gluon_syncbn_probe = int (*)(int64_t connection, const gluon_syncbn::Delay*, char* error,
                                   int size);

// Makes a connection, which Python identifies by `id`. It is never freed, as the process uses it
// until it exits.
SBN_EXPORT void* gluon_syncbn_connect(int64_t id, gluon_syncbn_probe probe);

// Python calls these around each call of a store function, without holding the GIL.
SBN_EXPORT void gluon_syncbn_lock_calls(void* connection);
SBN_EXPORT void gluon_syncbn_unlock_calls(void* connection);

// Reports each entry of InFlightExchanges.
SBN_EXPORT void gluon_syncbn_in_flight(void* connection, void (*report)(const char* exchange,
                                                                        double since, int open));

// How many numbers a store adds up for a message of this size; 0 if it cannot add the message.
// exact_bits: the store adds integers below 2^exact_bits exactly.
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

// Creates a segment and writes its descriptor, or, if `file` is not null, opens another process's
// segment. On failure, writes an error (at most error_size bytes) and returns null. The segment is
// kept until the process ends.
SBN_EXPORT void* gluon_syncbn_segment(const char* file, const char* token, int* descriptor,
                                      char* error, int error_size);
// Call this when no process will open the segment any more.
SBN_EXPORT void gluon_syncbn_close_descriptor(void* segment);
// A channel between `ranks` processes of one machine, through the segment of rank 0. sums: whether
// they exchange a layer's messages. On failure, writes an error and returns null.
SBN_EXPORT void* gluon_syncbn_shared_memory_channel(void* connection, const char* key,
                                                    void* segment, int rank, int ranks,
                                                    int64_t size, int sums, char* error,
                                                    int error_size);

SBN_EXPORT int64_t gluon_syncbn_channel_calls(void* channel);
SBN_EXPORT void gluon_syncbn_channel_restart(void* channel);

// Writes the values of all processes, by rank, and returns 0, or writes their sums and returns 1.
// On failure, writes an error (at most error_size bytes) and returns -1.
SBN_EXPORT int gluon_syncbn_channel_exchange(void* channel, const char* title,
                                             double timeout_seconds, const double* mine,
                                             double* everyone, char* error, int error_size);

// From now on the layer's messages with this key use the channel. After clear, all messages go
// through Python.
SBN_EXPORT void gluon_syncbn_set_channel(int64_t layer, const char* key, void* channel);
SBN_EXPORT void gluon_syncbn_clear_channels();

// See Watch. begin returns null if MXNet's engine takes no more operations; wait returns a Waited.
SBN_EXPORT void* gluon_syncbn_watch_begin(void* array);
SBN_EXPORT int gluon_syncbn_watch_wait(void* watch, double seconds);
SBN_EXPORT void gluon_syncbn_watch_end(void* watch);

#endif  // GLUON_SYNCBN_API_CHANNELS_H_
