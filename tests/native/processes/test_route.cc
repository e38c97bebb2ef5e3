// Routes between simulated processes: what arrives, what probes report, and how waits end.
#include <atomic>
#include <chrono>
#include <cmath>
#include <thread>

#include "mxnet/interrupts.h"
#include "processes/patience.h"
#include "processes/processes_fixture.h"

namespace gluon_syncbn {
namespace {

TEST(every_bit_arrives_in_every_round) {
  constexpr int kRanks = 3, kRounds = 20, kSize = 41;
  FakeJob job(kRanks);
  job.run([&](int rank) {
    const RoutePtr route = job.processes[rank]->route("key", kKey, kSize);
    for (int round = 0; round < kRounds; ++round) {
      Doubles everyone = any_bits(kSize, round * kRanks + rank);
      route->exchange("title", kLong, &everyone);
      CHECK_EQ(everyone.size(), size_t{kRanks * kSize});
      for (int other = 0; other < kRanks; ++other) {
        const Doubles expected = any_bits(kSize, round * kRanks + other);
        CHECK(same_bits(&everyone[other * kSize], expected.data(), kSize));
      }
    }
    CHECK_EQ(route->calls(), kRounds);
    CHECK(job.processes[rank]->probes.empty());
  });
}

TEST(time_for_which_a_process_is_stopped_is_no_wait) {
  Patience patience(0.2);
  const auto stop = [] { std::this_thread::sleep_for(std::chrono::milliseconds(500)); };
  stop();
  CHECK(patience.is_long() && !patience.is_over());
  stop();
  stop();
  CHECK(patience.waited() < Patience::Seconds(0.201));
  CHECK(patience.slice(Patience::Seconds(1)) <= patience.first());
  CHECK(patience.is_over());
}

// A message of a layer of one channel, whose sums are `value` and its half.
Doubles message(double call, double value) { return {call, 10, value, 0, 0, value / 2, 0, 0}; }

TEST(sums_come_in_one_message_and_values_where_they_do_not_fit) {
  constexpr int kRanks = 3;
  // By exchange: the value and the call of the last process; the other ones have 1 and the number
  // of the exchange.
  const struct {
    double value, call;
    Answer answer;
  } exchanges[] = {{1, 0, Answer::kValues},    {1, 1, Answer::kSums},    {1e6, 2, Answer::kSums},
                   {1e30, 3, Answer::kValues}, {1e30, 4, Answer::kSums}, {NAN, 5, Answer::kValues},
                   {1, 7, Answer::kValues},    {1, 7, Answer::kSums}};
  FakeJob job(kRanks);
  job.run([&](int rank) {
    FakeProcess& process = *job.processes[rank];
    const RoutePtr route = process.route("key", kKey, 8, true);
    double number = 0;
    for (const auto& each : exchanges) {
      const bool last = rank == kRanks - 1;
      const Doubles mine = message(last ? each.call : number, last ? each.value : 1);
      Doubles found = mine;
      CHECK(route->exchange("title", kLong, &found) == each.answer);
      CHECK_EQ(found.size(), each.answer == Answer::kSums ? 8u : 8u * kRanks);
      if (each.answer == Answer::kSums) {
        const Doubles expected{number, 30, each.value + 2, 0, 0, each.value / 2 + 1, 0, 0};
        for (int i : {0, 1, 2, 5}) CHECK_EQ(found[i], expected[i]);
      } else {
        CHECK(same_bits(&found[8 * rank], mine.data(), 8));
      }
      ++number;
    }
    CHECK_EQ(route->calls(), 8);
    // As after a failure.
    route->restart();
    Doubles eighth = message(8, 1), ninth = message(9, 1);
    CHECK(route->exchange("title", kLong, &eighth) == Answer::kValues);
    CHECK(route->exchange("title", kLong, &ninth) == Answer::kSums);
    CHECK(process.probes.empty());
  });
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

// Other callers of the store, such as a Trainer, use the same lock.
TEST(a_route_waits_while_another_thread_calls_the_store) {
  FakeJob job(1);
  FakeProcess& process = *job.processes[0];
  const RoutePtr route = process.route("key", kKey, 1);
  std::atomic<bool> done{false};
  process.connection->calls.lock();
  std::thread thread([&] {
    Doubles values{1};
    route->exchange("title", kLong, &values);
    done = true;
  });
  sleep(0.1);
  CHECK(!done);
  CHECK_EQ(process.client.most, 0);
  process.connection->calls.unlock();
  thread.join();
  CHECK(done);
}

std::vector<std::string> exchanges(const FakeProcess& process, bool open) {
  std::vector<std::string> names;
  for (const auto& entry : process.connection->in_flight.entries()) {
    if (entry.open == open) names.push_back(entry.name);
  }
  return names;
}

TEST(exchanges_in_flight_are_listed) {
  FakeJob job(2);
  FakeProcess &first = *job.processes[0], &second = *job.processes[1];
  const RoutePtr routes[] = {first.route("7 forward -1 0", kKey, 1),
                             second.route("7 forward -1 0", kKey, 1)};
  const auto exchange = [&](int rank) {
    Doubles values{0};
    routes[rank]->exchange("layer, call 5", kLong, &values);
  };
  std::thread waits([&] { exchange(0); });
  while (exchanges(first, true).empty()) sleep(0.001);
  CHECK_EQ(exchanges(first, true)[0], "layer, call 5 (7 forward -1 0 1)");
  CHECK(exchanges(first, false).empty() && exchanges(second, true).empty());
  exchange(1);
  waits.join();
  for (const FakeProcess* process : {&first, &second}) {
    CHECK(exchanges(*process, true).empty());
    CHECK_EQ(exchanges(*process, false).at(0), "layer, call 5 (7 forward -1 0 1)");
  }
  job.run([&](int rank) {
    for (int i = 0; i < 30; ++i) exchange(rank);
  });
  CHECK_EQ(exchanges(first, false).size(), 16u);
  CHECK_EQ(exchanges(first, false).back(), "layer, call 5 (7 forward -1 0 31)");
}

TEST(a_wait_is_probed_and_given_up) {
  FakeServer server(2);
  {
    FakeProcess process(&server, 0, 2);
    Waiting waiting(process.route("key", kKey, 1), 2);
    while (process.probed() < 2) sleep(0.001);
    process.give_up("rank 1 is gone");
    CHECK_EQ(waiting.error(), "rank 1 is gone");
    for (size_t i = 0; i < process.probes.size(); ++i) {
      const Probe& delay = process.probes[i];
      CHECK(delay.waited == Waited::kTimeIsUp && delay.error.empty());
      CHECK(delay.title == "title" && delay.exchange == "title (key 1)");
      CHECK_EQ(delay.probes, static_cast<int>(i));
      CHECK_EQ(delay.timeout, 2);
      // The first comes after a tenth of the timeout, the others at equal intervals.
      CHECK(delay.seconds >= 0.2 * static_cast<double>(i + 1) && delay.seconds < 1);
    }
    // An exchange that was given up is not listed as complete, and its answer may still come.
    CHECK(exchanges(process, true).empty() && exchanges(process, false).empty());
    process.arrays[0]->write();
  }
}

TEST(an_error_of_the_store_ends_the_wait) {
  FakeJob job(1);
  FakeProcess& process = *job.processes[0];
  process.verdict = "refused";
  const RoutePtr route = process.route("key", kKey, 1);
  Doubles values{1};
  const auto exchange = [&] { route->exchange("title", kLong, &values); };
  process.client.refuses = true;
  CHECK_EQ(error_of(exchange), "refused");
  CHECK_EQ(process.probes.back().error, "no such server");
  process.client.refuses = false;
  CHECK_EQ(error_of(exchange), "");

  // The array holds an error when it is written.
  FakeJob pair(2);
  FakeProcess& alone = *pair.processes[0];
  alone.verdict = "refused";
  Waiting waiting(alone.route("key", kKey, 1), kLong);
  while (alone.client.most == 0) sleep(0.001);
  sleep(0.05);
  alone.arrays[0]->write("a rank has died");
  CHECK_EQ(waiting.error(), "refused");
  CHECK(alone.probes.size() == 1 && alone.probes[0].waited == Waited::kWritten);
  CHECK_EQ(alone.probes[0].error, "a rank has died");
  CHECK(exchanges(alone, false).empty());
}

// Like Horovod's: the input, then the values of other processes, whose sizes are the output's
// shape.
int allgather(Handle* inputs, Handle* outputs, const char* name, int, int, int) {
  CHECK_EQ(std::string(name), "gluon_syncbn key");
  FakeArray &input = *fake(inputs[0]), &output = *fake(outputs[0]);
  const double* const mine = static_cast<const double*>(input.data);
  static Doubles all;
  all.assign(mine, mine + input.shape[0]);
  for (const int size : output.shape) {
    for (int i = size; i >= 0; --i) all.push_back(i);
  }
  output.data = all.data();
  output.shape = {static_cast<int>(all.size())};
  return 0;
}

TEST(horovod_carries_every_bit_and_sizes_are_compared) {
  auto connection = std::make_shared<Connection>();
  const auto error_with = [&](int size, std::vector<int> of_others) {
    const auto n = static_cast<size_t>(size);
    const int ranks = 1 + static_cast<int>(of_others.size());
    Doubles values(n + 1);
    FakeArray input, output;
    input.data = values.data();
    input.shape = {size + 1};
    output.shape = std::move(of_others);
    const HorovodArrays arrays{allgather, 0, ranks, size, &input, values.data(), &output};
    Route route(connection, "key", size, ranks,
                {std::make_unique<HorovodTransport>("key", arrays), nullptr, nullptr});
    const Doubles mine = any_bits(n, 1);
    Doubles everyone = mine;
    std::string error = error_of([&] { route.exchange("title", kLong, &everyone); });
    if (error.empty()) {
      CHECK(same_bits(everyone.data(), mine.data(), n));
      for (size_t i = n; i < everyone.size(); ++i) {
        CHECK_EQ(everyone[i], static_cast<double>(n - 1 - i % n));
      }
    }
    return error;
  };
  CHECK_EQ(error_with(23, {23}), "");
  CHECK_EQ(error_with(23, {23, 23}), "");
  CHECK_EQ(error_with(0, {0, 0}), "");
  // Also where this process gets as many numbers as it expects.
  CHECK_SAY(error_with(3, {3, 4, 2}).find("numbers to key, by rank: 3 3 4 2.") != std::string::npos,
            error_with(3, {3, 4, 2}));
  CHECK(error_with(0, {1}).find("by rank: 0 1.") != std::string::npos);
}

// Like Horovod's: twice the input.
int allreduce(Handle* inputs, Handle* outputs, const char* name, int operation, int, double before,
              double after, int arrays, int process_set) {
  CHECK_EQ(std::string(name), "gluon_syncbn key sums");
  CHECK(operation == 1 && before == 1 && after == 1 && arrays == 1 && process_set == 3);
  FakeArray &input = *fake(inputs[0]), &output = *fake(outputs[0]);
  for (int i = 0; i < input.shape[0]; ++i) {
    static_cast<double*>(output.data)[i] = 2 * static_cast<double*>(input.data)[i];
  }
  return 0;
}

TEST(horovod_adds_sums) {
  const auto fixed_point = std::make_shared<FixedPoint>(8, 2, 53);
  const auto size = static_cast<size_t>(fixed_point->size());
  Doubles values(9), packed(size), sums(size), found = message(1, 1.5);
  FakeArray input, output, one, all;
  input.data = packed.data();
  output.data = sums.data();
  input.shape = output.shape = {static_cast<int>(size)};
  const HorovodArrays arrays{allgather, 3, 2, 8, &one, values.data(), &all};
  const HorovodSums adds{allreduce, 1, &input, &output, packed.data(), sums.data()};
  Route route(
      std::make_shared<Connection>(), "key", 8, 2,
      {std::make_unique<HorovodTransport>("key", arrays),
       std::make_unique<HorovodAdder>("key", arrays.process_set, adds, fixed_point), fixed_point});
  Doubles first;
  for (int rank = 0; rank < 2; ++rank) {
    const Doubles row = message(0, 1.5);
    first.insert(first.end(), row.begin(), row.end());
  }
  fixed_point->follow(first.data());
  CHECK(route.exchange("title", kLong, &found) == Answer::kSums);
  const Doubles expected{1, 20, 3, 0, 0, 1.5, 0, 0};
  CHECK(same_bits(found.data(), expected.data(), 8));
}

// Of three processes: adds twice what it gets, for the others, or fails.
int all_reduce(int64_t store, const char* key, double* values, int64_t rows, int64_t size,
               char* error, int) {
  if (store == 7) {
    std::strcpy(error, "no answer");
    return 1;
  }
  const bool adds = std::strcmp(key, "key sums") == 0;
  CHECK(adds ? rows == 1 : rows == 3 && size == 24 && std::strcmp(key, "key") == 0);
  if (adds) {
    for (int64_t i = 0; i < size; ++i) values[i] *= 3;
    return 0;
  }
  for (int row : {0, 2}) {
    CHECK(std::all_of(values + row * 8, values + row * 8 + 8, [](double v) { return v == 0; }));
    std::copy_n(values + 8, 8, values + row * 8);
  }
  return 0;
}

TEST(a_function_of_the_user_carries_values_and_sums) {
  const auto connection = std::make_shared<Connection>();
  connection->probe = [](const Delay& delay) { return std::string("failed: ") + delay.error; };
  const auto route_to = [&](int64_t store) {
    const StoreFunction function{all_reduce, store};
    const auto fixed_point = std::make_shared<FixedPoint>(8, 3, 53);
    return std::make_shared<Route>(
        connection, "key", 8, 3,
        Transports{std::make_unique<FunctionTransport>("key", function, 1, 3, 8),
                   std::make_unique<FunctionAdder>("key", function, fixed_point), fixed_point});
  };
  const RoutePtr route = route_to(1);
  for (int call = 0; call < 3; ++call) {
    const Doubles mine = message(call, 1.5);
    Doubles found = mine;
    const Answer answer = route->exchange("title", kLong, &found);
    CHECK(answer == (call == 0 ? Answer::kValues : Answer::kSums));
    if (call == 0) {
      for (int row = 0; row < 3; ++row) CHECK(same_bits(&found[row * 8], mine.data(), 8));
    } else {
      const Doubles expected{static_cast<double>(call), 30, 4.5, 0, 0, 2.25, 0, 0};
      CHECK(same_bits(found.data(), expected.data(), 8));
    }
  }
  Doubles values(8);
  CHECK_EQ(error_of([&] { route_to(7)->exchange("title", kLong, &values); }), "failed: no answer");
}

TEST(a_closed_route_says_why_until_it_is_opened_again) {
  FakeJob job(1);
  const RoutePtr route = job.processes[0]->route("key", kKey, 1);
  const auto error = [&](size_t size) {
    Doubles values(size);
    return error_of([&] { route->exchange("title", kLong, &values); });
  };
  CHECK(error(2).find("title gives 2 numbers after 1 before") == 0);
  route->close("it is over");
  route->close("a later reason");
  CHECK_EQ(error(1), "title: it is over");
  route->restart();
  CHECK_EQ(error(1), "");
}

// Ctrl-C, and the end of the process: the last test, as no more waits are possible after it.
TEST(interrupts_and_the_end_release_waits) {
  for (const Waited expected : {Waited::kInterrupted, Waited::kClosed}) {
    FakeServer server(2);
    FakeProcess process(&server, 0, 2);
    process.verdict = "released";
    Waiting waiting(process.route("key", kKey, 1), kLong);
    while (process.client.most == 0) sleep(0.001);
    sleep(0.05);
    expected == Waited::kInterrupted ? void(++interrupts) : Interruption::close();
    CHECK_EQ(waiting.error(), "released");
    CHECK(process.probes.size() == 1 && process.probes[0].waited == expected);
    CHECK(process.probes[0].seconds < 5);
  }
}

}  // namespace
}  // namespace gluon_syncbn

int main() {
  gluon_syncbn::use_fake_mxnet();
  return check::run_all("route", 120);
}
