#include "api/channels.h"

#include <cstring>
#include <exception>
#include <memory>
#include <string>
#include <utility>

using namespace gluon_syncbn;

namespace {

constexpr int kMaxErrorSize = 1 << 13;

using ConnectionPtr = std::shared_ptr<Connection>;

const ConnectionPtr& connection_of(void* connection) {
  return *static_cast<ConnectionPtr*>(connection);
}

const ChannelPtr& channel_of(void* channel) { return *static_cast<ChannelPtr*>(channel); }

void* new_channel(void* connection, const char* key, int64_t size, int ranks,
                  Transports transports) {
  return new ChannelPtr(std::make_shared<Channel>(connection_of(connection), key, size, ranks,
                                                  std::move(transports)));
}

using SegmentPtr = std::shared_ptr<Segment>;

const SegmentPtr& segment_of(void* segment) { return *static_cast<SegmentPtr*>(segment); }

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

FixedPoint* fixed_point_of(void* fixed_point) { return static_cast<FixedPoint*>(fixed_point); }

}  // namespace

Channels& gluon_syncbn::channels() {
  // Never destroyed: calls may still arrive while the process ends.
  static Channels* const channels = new Channels;
  return *channels;
}

void* gluon_syncbn_connect(int64_t id, gluon_syncbn_probe probe) {
  auto connection = std::make_shared<Connection>();
  connection->probe = [id, probe](const Delay& delay) {
    char error[kMaxErrorSize] = "";
    const int status = probe(id, &delay, error, kMaxErrorSize);
    return status == 0 ? std::string() : std::string(error[0] ? error : "The exchange failed.");
  };
  return new ConnectionPtr(std::move(connection));
}

void gluon_syncbn_lock_calls(void* connection) { connection_of(connection)->calls.lock(); }

void gluon_syncbn_unlock_calls(void* connection) { connection_of(connection)->calls.unlock(); }

void gluon_syncbn_in_flight(void* connection,
                            void (*report)(const char* exchange, double since, int open)) {
  for (const auto& entry : connection_of(connection)->in_flight.entries()) {
    report(entry.exchange.c_str(), entry.since, entry.open);
  }
}

int64_t gluon_syncbn_packed_size(int64_t size, int processes, int exact_bits) {
  return FixedPoint(size, processes, exact_bits).size();
}

void* gluon_syncbn_fixed_point(int64_t size, int processes, int exact_bits) {
  return new FixedPoint(size, processes, exact_bits);
}

int gluon_syncbn_fixed_point_ready(void* fixed_point) {
  return fixed_point_of(fixed_point)->ready();
}

void gluon_syncbn_pack(void* fixed_point, const double* message, double* packed) {
  fixed_point_of(fixed_point)->pack(message, packed);
}

int gluon_syncbn_unpack(void* fixed_point, const double* packed, double* message) {
  return fixed_point_of(fixed_point)->unpack(packed, message);
}

void gluon_syncbn_follow(void* fixed_point, const double* messages) {
  fixed_point_of(fixed_point)->follow(messages);
}

void gluon_syncbn_free_fixed_point(void* fixed_point) { delete fixed_point_of(fixed_point); }

void* gluon_syncbn_kvstore_channel(void* connection, const char* key, int exact_bits,
                                   const KVStoreSlots* slots, const KVStoreSums* sums) {
  Transports transports{std::make_unique<KVStoreTransport>(*slots), nullptr, nullptr};
  if (sums) {
    transports.fixed_point = std::make_shared<FixedPoint>(slots->size, slots->ranks, exact_bits);
    transports.sums = std::make_unique<KVStoreAdder>(*slots, *sums, transports.fixed_point);
  }
  return new_channel(connection, key, slots->size, slots->ranks, std::move(transports));
}

void* gluon_syncbn_horovod_channel(void* connection, const char* key, int exact_bits,
                                   const HorovodArrays* arrays, const HorovodSums* sums) {
  Transports transports{std::make_unique<HorovodTransport>(key, *arrays), nullptr, nullptr};
  if (sums) {
    transports.fixed_point = std::make_shared<FixedPoint>(arrays->size, arrays->ranks, exact_bits);
    transports.sums =
        std::make_unique<HorovodAdder>(key, arrays->process_set, *sums, transports.fixed_point);
  }
  return new_channel(connection, key, arrays->size, arrays->ranks, std::move(transports));
}

void* gluon_syncbn_segment(const char* file, const char* token, int* descriptor, char* error,
                           int error_size) {
  return or_error(error, error_size, [&] {
    const SegmentPtr segment = file ? Segment::open(file, token) : Segment::create(token);
    *descriptor = segment->descriptor();
    return new SegmentPtr(segment);
  });
}

void gluon_syncbn_close_descriptor(void* segment) { segment_of(segment)->close_descriptor(); }

void* gluon_syncbn_shared_memory_channel(void* connection, const char* key, void* segment, int rank,
                                         int ranks, int64_t size, int sums, char* error,
                                         int error_size) {
  return or_error(error, error_size, [&] {
    auto transport =
        std::make_unique<SharedMemoryTransport>(segment_of(segment), key, rank, ranks, size, sums);
    return new_channel(connection, key, size, ranks, {std::move(transport), nullptr, nullptr});
  });
}

int64_t gluon_syncbn_channel_calls(void* channel) { return channel_of(channel)->calls(); }

void gluon_syncbn_channel_restart(void* channel) { channel_of(channel)->restart(); }

int gluon_syncbn_channel_exchange(void* channel, const char* title, double timeout_seconds,
                                  const double* mine, double* everyone, char* error,
                                  int error_size) {
  try {
    const auto answer = channel_of(channel)->exchange(title, timeout_seconds, mine, everyone);
    return answer == Answer::kSums;
  } catch (const std::exception& failure) {
    std::strncpy(error, failure.what(), static_cast<size_t>(error_size) - 1);
    return -1;
  }
}

void gluon_syncbn_set_channel(int64_t layer, const char* key, void* channel) {
  channels().set(layer, key, channel_of(channel));
}

void gluon_syncbn_clear_channels() { channels().clear(); }

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
