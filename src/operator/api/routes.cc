// What Python calls for routes to other processes, and for its own waits. Errors become texts here,
// as no exception may leave a C function.
#include <atomic>
#include <locale>
#include <memory>
#include <sstream>
#include <string>
#include <utility>

#include "api/declare.h"
#include "mxnet/operations.h"
#include "processes/outcome.h"
#include "processes/route.h"
#include "processes/shared_memory.h"
#include "processes/transports.h"

using namespace gluon_syncbn;

namespace {

using ConnectionPtr = std::shared_ptr<Connection>;
using SegmentPtr = std::shared_ptr<Segment>;

RoutePtr* new_route(ConnectionPtr* connection, const char* key, int64_t size, int ranks,
                    Transports transports) {
  return new RoutePtr(
      std::make_shared<Route>(*connection, key, size, ranks, std::move(transports)));
}

// How many operations of stores have begun, and how many have ended.
std::atomic<int64_t> store_operations[2];

}  // namespace

// Makes a connection. It is never freed, as the process uses it until it exits.
SBN_API(ConnectionPtr*, gluon_syncbn_connect, (double explained_within)) {
  auto connection = std::make_shared<Connection>();
  connection->explained_within = explained_within;
  return new ConnectionPtr(std::move(connection));
}

// Python calls these around each call of a store function, without holding the GIL.
SBN_API(void, gluon_syncbn_lock_calls, (ConnectionPtr* connection)) { (*connection)->calls.lock(); }

SBN_API(void, gluon_syncbn_unlock_calls, (ConnectionPtr* connection)) {
  (*connection)->calls.unlock();
}

// The entries of InFlightExchanges: a line of numbers, of which the last two are the bytes of the
// key and the title, and then both, which may hold any character.
SBN_API(const char*, gluon_syncbn_in_flight, (ConnectionPtr* connection)) {
  std::ostringstream text;
  text.imbue(std::locale::classic());
  text.precision(17);
  for (const auto& entry : (*connection)->in_flight.entries()) {
    text << entry.open << ' ' << entry.number << ' ' << entry.timeout_seconds << ' ' << entry.since
         << ' ' << entry.key.size() << ' ' << entry.title.size() << '\n'
         << entry.key << entry.title;
  }
  text_for_python = text.str();
  return text_for_python.c_str();
}

// How many numbers a store adds up for a message of this size; 0 if it cannot add the message.
// exact_bits: the store adds integers below 2^exact_bits exactly.
SBN_API(int64_t, gluon_syncbn_packed_size, (int64_t size, int processes, int exact_bits)) {
  return FixedPoint(size, processes, exact_bits).size();
}

// A route for a key that all processes know, through MXNet's KVStore: see KVStoreSlots and, if
// `packed` is not null, KVStoreSums. Python owns the arrays and the store.
SBN_API(RoutePtr*, gluon_syncbn_kvstore_route,
        (ConnectionPtr* connection, const char* key, int exact_bits, PushPull* pushpull,
         void* kvstore, int number, int rank, int ranks, int64_t size, void* slots, float* thirds,
         int sums_number, void* sums_array, float* packed)) {
  const KVStoreSlots all{pushpull, kvstore, number, rank, ranks, size, slots, thirds};
  const KVStoreSums sums{sums_number, sums_array, packed};
  return new_route(connection, key, size, ranks,
                   kvstore_transports(all, packed ? &sums : nullptr, exact_bits));
}

// The same through Horovod: see HorovodArrays and, if Horovod `adds`, HorovodSums.
SBN_API(RoutePtr*, gluon_syncbn_horovod_route,
        (ConnectionPtr* connection, const char* key, int exact_bits, AllGather* allgather,
         int process_set, int ranks, int64_t size, void* input, double* values, void* output,
         int adds, AllReduce* allreduce, int operation, void* sums_input, void* sums_output,
         double* packed, double* added)) {
  const HorovodArrays arrays{allgather, process_set, ranks, size, input, values, output};
  const HorovodSums sums{allreduce, operation, sums_input, sums_output, packed, added};
  return new_route(connection, key, size, ranks,
                   horovod_transports(key, arrays, adds ? &sums : nullptr, exact_bits));
}

// Creates a segment or, if `file` is not null, opens another process's. On failure returns null and
// leaves a text. The segment is kept until the process ends.
SBN_API(SegmentPtr*, gluon_syncbn_segment, (const char* file, const char* token)) {
  return or_null(
      [&] { return new SegmentPtr(file ? Segment::open(file, token) : Segment::create(token)); });
}

SBN_API(int, gluon_syncbn_descriptor, (SegmentPtr* segment)) { return (*segment)->descriptor(); }

// Call this when no process will open the segment any more.
SBN_API(void, gluon_syncbn_close_descriptor, (SegmentPtr* segment)) {
  (*segment)->close_descriptor();
}

// A route between `ranks` processes of one machine, through the segment of rank 0. sums: whether
// they exchange a layer's messages. On failure returns null and leaves a text.
SBN_API(RoutePtr*, gluon_syncbn_shared_memory_route,
        (ConnectionPtr* connection, const char* key, SegmentPtr* segment, int rank, int ranks,
         int64_t size, int sums)) {
  return or_null([&] {
    auto transport =
        std::make_unique<SharedMemoryTransport>(*segment, key, rank, ranks, size, sums);
    return new_route(connection, key, size, ranks, {std::move(transport), nullptr, nullptr});
  });
}

// See StoreFunction.
SBN_CALLBACK(void, gluon_syncbn_on_all_reduce,
             (int64_t store, const char* key, double* values, int64_t rows, int64_t size,
              Outcome* outcome));

// A route through a function of the user's store. exact_bits: 0 if it may round.
SBN_API(RoutePtr*, gluon_syncbn_function_route,
        (ConnectionPtr* connection, const char* key, int exact_bits, int64_t store, int rank,
         int ranks, int64_t size)) {
  const StoreFunction function{gluon_syncbn_on_all_reduce, store};
  return new_route(connection, key, size, ranks,
                   function_transports(key, function, rank, ranks, size, exact_bits));
}

// See Route.
SBN_API(int64_t, gluon_syncbn_route_calls, (RoutePtr* route)) { return (*route)->calls(); }

SBN_API(void, gluon_syncbn_close_route, (RoutePtr* route, const char* why)) {
  (*route)->close(why);
}

// Writes the values of all processes, by rank, and returns 0, or their sums and returns 1. On
// failure: see status_of.
SBN_API(int, gluon_syncbn_exchange,
        (RoutePtr* route, const char* title, double timeout_seconds, const double* mine,
         int64_t size, double* everyone)) {
  return status_of([&] {
    std::vector<double> values(mine, mine + size);
    const Answer answer = (*route)->exchange(title, timeout_seconds, &values);
    std::copy(values.begin(), values.end(), everyone);
    return static_cast<int>(answer == Answer::kSums);
  });
}

// See ArrayWait. begin returns null if MXNet's engine takes no more operations, and
// gluon_syncbn_array_wait a Waited.
SBN_API(ArrayWait*, gluon_syncbn_array_wait_begin, (void* array)) {
  return or_null([&] { return new ArrayWait(array); });
}

SBN_API(int, gluon_syncbn_array_wait, (ArrayWait* wait, double seconds)) {
  return static_cast<int>(wait->wait(seconds));
}

SBN_API(void, gluon_syncbn_array_wait_end, (ArrayWait* wait)) { delete wait; }

// Counts an operation of a store, which waits for other processes: as begun (which is 0) or ended
// (1), once what was pushed so far for this array has ended, or at once if it is null.
SBN_API(void, gluon_syncbn_count_operation, (void* array, int which)) {
  const auto count = [which](bool) { ++store_operations[which]; };
  array ? when_passed(array, false, "SyncBatchNormStore", count) : count(false);
}

SBN_API(int64_t, gluon_syncbn_operations, (int which)) { return store_operations[which]; }
