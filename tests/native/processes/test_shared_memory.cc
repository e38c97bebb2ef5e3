// Routes through memory that processes share: random schedules, deaths, and what may be wrong with
// it.
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>

#include "mxnet/interrupts.h"
#include "processes/processes_fixture.h"
#include "processes/shared_memory.h"

namespace gluon_syncbn {
namespace {

using SegmentPtr = std::shared_ptr<Segment>;

const std::string kToken = "0123456789abcdef";

std::string file_of(const SegmentPtr& segment) {
  return "/proc/" + std::to_string(getpid()) + "/fd/" + std::to_string(segment->descriptor());
}

// A route of one process, which gives up when it is first asked.
RoutePtr route(const SegmentPtr& segment, const std::string& key, int rank, int ranks, int64_t size,
               bool sums = false) {
  auto connection = std::make_shared<Connection>();
  connection->probe = [](const Delay& delay) {
    return delay.waited == Waited::kTimeIsUp ? "given up" : "released";
  };
  auto transport = std::make_unique<SharedMemoryTransport>(segment, key, rank, ranks, size, sums);
  return std::make_shared<Route>(std::move(connection), key, size, ranks,
                                 Transports{std::move(transport), nullptr, nullptr});
}

std::string error_of_next(const RoutePtr& route, size_t size, double timeout) {
  Doubles values(size);
  return error_of([&] { route->exchange("title", timeout, &values); });
}

// What a process brings to a call.
Doubles values(int key, int rank, int call, size_t size) {
  return any_bits(size, static_cast<unsigned>(key * 1000003 + rank * 1009 + call));
}

// Threads stand for processes: each has mappings of its own, and comes early or late by chance.
TEST(every_bit_arrives_in_every_schedule) {
  for (unsigned seed = 0; seed < 12; ++seed) {
    check::context = "seed " + std::to_string(seed);
    std::mt19937 random(seed);
    const int ranks = 2 + static_cast<int>(random() % 4), keys = 1 + static_cast<int>(random() % 3);
    const size_t size = 1 + random() % 300;
    const SegmentPtr own = Segment::create(kToken);
    std::vector<SegmentPtr> segments{own};
    while (segments.size() < static_cast<size_t>(ranks)) {
      segments.push_back(Segment::open(file_of(own), kToken));
    }
    in_threads(ranks * keys, [&](int thread) {
      const int rank = thread / keys, key = thread % keys;
      std::mt19937 delays(seed + static_cast<unsigned>(100 * rank + 10 * key));
      const auto maybe_sleep = [&] {
        if (delays() % 8 == 0) sleep(1e-6 * static_cast<double>(delays() % 300));
      };
      maybe_sleep();
      const std::string name = "key " + std::to_string(key);
      const auto mine =
          route(segments[static_cast<size_t>(rank)], name, rank, ranks, static_cast<int64_t>(size));
      for (int call = 0; call < 60; ++call) {
        maybe_sleep();
        Doubles everyone = values(key, rank, call, size);
        mine->exchange("title", kLong, &everyone);
        for (int other = 0; other < ranks; ++other) {
          const Doubles expected = values(key, other, call, size);
          CHECK(same_bits(&everyone[size * static_cast<size_t>(other)], expected.data(), size));
        }
      }
    });
  }
}

// A process is killed at any moment: the other one gets whole slots or none.
TEST(a_process_that_dies_is_never_read_halfway) {
  for (int seed = 0; seed < 30; ++seed) {
    check::context = "death " + std::to_string(seed);
    constexpr size_t kSize = 20000;
    const SegmentPtr segment = Segment::create(kToken);
    const auto own = route(segment, "key", 0, 2, kSize);
    const pid_t child = fork();
    if (child == 0) {
      const auto other = route(Segment::open(file_of(segment), kToken), "key", 1, 2, kSize);
      for (double call = 0;; ++call) {
        Doubles everyone(kSize, call);
        other->exchange("title", kLong, &everyone);
      }
    }
    std::thread killer([child, seed] {
      sleep(0.01 + 0.0007 * seed);
      kill(child, SIGKILL);
    });
    std::string error;
    for (double call = 0; error.empty(); ++call) {
      Doubles everyone(kSize, -1);
      error = error_of([&] { own->exchange("title", 1, &everyone); });
      CHECK(!error.empty() || std::all_of(everyone.begin() + kSize, everyone.end(),
                                          [call](double value) { return value == call; }));
    }
    CHECK_EQ(error, "given up");
    killer.join();
    waitpid(child, nullptr, 0);
  }
}

// Messages of one call are added as a process adds those of its devices; others come as they are.
TEST(messages_of_one_call_are_added) {
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
  in_threads(kRanks, [&](int rank) {
    const auto mine = route(segment, "key", rank, kRanks, kSize, true);
    for (int call = 0; call < 4; ++call) {
      Doubles found = message(rank, call), expected;
      const Answer answer = mine->exchange("title", kLong, &found);
      CHECK(answer == (call == 2 ? Answer::kValues : Answer::kSums));
      std::vector<Sum3> sums(2 * kChannels);
      for (int other = 0; other < kRanks; ++other) {
        const Doubles theirs = message(other, call);
        if (call == 2) expected.insert(expected.end(), theirs.begin(), theirs.end());
        for (size_t i = 0; i < sums.size(); ++i) {
          Sum3 part;
          std::memcpy(static_cast<void*>(&part), &theirs[kCallSize + 3 * i], sizeof(part));
          sums[i].add(part);
        }
      }
      if (call != 2) {
        expected = {static_cast<double>(call), 12.0};
        for (const Sum3& sum : sums) {
          expected.insert(expected.end(), {sum.high, sum.middle, sum.low});
        }
      }
      CHECK(same_bits(found.data(), expected.data(), expected.size()));
    }
  });
}

TEST(sizes_are_compared) {
  const SegmentPtr segment = Segment::create(kToken);
  in_threads(3, [&](int rank) {
    CHECK_EQ(error_of_next(route(segment, "empty", rank, 3, 0), 0, kLong), "");
    const size_t size = rank == 1 ? 4 : 3;
    const auto mine = route(segment, "key", rank, 3, static_cast<int64_t>(size));
    for (int call = 0; call < 2; ++call) {
      const std::string error = error_of_next(mine, size, kLong);
      CHECK_SAY(error.find("numbers to key, by rank: 3 4 3.") != error.npos, error);
    }
  });
}

TEST(what_is_wrong_is_refused) {
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
TEST(waits_end) {
  const SegmentPtr segment = Segment::create(kToken);
  for (const int rank : {1, 0}) {
    check::context = "waits of rank " + std::to_string(rank);
    CHECK_EQ(error_of_next(route(segment, "key", rank, 2, 1), 1, 0.5), "given up");
    const auto waits = route(segment, "other key", rank, 2, 1);
    std::thread interrupt([] {
      sleep(0.05);
      ++interrupts;
    });
    CHECK_EQ(error_of_next(waits, 1, kLong), "released");
    interrupt.join();
  }
  Interruption::close();
  CHECK_EQ(error_of_next(route(segment, "third key", 1, 2, 1), 1, kLong), "released");
}

}  // namespace
}  // namespace gluon_syncbn

int main() { return check::run_all("shared memory", 120); }
