// Routes through memory that processes share: random schedules, deaths, and what may be wrong with
// it.
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>

#include "processes/processes_fixture.h"
#include "processes/shared_memory.h"
#include "threads/waits.h"

namespace gluon_syncbn {
namespace {

using SegmentPtr = std::shared_ptr<Segment>;

const std::string kToken = "0123456789abcdef";

std::string file_of(const SegmentPtr& segment) {
  return "/proc/" + std::to_string(getpid()) + "/fd/" + std::to_string(segment->descriptor());
}

// A route of one process.
RoutePtr route(const SegmentPtr& segment, const std::string& key, int rank, int ranks, int64_t size,
               bool sums = false) {
  auto transport = std::make_unique<SharedMemoryTransport>(segment, key, rank, ranks, size, sums);
  return std::make_shared<Route>(std::make_shared<Connection>(), key, size, ranks,
                                 Transports{std::move(transport), nullptr, nullptr});
}

// The error of an exchange whose route is closed after so many seconds.
std::string error_of_next(const RoutePtr& route, size_t size, double seconds) {
  Doubles values(size);
  std::atomic<bool> ended{false};
  std::thread closes([&] {
    for (; !ended && seconds > 0; seconds -= 0.01) sleep(0.01);
    if (!ended) route->close("title: given up");
  });
  const std::string error = error_of([&] { route->exchange("title", kLong, &values); });
  ended = true;
  closes.join();
  return error;
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
    std::thread killer([&] {
      sleep(0.01 + 0.0007 * seed);
      kill(child, SIGKILL);
      waitpid(child, nullptr, 0);
      sleep(0.1);
      own->close("given up");
    });
    std::string error;
    for (double call = 0; error.empty(); ++call) {
      Doubles everyone(kSize, -1);
      error = error_of([&] { own->exchange("title", kLong, &everyone); });
      CHECK(!error.empty() || std::all_of(everyone.begin() + kSize, everyone.end(),
                                          [call](double value) { return value == call; }));
    }
    CHECK_EQ(error, "title: given up");
    killer.join();
  }
}

TEST(messages_of_one_call_are_added_and_others_come_as_they_are) {
  const SegmentPtr segment = Segment::create(kToken);
  in_threads(3, [&](int rank) {
    const auto mine = route(segment, "key", rank, 3, 8, true);
    for (const double call_of_last : {0, 1, 0}) {
      Doubles all;
      for (const double own : {1, 2, 3}) {
        const Doubles message{own == 3 ? call_of_last : 0, own, own, 0, 0, 2 * own, 0, 0};
        all.insert(all.end(), message.begin(), message.end());
      }
      Doubles found{all.begin() + 8 * rank, all.begin() + 8 * (rank + 1)};
      const bool added = mine->exchange("title", kLong, &found) == Answer::kSums;
      CHECK(added == (call_of_last == 0));
      CHECK(found == (added ? Doubles{0, 6, 6, 0, 0, 12, 0, 0} : all));
    }
  });
}

TEST(what_is_wrong_is_refused) {
  const SegmentPtr segment = Segment::create(kToken);
  CHECK_THROWS(std::runtime_error, Segment::open(file_of(segment), "fedcba9876543210"), "another");
  CHECK_THROWS(std::runtime_error, Segment::open("/proc/self/exe/1", kToken), "/proc/self/exe/1");
  CHECK_THROWS(std::runtime_error, segment->add(std::string(200, 'k'), 2, 1), "too long");
  CHECK_THROWS(std::runtime_error, segment->add("key", 2, int64_t{1} << 40), "is full", "after 0");
  segment->add("key", 2, 10);
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
    CHECK_EQ(error_of_next(route(segment, "key", rank, 2, 1), 1, 0.5), "title: given up");
    const auto waits = route(segment, "other key", rank, 2, 1);
    // An interrupt before the exchange waits does not end it.
    std::atomic<bool> ended{false};
    std::thread interrupt([&] {
      for (; !ended; ++interrupts) sleep(0.05);
    });
    CHECK_EQ(error_of_next(waits, 1, kLong), "title: Interrupted.");
    ended = true;
    interrupt.join();
  }
  process_ends = true;
  CHECK_EQ(error_of_next(route(segment, "third key", 1, 2, 1), 1, kLong),
           "title: The process ends.");
}

}  // namespace
}  // namespace gluon_syncbn

int main() { return check::run_all("shared memory", 120); }
