// A layer to meet at, and calls that wait there on threads of their own.
#ifndef GLUON_SYNCBN_TESTS_ALL_REDUCE_FIXTURE_H_
#define GLUON_SYNCBN_TESTS_ALL_REDUCE_FIXTURE_H_

#include <algorithm>
#include <chrono>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "rendezvous/all_reduce.h"
#include "check.h"

namespace gluon_syncbn {

using Clock = std::chrono::steady_clock;
using Sums = std::vector<ChannelSums>;

// Longer than any test: what ends earlier was not ended by the timeout.
inline constexpr double kLong = 100;
// What "at once" may take on a busy machine.
inline constexpr double kSoon = 10;

inline double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

inline void sleep(double seconds) {
  std::this_thread::sleep_for(std::chrono::duration<double>(seconds));
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

// One layer, and what its observer is told.
struct Fixture {
  static constexpr int64_t kNumber = 5;

  AllReduce all_reduce;
  AllReduce::LayerPtr layer;
  std::mutex mutex;
  std::vector<std::string> warnings, failures;
  std::set<int64_t> failed_layers;
  size_t failures_before_warning = 0;
  int64_t generation = 0;

  explicit Fixture(LayerConfig config) {
    Observer observer;
    // Both ask for waiting(): no lock may be held.
    observer.warn = [this](const std::string& text) {
      const std::lock_guard<std::mutex> lock(mutex);
      all_reduce.waiting();
      warnings.push_back(text);
      failures_before_warning = failures.size();
    };
    observer.failed = [this](int64_t number, int64_t failed_generation, const std::string& text) {
      const std::lock_guard<std::mutex> lock(mutex);
      all_reduce.waiting();
      failed_layers.insert(number);
      generation = std::max(generation, failed_generation);
      failures.push_back(text);
    };
    all_reduce.observe(observer);
    configure(std::move(config));
  }

  void configure(LayerConfig config) {
    all_reduce.configure(kNumber, std::move(config));
    layer = all_reduce.find(kNumber);
  }

  void settle(const std::string& device) { all_reduce.settle(kNumber, generation, device); }

  Ticket next(const std::string& device) { return all_reduce.next_ticket(layer, device); }

  void reduce(const Ticket& ticket, const std::string& device,
              Direction direction = Direction::kForward, size_t channels = 2,
              const char* dtype = "float32") {
    Sums sums(channels);
    double count = 1;
    all_reduce.reduce(layer, ticket, direction, device, dtype, &sums, &count);
  }

  void call(const std::string& device) { reduce(next(device), device); }

  void wait_until_waiting(int calls) {
    while (all_reduce.waiting() != calls) sleep(0.001);
  }
};

// Runs f on a thread of its own and keeps what it throws.
class Call {
 public:
  template <typename F>
  explicit Call(const F& f)
      : start_(Clock::now()), thread_([this, f] {
          try {
            f();
          } catch (const Error& error) {
            error_ = error.what();
          }
          seconds_ = seconds_since(start_);
        }) {}
  Call(Fixture* fixture, const std::string& device) : Call([=] { fixture->call(device); }) {}

  // Empty where nothing was thrown.
  const std::string& error() {
    if (thread_.joinable()) thread_.join();
    return error_;
  }
  double seconds() {
    error();
    return seconds_;
  }
  ~Call() { error(); }

 private:
  std::string error_;
  double seconds_ = 0;
  Clock::time_point start_;
  std::thread thread_;
};

inline bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != text.npos;
}

// That the devices meet, whoever comes first.
inline void check_meets(Fixture* fixture, const std::vector<std::string>& devices) {
  std::vector<std::unique_ptr<Call>> calls;
  for (const std::string& device : devices) calls.emplace_back(new Call(fixture, device));
  for (const auto& call : calls) CHECK_EQ(call->error(), "");
  CHECK_EQ(fixture->all_reduce.waiting(), 0);
}

}  // namespace gluon_syncbn

#endif  // GLUON_SYNCBN_TESTS_ALL_REDUCE_FIXTURE_H_
