// A layer, and calls of its devices on background threads.
#ifndef GLUON_SYNCBN_TESTS_RENDEZVOUS_FIXTURE_H_
#define GLUON_SYNCBN_TESTS_RENDEZVOUS_FIXTURE_H_

#include <algorithm>
#include <atomic>
#include <cstring>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "check.h"
#include "reference.h"
#include "rendezvous/rendezvous.h"
#include "threads.h"

namespace gluon_syncbn {

using Clock = std::chrono::steady_clock;
using Sums = std::vector<ChannelSums>;
using Doubles = std::vector<double>;

// Longer than any test, so what ends earlier was not a timeout.
inline constexpr double kLong = 100;
// The maximum for "at once" on a busy machine.
inline constexpr double kSoon = 10;

inline double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

inline std::vector<std::string> cpus(int n) {
  std::vector<std::string> names;
  for (int i = 0; i < n; ++i) names.push_back("cpu(" + std::to_string(i) + ")");
  return names;
}

inline LayerConfig config_of(std::vector<std::string> devices, double timeout = kLong) {
  LayerConfig config;
  config.name = "net0_norm7";
  config.devices = std::move(devices);
  config.timeout_seconds = timeout;
  return config;
}

// A layer of two processes, one of which is here.
inline LayerConfig config_of_two_processes(std::vector<std::string> devices,
                                           double timeout = kLong) {
  LayerConfig config = config_of(std::move(devices), timeout);
  config.spans_processes = true;
  config.end_rank = 2;
  return config;
}

// The contribution of a device: different values in each call, for which a plain sum would depend
// on the order.
inline Sums contribution(size_t device, int64_t call, size_t channels) {
  Random random(static_cast<uint64_t>(call) * 64 + device);
  Sums sums(channels);
  for (ChannelSums& s : sums) {
    s.first.add(random.sign() * 1e17);
    s.first.add(random.normal());
    s.second.add_product(1e10 + random.normal(), 1e10 + random.normal());
  }
  return sums;
}

inline Sums added_in_rank_order(size_t devices, int64_t call, size_t channels) {
  Sums sums(channels);
  for (size_t device = 0; device < devices; ++device) {
    const Sums part = contribution(device, call, channels);
    for (size_t c = 0; c < channels; ++c) sums[c].add(part[c]);
  }
  return sums;
}

// What a device brings.
inline PassSums on_host(const Sums& sums, double count) {
  return {static_cast<int64_t>(sums.size()), count, sums, {}};
}

inline bool same_bits(const Sums& a, const Sums& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(a[0])) == 0;
}

// One layer.
struct Fixture {
  static constexpr int64_t kLayer = 5;

  Rendezvous rendezvous;
  LayerPtr layer;

  explicit Fixture(LayerConfig config) { configure(std::move(config)); }

  void configure(LayerConfig config) {
    rendezvous.configure(kLayer, std::move(config));
    layer = rendezvous.find(kLayer);
  }

  CallId next(const std::string& device) { return rendezvous.next_call(layer, device); }

  void reduce(const CallId& id, const std::string& device,
              Direction direction = Direction::kForward) {
    // A copy, as configure() may replace it meanwhile.
    const LayerPtr called = layer;
    rendezvous.reduce(called, id, direction, device, "float32", on_host(Sums(2), 1));
  }

  void call(const std::string& device) { reduce(next(device), device); }

  void wait_until_waiting(int calls) {
    while (rendezvous.waiting() != calls) sleep(0.001);
  }
};

// Runs f on a new thread and keeps its error.
class Background {
 public:
  template <typename F>
  explicit Background(const F& f)
      : start_(Clock::now()), thread_([this, f] {
          try {
            f();
          } catch (const Error& error) {
            error_ = error.what();
          }
          seconds_ = seconds_since(start_);
          has_ended_ = true;
        }) {}
  Background(Fixture* fixture, const std::string& device)
      : Background([=] { fixture->call(device); }) {}

  // The error, or "".
  const std::string& error() {
    if (thread_.joinable()) thread_.join();
    return error_;
  }
  bool has_ended() const { return has_ended_; }
  double seconds() {
    error();
    return seconds_;
  }
  ~Background() { error(); }

 private:
  std::string error_;
  double seconds_ = 0;
  std::atomic<bool> has_ended_{false};
  Clock::time_point start_;
  std::thread thread_;
};

inline bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != text.npos;
}

// Writes the values of all processes, by rank, or returns an error.
using Send = std::function<std::string(const Doubles& message, Doubles* all)>;

struct FakeTransport : Transport {
  explicit FakeTransport(size_t s, Send f) : size(s), send_message(std::move(f)) {}
  void pack(const double* values) override { mine.assign(values, values + size); }
  void send(std::mutex*) override {
    const std::string error = send_message(mine, &all);
    if (!error.empty()) throw StoreError(error);
  }
  Waited wait(double) override { return Waited::kDone; }
  Answer unpack(std::vector<double>* values) override {
    *values = all;
    return Answer::kValues;
  }

  const size_t size;
  const Send send_message;
  Doubles mine;
  std::vector<double> all;
};

// Opens routes that all go through one function, and notes their keys.
inline LayerMessages::Open opens(int64_t processes, std::vector<std::string>* keys,
                                 const Send& send) {
  return [processes, keys, send](const ProcessCall& call, int64_t channels, int64_t size) {
    CHECK_EQ(size, 2 + 6 * channels);
    keys->push_back(std::to_string(call.layer) + (call.is_backward ? " backward " : " forward ") +
                    std::to_string(call.node));
    return std::make_shared<Route>(
        std::make_shared<Connection>(), keys->back(), size, processes,
        Transports{std::make_unique<FakeTransport>(static_cast<size_t>(size), send), nullptr,
                   nullptr});
  };
}

}  // namespace gluon_syncbn

#endif  // GLUON_SYNCBN_TESTS_RENDEZVOUS_FIXTURE_H_
