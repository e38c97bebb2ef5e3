// What Python calls for routes to other processes, and for its own waits. Errors become texts here,
// as no exception may leave a C function.
#include <atomic>
#include <cstring>
#include <exception>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>

#include "api/exports.h"
#include "mxnet/operations.h"
#include "processes/outcome.h"
#include "processes/route.h"
#include "processes/shared_memory.h"
#include "processes/transports.h"

using namespace gluon_syncbn;

namespace {

using ConnectionPtr = std::shared_ptr<Connection>;

const ConnectionPtr& connection_of(void* connection) {
  return *static_cast<ConnectionPtr*>(connection);
}

const RoutePtr& route_of(void* route) { return *static_cast<RoutePtr*>(route); }

void* new_route(void* connection, const char* key, int64_t size, int ranks, Transports transports) {
  return new RoutePtr(
      std::make_shared<Route>(connection_of(connection), key, size, ranks, std::move(transports)));
}

using SegmentPtr = std::shared_ptr<Segment>;

const SegmentPtr& segment_of(void* segment) { return *static_cast<SegmentPtr*>(segment); }

// How many operations of stores have begun, and how many have ended.
std::atomic<int64_t> store_operations[2];

// Returns f(), or writes the error that it throws and returns null.
template <typename F>
void* or_error(char* error, int error_size, const F& f) {
  try {
    return f();
  } catch (const std::exception& failure) {
    std::strncpy(error, failure.what(), static_cast<size_t>(error_size) - 1);
    return nullptr;
  }
}

}  // namespace

// Makes a connection. It is never freed, as the process uses it until it exits.
SBN_EXPORT void* gluon_syncbn_connect(double explained_within) {
  auto connection = std::make_shared<Connection>();
  connection->explained_within = explained_within;
  return new ConnectionPtr(std::move(connection));
}

// Python calls these around each call of a store function, without holding the GIL.
SBN_EXPORT void gluon_syncbn_lock_calls(void* connection) {
  connection_of(connection)->calls.lock();
}

SBN_EXPORT void gluon_syncbn_unlock_calls(void* connection) {
  connection_of(connection)->calls.unlock();
}

// Reports each entry of InFlightExchanges. On failure, writes an error and returns null.
SBN_EXPORT void* gluon_syncbn_in_flight(void* connection,
                                        void (*report)(const char* title, const char* key,
                                                       int64_t number, double timeout_seconds,
                                                       double since, int open, Outcome*),
                                        char* error, int error_size) {
  return or_error(error, error_size, [&] {
    for (const auto& entry : connection_of(connection)->in_flight.entries()) {
      Outcome outcome;
      report(entry.title.c_str(), entry.key.c_str(), entry.number, entry.timeout_seconds,
             entry.since, entry.open, &outcome);
      if (!outcome.succeeded) throw std::runtime_error(outcome.failure());
    }
    return connection;
  });
}

// How many numbers a store adds up for a message of this size; 0 if it cannot add the message.
// exact_bits: the store adds integers below 2^exact_bits exactly.
SBN_EXPORT int64_t gluon_syncbn_packed_size(int64_t size, int processes, int exact_bits) {
  return FixedPoint(size, processes, exact_bits).size();
}

// A route for a key that all processes know. Python owns the arrays and the store. The sums may
// be null.
SBN_EXPORT void* gluon_syncbn_kvstore_route(void* connection, const char* key, int exact_bits,
                                            const KVStoreSlots* slots, const KVStoreSums* sums) {
  return new_route(connection, key, slots->size, slots->ranks,
                   kvstore_transports(*slots, sums, exact_bits));
}

SBN_EXPORT void* gluon_syncbn_horovod_route(void* connection, const char* key, int exact_bits,
                                            const HorovodArrays* arrays, const HorovodSums* sums) {
  return new_route(connection, key, arrays->size, arrays->ranks,
                   horovod_transports(key, *arrays, sums, exact_bits));
}

// Creates a segment and writes its descriptor, or, if `file` is not null, opens another process's
// segment. On failure, writes an error (at most error_size bytes) and returns null. The segment is
// kept until the process ends.
SBN_EXPORT void* gluon_syncbn_segment(const char* file, const char* token, int* descriptor,
                                      char* error, int error_size) {
  return or_error(error, error_size, [&] {
    const SegmentPtr segment = file ? Segment::open(file, token) : Segment::create(token);
    *descriptor = segment->descriptor();
    return new SegmentPtr(segment);
  });
}

// Call this when no process will open the segment any more.
SBN_EXPORT void gluon_syncbn_close_descriptor(void* segment) {
  segment_of(segment)->close_descriptor();
}

// A route between `ranks` processes of one machine, through the segment of rank 0. sums: whether
// they exchange a layer's messages. On failure, writes an error and returns null.
SBN_EXPORT void* gluon_syncbn_shared_memory_route(void* connection, const char* key, void* segment,
                                                  int rank, int ranks, int64_t size, int sums,
                                                  char* error, int error_size) {
  return or_error(error, error_size, [&] {
    auto transport =
        std::make_unique<SharedMemoryTransport>(segment_of(segment), key, rank, ranks, size, sums);
    return new_route(connection, key, size, ranks, {std::move(transport), nullptr, nullptr});
  });
}

// A route through a function of the user's store. exact_bits: 0 if it may round.
SBN_EXPORT void* gluon_syncbn_function_route(void* connection, const char* key, int exact_bits,
                                             const StoreFunction* function, int rank, int ranks,
                                             int64_t size) {
  return new_route(connection, key, size, ranks,
                   function_transports(key, *function, rank, ranks, size, exact_bits));
}

// See Route.
SBN_EXPORT int64_t gluon_syncbn_route_calls(void* route) { return route_of(route)->calls(); }

SBN_EXPORT void gluon_syncbn_close_route(void* route, const char* why) {
  route_of(route)->close(why);
}

// Writes the values of all processes, by rank, and returns 0, or writes their sums and returns 1.
// On failure, writes an error (at most error_size bytes) and returns -1, or -2 if Ctrl-C has come.
SBN_EXPORT int gluon_syncbn_exchange(void* route, const char* title, double timeout_seconds,
                                     const double* mine, int64_t size, double* everyone,
                                     char* error, int error_size) {
  const Interruption interruption;
  try {
    std::vector<double> values(mine, mine + size);
    const Answer answer = route_of(route)->exchange(title, timeout_seconds, &values);
    std::copy(values.begin(), values.end(), everyone);
    return answer == Answer::kSums;
  } catch (const std::exception& failure) {
    std::strncpy(error, failure.what(), static_cast<size_t>(error_size) - 1);
    return interruption.what() == Waited::kInterrupted ? -2 : -1;
  }
}

// See ArrayWait. begin returns null if MXNet's engine takes no more operations, and
// gluon_syncbn_array_wait a Waited.
SBN_EXPORT void* gluon_syncbn_array_wait_begin(void* array) {
  try {
    return new ArrayWait(array);
  } catch (const std::exception&) {
    return nullptr;
  }
}

SBN_EXPORT int gluon_syncbn_array_wait(void* wait, double seconds) {
  return static_cast<int>(static_cast<ArrayWait*>(wait)->wait(seconds));
}

SBN_EXPORT void gluon_syncbn_array_wait_end(void* wait) { delete static_cast<ArrayWait*>(wait); }

// Counts an operation of a store, which waits for other processes: as begun (which is 0) or ended
// (1), once what was pushed so far for this array has ended, or at once if it is null.
SBN_EXPORT void gluon_syncbn_count_operation(void* array, int which) {
  const auto count = [which](bool) { ++store_operations[which]; };
  array ? when_passed(array, false, "SyncBatchNormStore", count) : count(false);
}

SBN_EXPORT int64_t gluon_syncbn_operations(int which) { return store_operations[which]; }
