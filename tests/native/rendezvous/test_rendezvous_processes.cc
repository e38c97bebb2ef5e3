// Layers of several processes, whose store is simulated.
#include <unistd.h>

#include <condition_variable>
#include <map>

#include "processes/reorder_buffer.h"
#include "rendezvous/rendezvous_fixture.h"

namespace gluon_syncbn {
namespace {

// Two processes with one device each, whose exchanges wait for both.
struct Pair {
  static constexpr size_t kProcesses = 2;
  struct Round {
    // What was sent, by rank, and how many processes have fetched it.
    std::map<size_t, std::vector<double>> sent;
    size_t fetched = 0;
  };

  std::vector<std::unique_ptr<Fixture>> processes;
  std::vector<std::string> keys;
  std::mutex mutex;
  std::condition_variable changed;
  Round round;
  // Whether a process has given up: in later rounds it sends nothing, so that the other can too.
  bool gone = false;

  explicit Pair(double timeout = kLong) {
    for (size_t rank = 0; rank < kProcesses; ++rank) {
      processes.emplace_back(new Fixture(config_of_two_processes(cpus(1), timeout)));
      Observer observer;
      const auto send = [this, rank](const Doubles& message, Doubles* all) {
        std::unique_lock<std::mutex> lock(mutex);
        round.sent[rank] = message;
        changed.notify_all();
        changed.wait(lock, [&] { return gone || round.sent.size() == kProcesses; });
        if (round.sent.size() < kProcesses) {
          round.sent[1 - rank] = ReorderBuffer::nothing(message.size());
          ++round.fetched;
        }
        all->clear();
        for (const auto& part : round.sent) {
          all->insert(all->end(), part.second.begin(), part.second.end());
        }
        if (++round.fetched == kProcesses) round = Round();
        changed.notify_all();
        changed.wait(lock, [&] { return round.sent.count(rank) == 0; });
        return std::string();
      };
      observer.open = [this, opened = opens(kProcesses, &keys, send)](auto&&... arguments) {
        const std::lock_guard<std::mutex> lock(mutex);
        return opened(arguments...);
      };
      processes.back()->rendezvous.observe(observer);
    }
  }

  std::vector<CallId> next_calls(size_t rank, int count) {
    std::vector<CallId> ids;
    while (count-- > 0) ids.push_back(processes[rank]->next("cpu(0)"));
    return ids;
  }

  std::string error_of_forward(size_t rank, const CallId& id) {
    return Background([&] { processes[rank]->reduce(id, "cpu(0)"); }).error();
  }

  // Returns the total count. A process contributes the sequence of its call plus 100 times its
  // rank.
  double backward(size_t rank, const CallId& id) {
    const double count = static_cast<double>(id.sequence) + 100.0 * static_cast<double>(rank);
    try {
      const PassSums all =
          processes[rank]->rendezvous.reduce(processes[rank]->layer, id, Direction::kBackward,
                                             "cpu(0)", "float32", on_host(Sums(1), count));
      return all.count;
    } catch (const Error&) {
      const std::lock_guard<std::mutex> lock(mutex);
      gone = true;
      changed.notify_all();
      throw;
    }
  }
};

// Each process goes backward through another call of two.
struct Apart : Pair {
  std::vector<CallId> ids[2] = {next_calls(0, 2), next_calls(1, 2)};
  Background first{[this] { backward(0, ids[0][0]); }}, second{[this] { backward(1, ids[1][1]); }};

  using Pair::Pair;
};

// All calls use one key, even if each process goes backward in a different order.
TEST(backward_calls_come_in_any_order) {
  const std::vector<std::vector<size_t>> orders{{0, 1, 2}, {2, 1, 0}, {1, 2, 0}, {0, 2, 1}};
  for (const std::vector<size_t>& order : orders) {
    Pair pair;
    for (int step = 0; step < 3; ++step) {
      std::vector<std::unique_ptr<Background>> calls;
      std::vector<CallId> ids[2];
      for (size_t rank = 0; rank < 2; ++rank) {
        // A call that never goes backward, as in an evaluation in training mode.
        pair.processes[rank]->next("cpu(0)");
        ids[rank] = pair.next_calls(rank, 3);
      }
      for (size_t i = 0; i < 3; ++i) {
        for (size_t rank = 0; rank < 2; ++rank) {
          const CallId id = ids[rank][rank == 0 ? i : order[i]];
          calls.emplace_back(new Background([&pair, rank, id] {
            const double count = pair.backward(rank, id);
            CHECK_EQ(count, 2 * static_cast<double>(id.sequence) + 100);
          }));
        }
        sleep(0.01);
      }
      for (const auto& call : calls) CHECK_EQ(call->error(), "");
    }
    CHECK(pair.keys == std::vector<std::string>(2, "5 backward 0"));
  }
}

// As MXNet may, where the memory of one call is used again by the next.
TEST(one_process_goes_backward_one_call_after_the_other) {
  for (const size_t strict : {0, 1}) {
    Pair pair;
    const size_t other = 1 - strict;
    std::vector<CallId> ids[2] = {pair.next_calls(0, 3), pair.next_calls(1, 3)};
    Background one([&] {
      for (const CallId& id : ids[strict]) pair.backward(strict, id);
    });
    std::vector<std::unique_ptr<Background>> calls;
    for (size_t i = 3; i-- > 0;) {
      calls.emplace_back(new Background([&pair, other, id = ids[other][i]] {
        CHECK_EQ(pair.backward(other, id), 2 * static_cast<double>(id.sequence) + 100);
      }));
      sleep(0.01);
    }
    CHECK_EQ(one.error(), "");
    for (const auto& call : calls) CHECK_EQ(call->error(), "");
    CHECK(one.seconds() < kSoon);
  }
}

TEST(a_backward_call_that_another_process_leaves_out_is_an_error) {
  Apart apart(1);
  for (Background* call : {&apart.first, &apart.second}) {
    const std::string& error = call->error();
    CHECK(contains(error, "for all of 2 processes to go backward through this call."));
    const bool is_first = call == &apart.first;
    CHECK(contains(error, is_first ? "backward call 0" : "backward call 1"));
    CHECK(contains(error, is_first ? "Arrived: ranks 0;" : "Arrived: ranks 1;"));
    CHECK(call->seconds() > 0.9 && call->seconds() < kSoon);
  }
}

TEST(forward_calls_that_do_not_fit_together_are_an_error_in_both) {
  Pair pair;
  const CallId ids[] = {pair.next_calls(0, 1)[0], pair.next_calls(1, 2)[1]};
  in_threads(2, [&](int rank) {
    const std::string error = pair.error_of_forward(static_cast<size_t>(rank), ids[rank]);
    CHECK_SAY(contains(error, "is at its call " + std::to_string(1 - rank)), error);
  });
}

// By a failure of another call of the layer, or the end of the process. After a failure processes
// count calls from the beginning, as they may have counted differently.
TEST(waits_for_a_backward_call_are_released) {
  Fixture f(config_of_two_processes(cpus(1), 2 * kSoon));
  Observer observer;
  std::vector<std::string> keys;
  // The other process goes backward through another call, and then through none.
  observer.open = opens(2, &keys, [](const Doubles& message, Doubles* all) {
    *all = message;
    all->insert(all->end(), message.begin(), message.end());
    (*all)[message.size()] = message[0] < 0 ? -1 : message[0] + 1;
    return std::string();
  });
  f.rendezvous.observe(observer);
  for (const std::string why : {"it fails", "it fails again", "the end"}) {
    const CallId id = f.next("cpu(0)");
    CHECK_EQ(id.sequence, 0);
    const auto backward = [&] { f.reduce(id, "cpu(0)", Direction::kBackward); };
    Background call(backward);
    sleep(0.2);
    if (why == "the end") {
      f.rendezvous.close(why);
    } else {
      f.rendezvous.fail(nullptr, why);
    }
    CHECK(contains(call.error(), why));
    CHECK(call.seconds() < kSoon);
    f.rendezvous.recover();
    CHECK_THROWS(Error, backward(), why == "the end" ? why : "of a step that has failed");
    f.rendezvous.recover();
  }
}

}  // namespace
}  // namespace gluon_syncbn

int main() { return check::run_all("rendezvous_processes", 120); }
