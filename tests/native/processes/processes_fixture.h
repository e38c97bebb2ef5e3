// Processes with routes through a fake store.
#ifndef GLUON_SYNCBN_TESTS_PROCESSES_FIXTURE_H_
#define GLUON_SYNCBN_TESTS_PROCESSES_FIXTURE_H_

#include <cstring>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "check.h"
#include "mxnet/mxnet_fixture.h"
#include "processes/route.h"
#include "processes/thirds.h"
#include "processes/transports.h"
#include "threads.h"

namespace gluon_syncbn {

using Doubles = std::vector<double>;

// Longer than any test.
constexpr double kLong = 100;
constexpr int kKey = 1000001;

inline bool same_bits(const double* a, const double* b, size_t n) {
  return n == 0 || std::memcmp(a, b, n * sizeof(double)) == 0;
}

// Doubles of any bits: infinities, NaN of every kind, denormals, zeros of both signs.
inline Doubles any_bits(size_t n, unsigned seed) {
  std::mt19937_64 generator(seed);
  Doubles values(n);
  for (size_t i = 0; i < n; ++i) {
    uint64_t bits = generator();
    if (i % 5 == 1) bits = generator() % 2 << 63;
    if (i % 5 == 2) bits |= uint64_t{0x7ff} << 52;
    if (i % 5 == 3) bits &= ~(uint64_t{0x7ff} << 52);
    std::memcpy(&values[i], &bits, sizeof(bits));
  }
  return values;
}

// What a call throws, or nothing.
template <typename F>
std::string error_of(const F& f) {
  try {
    f();
    return "";
  } catch (const std::exception& error) {
    return error.what();
  }
}

// One process, and its routes through a server that it shares with others.
struct FakeProcess {
  std::shared_ptr<Connection> connection = std::make_shared<Connection>();
  FakeServer::Client client;
  int rank, ranks;
  std::vector<std::unique_ptr<FakeArray>> arrays;
  std::vector<std::unique_ptr<std::vector<float>>> memory;

  FakeProcess(FakeServer* server, int rank, int ranks) : rank(rank), ranks(ranks) {
    client.server = server;
  }

  FakeArray* new_array(std::vector<int> shape) {
    int size = 1;
    for (const int axis : shape) size *= axis;
    memory.emplace_back(new std::vector<float>(static_cast<size_t>(size), 7.0f));
    arrays.emplace_back(new FakeArray);
    arrays.back()->data = memory.back()->data();
    arrays.back()->shape = std::move(shape);
    return arrays.back().get();
  }

  RoutePtr route(const std::string& key, int store_key, int64_t size) {
    FakeArray* const array = new_array({ranks, kThirds, static_cast<int>(size)});
    auto* const values = static_cast<float*>(array->data);
    const KVStoreSlots slots{
        FakeServer::pushpull, &client, store_key, rank, ranks, size, array, values};
    return std::make_shared<Route>(connection, key, size, ranks,
                                   kvstore_transports(slots, nullptr, 0));
  }
};

// An exchange of one number that another thread waits for.
class Waiting {
 public:
  Waiting(RoutePtr route, double timeout)
      : thread_([this, route, timeout] {
          Doubles values{1};
          error_ = error_of([&] { route->exchange("title", timeout, &values); });
        }) {}
  std::string error() {
    thread_.join();
    return error_;
  }

 private:
  std::string error_;
  std::thread thread_;
};

// Processes of one job.
struct FakeJob {
  FakeServer server;
  std::vector<std::unique_ptr<FakeProcess>> processes;

  explicit FakeJob(int ranks) : server(static_cast<size_t>(ranks)) {
    for (int rank = 0; rank < ranks; ++rank) {
      processes.emplace_back(new FakeProcess(&server, rank, ranks));
    }
  }

  // Runs f(rank) in all.
  template <typename F>
  void run(const F& f) {
    in_threads(static_cast<int>(processes.size()), f);
  }
};

}  // namespace gluon_syncbn

#endif  // GLUON_SYNCBN_TESTS_PROCESSES_FIXTURE_H_
