#include "api/channels.h"

#include <cstring>
#include <exception>
#include <memory>
#include <string>
#include <utility>

using namespace gluon_syncbn;

namespace {

// What can be said of a wait at most.
constexpr int kMostText = 1 << 13;

using ConnectionPtr = std::shared_ptr<Connection>;

const ConnectionPtr& connection_of(void* connection) {
  return *static_cast<ConnectionPtr*>(connection);
}

const LinePtr& line_of(void* line) { return *static_cast<LinePtr*>(line); }

void* new_line(void* connection, const char* key, int64_t size, Carrier* carrier) {
  return new LinePtr(std::make_shared<Line>(connection_of(connection), key, size,
                                            std::unique_ptr<Carrier>(carrier)));
}

}  // namespace

Lines& gluon_syncbn::lines() {
  // Never destroyed: calls may still come when the process ends.
  static Lines* const lines = new Lines;
  return *lines;
}

void* gluon_syncbn_connect(int64_t number, gluon_syncbn_look look) {
  auto connection = std::make_shared<Connection>();
  connection->look = [number, look](const Delay& delay) {
    char text[kMostText] = "";
    const int status =
        look(number, static_cast<int>(delay.waited), delay.title.c_str(), delay.meeting.c_str(),
             delay.error.c_str(), delay.seconds, delay.timeout, delay.looks, text, kMostText);
    return status == 0 ? std::string() : std::string(text[0] ? text : "The exchange failed.");
  };
  return new ConnectionPtr(std::move(connection));
}

void gluon_syncbn_lock_calls(void* connection) { connection_of(connection)->calls.lock(); }

void gluon_syncbn_unlock_calls(void* connection) { connection_of(connection)->calls.unlock(); }

void gluon_syncbn_attendance(void* connection,
                             void (*tell)(const char* meeting, double since, int open)) {
  for (const Attendance::Entry& entry : connection_of(connection)->attendance.entries()) {
    tell(entry.meeting.c_str(), entry.since, entry.open);
  }
}

void* gluon_syncbn_kvstore_line(void* connection, const char* key, int64_t size, int rank,
                                int ranks, void* pushpull, void* kvstore, int number, void* slots,
                                float* parts) {
  return new_line(connection, key, size,
                  new KVStoreCarrier(reinterpret_cast<PushPull>(pushpull), kvstore, number, slots,
                                     parts, rank, ranks, size));
}

void* gluon_syncbn_horovod_line(void* connection, const char* key, int64_t size, int ranks,
                                void* allgather, void* input, double* values, void* output) {
  return new_line(connection, key, size,
                  new HorovodCarrier(reinterpret_cast<AllGather>(allgather), key, input, values,
                                     output, ranks, size));
}

int64_t gluon_syncbn_line_calls(void* line) { return line_of(line)->calls(); }

int gluon_syncbn_line_exchange(void* line, const char* title, double timeout_seconds,
                               const double* mine, double* everyone, char* error, int error_size) {
  try {
    line_of(line)->exchange(title, timeout_seconds, mine, everyone);
    return 0;
  } catch (const std::exception& failure) {
    std::strncpy(error, failure.what(), static_cast<size_t>(error_size) - 1);
    return 1;
  }
}

void gluon_syncbn_set_line(int64_t layer, const char* key, void* line) {
  lines().set(layer, key, line_of(line));
}

void gluon_syncbn_clear_lines() { lines().clear(); }

void* gluon_syncbn_watch_begin(void* array) {
  try {
    return new Watch(array);
  } catch (const std::exception&) {
    return nullptr;
  }
}

int gluon_syncbn_watch_wait(void* watch, double seconds) {
  return static_cast<int>(static_cast<Watch*>(watch)->wait(seconds));
}

void gluon_syncbn_watch_end(void* watch) { delete static_cast<Watch*>(watch); }
