// Exchanges in memory that processes share: random schedules, deaths, and what may be wrong with
// it.
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "exchange/shared_memory.h"
#include "mxnet/interrupts.h"

namespace gluon_syncbn {
namespace {

using Doubles = std::vector<double>;
using SegmentPtr = std::shared_ptr<Segment>;

// Longer than any test.
constexpr double kLong = 100;
const std::string kToken = "0123456789abcdef";

void sleep(double seconds) { std::this_thread::sleep_for(std::chrono::duration<double>(seconds)); }

std::string file_of(const SegmentPtr& segment) {
  return "/proc/" + std::to_string(getpid()) + "/fd/" + std::to_string(segment->descriptor());
}

// A channel of one process, which gives up when it is first asked.
ChannelPtr channel(const SegmentPtr& segment, const std::string& key, int rank, int ranks,
                   int64_t size, bool sums = false) {
  auto connection = std::make_shared<Connection>();
  connection->probe = [](const Delay& delay) {
    return delay.waited == Waited::kTimeIsUp ? "given up" : "released";
  };
  auto transport = std::make_unique<SharedMemoryTransport>(segment, key, rank, ranks, size, sums);
  return std::make_shared<Channel>(std::move(connection), key, size, ranks,
                                   Transports{std::move(transport), nullptr, nullptr});
}

std::string error_of(const ChannelPtr& channel, size_t size, int ranks, double timeout) {
  Doubles mine(size), everyone(size * static_cast<size_t>(ranks));
  try {
    channel->exchange("title", timeout, mine.data(), everyone.data());
    return "";
  } catch (const std::runtime_error& error) {
    return error.what();
  }
}

// What a process brings to a call: any bits.
Doubles values(unsigned key, int rank, int call, size_t size) {
  std::mt19937_64 generator(key * 1000003u + static_cast<unsigned>(rank * 1009 + call));
  Doubles values(size);
  for (double& value : values) {
    const uint64_t bits = generator();
    std::memcpy(&value, &bits, sizeof(bits));
  }
  return values;
}

// Threads stand for processes: each has mappings of its own, and comes early or late by chance.
void every_bit_arrives_in_every_schedule() {
  for (unsigned seed = 0; seed < 12; ++seed) {
    check::context = "seed " + std::to_string(seed);
    std::mt19937 random(seed);
    const int ranks = 2 + static_cast<int>(random() % 4), keys = 1 + static_cast<int>(random() % 3);
    const size_t size = 1 + random() % 300;
    const SegmentPtr own = Segment::create(kToken);
    std::vector<std::thread> threads;
    for (int rank = 0; rank < ranks; ++rank) {
      const SegmentPtr segment = rank == 0 ? own : Segment::open(file_of(own), kToken);
      for (int key = 0; key < keys; ++key) {
        threads.emplace_back([=] {
          std::mt19937 delays(seed + static_cast<unsigned>(100 * rank + 10 * key));
          const auto maybe_sleep = [&] {
            if (delays() % 8 == 0) sleep(1e-6 * static_cast<double>(delays() % 300));
          };
          maybe_sleep();
          const std::string name = "key " + std::to_string(key);
          const auto mine = channel(segment, name, rank, ranks, static_cast<int64_t>(size));
          for (int call = 0; call < 60; ++call) {
            maybe_sleep();
            Doubles everyone(size * static_cast<size_t>(ranks));
            mine->exchange("title", kLong, values(key, rank, call, size).data(), everyone.data());
            for (int other = 0; other < ranks; ++other) {
              const Doubles expected = values(key, other, call, size);
              CHECK(std::memcmp(&everyone[size * static_cast<size_t>(other)], expected.data(),
                                size * sizeof(double)) == 0);
            }
          }
        });
      }
    }
    for (std::thread& thread : threads) thread.join();
  }
}

// A process is killed at any moment: the other one gets whole slots or none.
void a_process_that_dies_is_never_read_halfway() {
  for (int seed = 0; seed < 30; ++seed) {
    check::context = "death " + std::to_string(seed);
    constexpr size_t kSize = 20000;
    const SegmentPtr segment = Segment::create(kToken);
    const auto own = channel(segment, "key", 0, 2, kSize);
    const pid_t child = fork();
    if (child == 0) {
      const auto other = channel(Segment::open(file_of(segment), kToken), "key", 1, 2, kSize);
      for (double call = 0;; ++call) {
        Doubles everyone(2 * kSize);
        other->exchange("title", kLong, Doubles(kSize, call).data(), everyone.data());
      }
    }
    std::thread killer([child, seed] {
      sleep(0.01 + 0.0007 * seed);
      kill(child, SIGKILL);
    });
    std::string error;
    for (double call = 0; error.empty(); ++call) {
      Doubles everyone(2 * kSize);
      try {
        own->exchange("title", 1, Doubles(kSize, -1).data(), everyone.data());
        CHECK(std::all_of(everyone.begin() + kSize, everyone.end(),
                          [call](double value) { return value == call; }));
      } catch (const std::runtime_error& failure) {
        error = failure.what();
      }
    }
    CHECK_EQ(error, "given up");
    killer.join();
    waitpid(child, nullptr, 0);
  }
}

// Messages of one call are added as a process adds those of its devices; others come as they are.
void messages_of_one_call_are_added() {
  check::context = "sums";
  constexpr int kRanks = 3, kChannels = 20;
  constexpr size_t kSize = kCallSize + kSumsSize * kChannels;
  const SegmentPtr segment = Segment::create(kToken);
  const auto message = [](int rank, int call) {
    std::mt19937 random(static_cast<unsigned>(10 * call + rank));
    std::normal_distribution<double> normal;
    Doubles message{call == 2 && rank == 1 ? 7.0 : call, 3.0 + rank};
    while (message.size() < kSize) {
      for (const double scale : {1.0, 0x1p-53, 0x1p-106}) message.push_back(normal(random) * scale);
    }
    return message;
  };
  std::vector<std::thread> threads;
  for (int rank = 0; rank < kRanks; ++rank) {
    threads.emplace_back([=] {
      const auto mine = channel(segment, "key", rank, kRanks, kSize, true);
      for (int call = 0; call < 4; ++call) {
        Doubles found(kSize * kRanks), expected;
        const Answer answer =
            mine->exchange("title", kLong, message(rank, call).data(), found.data());
        CHECK(answer == (call == 2 ? Answer::kValues : Answer::kSums));
        if (call == 2) {
          for (int other = 0; other < kRanks; ++other) {
            const Doubles theirs = message(other, call);
            expected.insert(expected.end(), theirs.begin(), theirs.end());
          }
        } else {
          expected = {static_cast<double>(call), 12.0};
          std::vector<Sum3> sums(2 * kChannels);
          for (int other = 0; other < kRanks; ++other) {
            const Doubles theirs = message(other, call);
            for (size_t i = 0; i < sums.size(); ++i) {
              Sum3 part;
              std::memcpy(static_cast<void*>(&part), &theirs[kCallSize + 3 * i], sizeof(part));
              sums[i].add(part);
            }
          }
          for (const Sum3& sum : sums)
            expected.insert(expected.end(), {sum.high, sum.middle, sum.low});
        }
        CHECK(std::memcmp(found.data(), expected.data(), sizeof(double) * expected.size()) == 0);
      }
      CHECK_EQ(mine->sums(), 0);
    });
  }
  for (std::thread& thread : threads) thread.join();
}

void sizes_are_compared() {
  check::context = "sizes";
  const SegmentPtr segment = Segment::create(kToken);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < 3; ++rank) {
    threads.emplace_back([=] {
      const size_t size = rank == 1 ? 4 : 3;
      const auto mine = channel(segment, "key", rank, 3, static_cast<int64_t>(size));
      for (int call = 0; call < 2; ++call) {
        const std::string error = error_of(mine, size, 3, kLong);
        CHECK_SAY(error.find("numbers to key, by rank: 3 4 3.") != error.npos, error);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

void what_is_wrong_is_refused() {
  check::context = "wrong";
  const SegmentPtr segment = Segment::create(kToken);
  CHECK_THROWS(std::runtime_error, Segment::open(file_of(segment), "fedcba9876543210"), "another");
  CHECK_THROWS(std::runtime_error, Segment::open("/proc/self/exe/1", kToken), "/proc/self/exe/1");
  const int small = memfd_create("small", MFD_CLOEXEC);
  CHECK_THROWS(std::runtime_error, Segment::open("/proc/self/fd/" + std::to_string(small), kToken),
               "mmap");
  close(small);
  CHECK_THROWS(std::runtime_error, segment->add(std::string(200, 'k'), 2, 1), "too long");
  CHECK_THROWS(std::runtime_error, segment->add("key", 2, int64_t{1} << 40), "is full", "after 0");
  segment->add("key", 2, 10);
  CHECK_EQ(segment->find("key", 2).size, 10);
  CHECK(!segment->find("other", 2).counts);
  CHECK_THROWS(std::runtime_error, segment->find("key", 3), "damaged");
  for (int i = 1; i < 1 << 14; ++i) segment->add(std::to_string(i), 2, 1);
  CHECK_THROWS(std::runtime_error, segment->add("one more", 2, 1), "is full", "after 16384");
  const std::string file = file_of(segment);
  segment->close_descriptor();
  CHECK_THROWS(std::runtime_error, Segment::open(file, kToken), file);
}

// While the key is not listed yet, and while another process has not come.
void waits_end() {
  const SegmentPtr segment = Segment::create(kToken);
  for (const int rank : {1, 0}) {
    check::context = "waits of rank " + std::to_string(rank);
    CHECK_EQ(error_of(channel(segment, "key", rank, 2, 1), 1, 2, 0.5), "given up");
    const auto waits = channel(segment, "other key", rank, 2, 1);
    std::thread interrupt([] {
      sleep(0.05);
      ++interrupts;
    });
    CHECK_EQ(error_of(waits, 1, 2, kLong), "released");
    interrupt.join();
  }
  Interruption::close();
  CHECK_EQ(error_of(channel(segment, "third key", 1, 2, 1), 1, 2, kLong), "released");
}

}  // namespace
}  // namespace gluon_syncbn

int main() {
  using namespace gluon_syncbn;
  // A test that hangs fails.
  alarm(120);
  every_bit_arrives_in_every_schedule();
  a_process_that_dies_is_never_read_halfway();
  messages_of_one_call_are_added();
  sizes_are_compared();
  what_is_wrong_is_refused();
  // Must be the last, as it marks the process as ended.
  waits_end();
  return check::finish("shared memory");
}
