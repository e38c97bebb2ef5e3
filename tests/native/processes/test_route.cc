// Routes between simulated processes: whose turn it is, what is in flight, and how waits end.
#include <atomic>
#include <chrono>
#include <thread>
#include <utility>

#include "processes/processes_fixture.h"
#include "threads/patience.h"
#include "threads/waits.h"

namespace gluon_syncbn {
namespace {

TEST(time_for_which_a_process_is_stopped_is_no_wait) {
  Patience patience(0.2);
  const auto stop = [] { std::this_thread::sleep_for(std::chrono::milliseconds(500)); };
  stop();
  CHECK(patience.is_long() && !patience.is_over());
  stop();
  stop();
  CHECK(patience.waited() < Patience::Seconds(0.31));
  CHECK(patience.slice(Patience::Seconds(1)) <= patience.first());
  CHECK(patience.is_over());
}

// In each process, two threads share a route, and two have one each.
TEST(calls_of_the_store_and_exchanges_of_a_key_take_turns) {
  constexpr int kRounds = 50, kSize = 5;
  FakeJob job(2);
  job.run([&](int rank) {
    FakeProcess& process = *job.processes[rank];
    const RoutePtr shared = process.route("shared", kKey, kSize);
    const RoutePtr routes[] = {shared, shared, process.route("a", kKey + 1, kSize),
                               process.route("b", kKey + 2, kSize)};
    in_threads(4, [&](int i) {
      for (int round = 0; round < kRounds; ++round) {
        Doubles everyone(kSize, rank + 1.0);
        routes[i]->exchange("title", kLong, &everyone);
        CHECK(everyone[0] == 1 && everyone[kSize] == 2);
      }
    });
    CHECK_EQ(process.client.most, 1);
    CHECK_EQ(process.client.doubled, 0);
    CHECK_EQ(shared->calls(), 2 * kRounds);
  });
}

TEST(a_closed_route_ends_the_exchange_that_waits_and_later_ones) {
  FakeServer server(2);
  FakeProcess process(&server, 0, 2);
  const RoutePtr route = process.route("key", kKey, 1);
  Waiting waiting(route, 2);
  while (process.connection->in_flight.entries().empty()) sleep(0.001);
  const auto entries = process.connection->in_flight.entries();
  CHECK(entries[0].title == "title" && entries[0].key == "key" && entries[0].number == 1);
  CHECK_EQ(entries[0].timeout_seconds, 2);
  route->close("rank 1 is gone");
  route->close("another");
  CHECK_EQ(waiting.error(), "title: rank 1 is gone");
  // An exchange that was given up is not listed as complete, and its answer may still come.
  CHECK(process.connection->in_flight.entries().empty());
  process.arrays[0]->write();
  CHECK_EQ(Waiting(route, 2).error(), "title: rank 1 is gone");
  // A text that begins with the title has it once.
  const RoutePtr other = process.route("other", kKey + 1, 1);
  other->close("title: rank 0 has waited");
  CHECK_EQ(Waiting(other, 2).error(), "title: rank 0 has waited");
}

TEST(a_store_that_refuses_is_an_error) {
  FakeServer server(1);
  FakeProcess process(&server, 0, 1);
  const RoutePtr route = process.route("key", kKey, 1);
  Doubles values{1};
  const auto exchange = [&] { route->exchange("title", kLong, &values); };
  process.client.refuses = true;
  CHECK_EQ(error_of(exchange), "title: no such server");
  process.client.refuses = false;
  CHECK_EQ(error_of(exchange), "");
}

// AddressSanitizer sees what stays.
TEST(an_engine_that_takes_no_operation_leaves_nothing_behind) {
  FakeServer server(1);
  FakeProcess process(&server, 0, 1);
  const RoutePtr route = process.route("key", kKey, 1);
  const auto refuse = [](void (*)(void*, void*), void* argument, void (*deleter)(void*),
                         const void*, Handle*, int, Handle*, int, const void*, int, const char*) {
    static bool deletes = false;
    if ((deletes = !deletes)) deleter(argument);
    return -1;
  };
  const auto push = std::exchange(mxnet.engine_push_sync, refuse);
  for (int i = 0; i < 2; ++i) {
    Doubles values{1};
    CHECK_EQ(error_of([&] { route->exchange("title", kLong, &values); }),
             "MXNet's engine takes no more operations.");
  }
  mxnet.engine_push_sync = push;
}

// An array that is written with an error, Ctrl-C, and the end of the process: the last test, as no
// more waits are possible after it.
TEST(errors_interrupts_and_the_end_release_waits) {
  for (const Waited expected : {Waited::kDone, Waited::kInterrupted, Waited::kClosed}) {
    const bool fails = expected == Waited::kDone;
    FakeServer server(2);
    FakeProcess process(&server, 0, 2);
    Waiting waiting(process.route("key", kKey, 1), kLong);
    while (!process.arrays[0]->is_read()) sleep(0.001);
    if (fails) process.arrays[0]->write("a rank has died");
    if (expected == Waited::kInterrupted) ++interrupts;
    if (expected == Waited::kClosed) process_ends = true;
    CHECK_EQ(waiting.error(), fails                              ? "title: a rank has died"
                              : expected == Waited::kInterrupted ? "title: Interrupted."
                                                                 : "title: The process ends.");
    CHECK_EQ(abandoned.exchange(false), !fails);
    CHECK(process.connection->in_flight.entries().empty());
  }
}

}  // namespace
}  // namespace gluon_syncbn

int main() {
  gluon_syncbn::use_fake_mxnet();
  return check::run_all("route", 120);
}
