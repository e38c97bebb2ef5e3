// Lines between simulated processes: what arrives, what is told to those who ask, and how a wait
// ends that nobody answers.
#include <unistd.h>

#include <chrono>
#include <cstring>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "rendezvous/all_reduce.h"
#include "exchange/transports.h"
#include "check.h"
#include "exchange/channel.h"
#include "mxnet/mxnet_fixture.h"
#include "exchange/limbs.h"

namespace gluon_syncbn {
namespace {

using Doubles = std::vector<double>;

// Longer than any test.
constexpr double kLong = 100;
constexpr int kKey = 1000001;

bool same_bits(const double* a, const double* b, size_t n) {
  return std::memcmp(a, b, n * sizeof(double)) == 0;
}

// Doubles of any bits: infinities, NaN of every kind, denormals, zeros of both signs.
Doubles any_bits(size_t n, unsigned seed) {
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

void sleep(double seconds) { std::this_thread::sleep_for(std::chrono::duration<double>(seconds)); }

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

// One process, and its lines through a server that it shares with others.
struct Process {
  std::shared_ptr<Connection> connection = std::make_shared<Connection>();
  FakeServer::Client client;
  int rank, ranks;
  std::vector<std::unique_ptr<FakeArray>> arrays;
  std::vector<std::unique_ptr<std::vector<float>>> memory;
  std::mutex mutex;
  std::vector<Delay> delays;
  std::string verdict;

  Process(FakeServer* server, int rank, int ranks) : rank(rank), ranks(ranks) {
    client.server = server;
    connection->look = [this](const Delay& delay) {
      // No lock of the connection's may be held.
      const std::lock_guard<std::mutex> calls(connection->calls);
      connection->attendance.entries();
      const std::lock_guard<std::mutex> lock(mutex);
      delays.push_back(delay);
      return verdict;
    };
  }

  LinePtr line(const std::string& key, int number, int64_t size) {
    memory.emplace_back(new std::vector<float>(ranks * kParts * size, 7.0f));
    arrays.emplace_back(new FakeArray);
    arrays.back()->data = memory.back()->data();
    arrays.back()->shape = {ranks, kParts, static_cast<int>(size)};
    return std::make_shared<Line>(
        connection, key, size,
        std::make_unique<KVStoreCarrier>(FakeServer::pushpull, &client, number, arrays.back().get(),
                                         memory.back()->data(), rank, ranks, size));
  }
};

// Processes of one job.
struct Job {
  FakeServer server;
  std::vector<std::unique_ptr<Process>> processes;

  explicit Job(int ranks) : server(static_cast<size_t>(ranks)) {
    for (int rank = 0; rank < ranks; ++rank) {
      processes.emplace_back(new Process(&server, rank, ranks));
    }
  }

  // Runs f(rank) in all.
  template <typename F>
  void run(const F& f) {
    std::vector<std::thread> threads;
    for (size_t rank = 0; rank < processes.size(); ++rank) {
      threads.emplace_back([&f, rank] { f(static_cast<int>(rank)); });
    }
    for (std::thread& thread : threads) thread.join();
  }
};

void every_bit_arrives_again_and_again() {
  check::context = "bits";
  constexpr int kRanks = 3, kRounds = 20, kSize = 41;
  Job job(kRanks);
  job.run([&](int rank) {
    const LinePtr line = job.processes[rank]->line("key", kKey, kSize);
    for (int round = 0; round < kRounds; ++round) {
      const Doubles mine = any_bits(kSize, round * kRanks + rank);
      Doubles everyone(kRanks * kSize);
      line->exchange("title", kLong, mine.data(), everyone.data());
      for (int other = 0; other < kRanks; ++other) {
        const Doubles expected = any_bits(kSize, round * kRanks + other);
        CHECK(same_bits(&everyone[other * kSize], expected.data(), kSize));
      }
    }
    CHECK_EQ(line->calls(), kRounds);
    CHECK(job.processes[rank]->delays.empty());
  });
}

// Two threads with one line and two with a line of their own, in each process.
void the_store_is_called_once_at_a_time_and_a_key_is_under_way_once() {
  check::context = "turns";
  constexpr int kRounds = 50, kSize = 5;
  Job job(2);
  job.run([&](int rank) {
    Process& process = *job.processes[rank];
    const LinePtr shared = process.line("shared", kKey, kSize);
    const LinePtr lines[] = {shared, shared, process.line("a", kKey + 1, kSize),
                             process.line("b", kKey + 2, kSize)};
    std::vector<std::thread> threads;
    for (const LinePtr& line : lines) {
      threads.emplace_back([&, rank] {
        for (int round = 0; round < kRounds; ++round) {
          const Doubles mine(kSize, rank + 1.0);
          Doubles everyone(2 * kSize);
          line->exchange("title", kLong, mine.data(), everyone.data());
          CHECK(everyone[0] == 1 && everyone[kSize] == 2);
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    CHECK_EQ(process.client.most, 1);
    CHECK_EQ(process.client.doubled, 0);
    CHECK_EQ(shared->calls(), 2 * kRounds);
  });
}

// Who calls the store otherwise, as a Trainer does, holds the same lock.
void a_line_waits_while_somebody_else_calls_the_store() {
  check::context = "calls";
  Job job(1);
  Process& process = *job.processes[0];
  const LinePtr line = process.line("key", kKey, 1);
  std::atomic<bool> done{false};
  process.connection->calls.lock();
  std::thread thread([&] {
    double mine = 1, everyone = 0;
    line->exchange("title", kLong, &mine, &everyone);
    done = true;
  });
  sleep(0.1);
  CHECK(!done);
  CHECK_EQ(process.client.most, 0);
  process.connection->calls.unlock();
  thread.join();
  CHECK(done);
}

std::vector<std::string> meetings(const Process& process, bool open) {
  std::vector<std::string> names;
  for (const Attendance::Entry& entry : process.connection->attendance.entries()) {
    if (entry.open == open) names.push_back(entry.meeting);
  }
  return names;
}

void those_who_ask_learn_who_has_come() {
  check::context = "attendance";
  Job job(2);
  Process &first = *job.processes[0], &second = *job.processes[1];
  const LinePtr lines[] = {first.line("7 forward -1 0", kKey, 1),
                           second.line("7 forward -1 0", kKey, 1)};
  const auto exchange = [&](int rank) {
    double mine = 0, everyone[2];
    lines[rank]->exchange("layer, call 5", kLong, &mine, everyone);
  };
  std::thread waits([&] { exchange(0); });
  while (meetings(first, true).empty()) sleep(0.001);
  CHECK_EQ(meetings(first, true)[0], "layer, call 5 (7 forward -1 0 1)");
  CHECK(meetings(first, false).empty() && meetings(second, true).empty());
  exchange(1);
  waits.join();
  for (const Process* process : {&first, &second}) {
    CHECK(meetings(*process, true).empty());
    CHECK_EQ(meetings(*process, false).at(0), "layer, call 5 (7 forward -1 0 1)");
  }
  job.run([&](int rank) {
    for (int i = 0; i < 30; ++i) exchange(rank);
  });
  CHECK_EQ(meetings(first, false).size(), 16u);
  CHECK_EQ(meetings(first, false).back(), "layer, call 5 (7 forward -1 0 31)");
}

void a_wait_is_looked_at_and_given_up() {
  check::context = "look";
  FakeServer server(2);
  {
    Process process(&server, 0, 2);
    const LinePtr line = process.line("key", kKey, 1);
    std::string error;
    std::thread thread([&] {
      double mine = 1, everyone[2];
      error = error_of([&] { line->exchange("title", 2, &mine, everyone); });
    });
    const auto looks = [&] {
      const std::lock_guard<std::mutex> lock(process.mutex);
      return process.delays.size();
    };
    while (looks() < 2) sleep(0.001);
    {
      const std::lock_guard<std::mutex> lock(process.mutex);
      process.verdict = "rank 1 is gone";
    }
    thread.join();
    CHECK_EQ(error, "rank 1 is gone");
    for (size_t i = 0; i < process.delays.size(); ++i) {
      const Delay& delay = process.delays[i];
      CHECK(delay.waited == Waited::kTimeIsUp && delay.error.empty());
      CHECK(delay.title == "title" && delay.meeting == "title (key 1)");
      CHECK_EQ(delay.looks, static_cast<int>(i));
      CHECK_EQ(delay.timeout, 2);
      // The first after a tenth of the timeout, each other one as long after the one before.
      CHECK(delay.seconds >= 0.2 * static_cast<double>(i + 1) && delay.seconds < 1);
    }
    // Whoever gave up has not been there, and the answer may still come.
    CHECK(meetings(process, true).empty() && meetings(process, false).empty());
    process.arrays[0]->write();
  }
}

void what_the_store_says_itself_ends_the_wait() {
  check::context = "errors";
  Job job(1);
  Process& process = *job.processes[0];
  process.verdict = "told";
  const LinePtr line = process.line("key", kKey, 1);
  double mine = 1, everyone = 0;
  const auto exchange = [&] { line->exchange("title", kLong, &mine, &everyone); };
  process.client.refuses = true;
  CHECK_EQ(error_of(exchange), "told");
  CHECK_EQ(process.delays.back().error, "no such server");
  process.client.refuses = false;
  CHECK_EQ(error_of(exchange), "");

  // The array holds an error when it is written.
  Job pair(2);
  Process& alone = *pair.processes[0];
  alone.verdict = "told";
  const LinePtr other = alone.line("key", kKey, 1);
  std::string error;
  std::thread thread([&] {
    double both[2];
    error = error_of([&] { other->exchange("title", kLong, &mine, both); });
  });
  while (alone.client.most == 0) sleep(0.001);
  sleep(0.05);
  alone.arrays[0]->write("a rank has died");
  thread.join();
  CHECK_EQ(error, "told");
  CHECK(alone.delays.size() == 1 && alone.delays[0].waited == Waited::kWritten);
  CHECK_EQ(alone.delays[0].error, "a rank has died");
  CHECK(meetings(alone, false).empty());
}

// What Horovod gives: the input, and then what another process would have brought.
int allgather(Handle* inputs, Handle* outputs, const char* name, int, int, int) {
  CHECK_EQ(std::string(name), "gluon_syncbn key");
  FakeArray &input = *fake(inputs[0]), &output = *fake(outputs[0]);
  const double* const mine = static_cast<const double*>(input.data);
  static Doubles all;
  all.assign(mine, mine + input.shape[0]);
  for (int i = output.shape[0]; i > 0; --i) all.push_back(i);
  output.data = all.data();
  output.shape = {static_cast<int>(all.size())};
  return 0;
}

void horovod_brings_every_bit_and_its_size_is_checked() {
  check::context = "horovod";
  constexpr int kSize = 23;
  auto connection = std::make_shared<Connection>();
  for (const int of_other : {kSize, kSize + 1}) {
    Doubles values(kSize), everyone(2 * kSize);
    FakeArray input, output;
    input.data = values.data();
    input.shape = {kSize};
    output.shape = {of_other};
    Line line(connection, "key", kSize,
              std::make_unique<HorovodCarrier>(allgather, "key", &input, values.data(), &output, 2,
                                               kSize));
    const Doubles mine = any_bits(kSize, 1);
    const std::string error =
        error_of([&] { line.exchange("title", kLong, mine.data(), everyone.data()); });
    if (of_other == kSize) {
      CHECK_EQ(error, "");
      CHECK(same_bits(everyone.data(), mine.data(), kSize));
      CHECK(everyone[kSize] == kSize && everyone[2 * kSize - 1] == 1);
    } else {
      CHECK_EQ(
          error.find("different amounts of numbers to 'key': 23 here, 47 in all") != error.npos,
          true);
    }
  }
}

void lines_are_found_by_layer_and_key() {
  check::context = "lines";
  Job job(1);
  const LinePtr line = job.processes[0]->line("key", kKey, 1);
  Lines lines;
  for (const int64_t layer : {1, 2, 3}) {
    for (const char* key : {"forward", "backward"}) lines.set(layer, key, line);
  }
  CHECK(lines.find(2, "forward") == line && !lines.find(2, "hello") && !lines.find(4, "forward"));
  lines.forget(2);
  CHECK(!lines.find(2, "forward") && !lines.find(2, "backward"));
  CHECK(lines.find(1, "forward") && lines.find(1, "backward") && lines.find(3, "backward"));
  lines.clear();
  CHECK(!lines.find(1, "forward") && !lines.find(3, "backward"));
}

// Ctrl-C, and the end of the process, after which no wait is of use.
void interrupts_and_the_end_release_those_who_wait() {
  check::context = "release";
  for (const Waited expected : {Waited::kInterrupted, Waited::kClosed}) {
    FakeServer server(2);
    Process process(&server, 0, 2);
    process.verdict = "released";
    const LinePtr line = process.line("key", kKey, 1);
    std::string error;
    std::thread thread([&] {
      double mine = 1, everyone[2];
      error = error_of([&] { line->exchange("title", kLong, &mine, everyone); });
    });
    while (process.client.most == 0) sleep(0.001);
    sleep(0.05);
    expected == Waited::kInterrupted ? AllReduce::interrupt() : Watch::close();
    thread.join();
    CHECK_EQ(error, "released");
    CHECK(process.delays.size() == 1 && process.delays[0].waited == expected);
    CHECK(process.delays[0].seconds < 5);
  }
}

}  // namespace
}  // namespace gluon_syncbn

int main() {
  using namespace gluon_syncbn;
  // To hang is to fail.
  alarm(120);
  use_fake_mxnet();
  every_bit_arrives_again_and_again();
  the_store_is_called_once_at_a_time_and_a_key_is_under_way_once();
  a_line_waits_while_somebody_else_calls_the_store();
  those_who_ask_learn_who_has_come();
  a_wait_is_looked_at_and_given_up();
  what_the_store_says_itself_ends_the_wait();
  horovod_brings_every_bit_and_its_size_is_checked();
  lines_are_found_by_layer_and_key();
  // The last, as the process has ended after it.
  interrupts_and_the_end_release_those_who_wait();
  return check::finish("exchange");
}
