// What a step learns of calls: from probes, and from forward calls that have gone.
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <functional>

#include "rendezvous/rendezvous_fixture.h"
#include "threads/waits.h"

namespace gluon_syncbn {
namespace {

using Names = std::vector<std::string>;

const std::string kSkipped = "An earlier operation on cpu(1) has failed";
const std::string kGone = "cpu(1) cannot go backward through this call any more";

TEST(a_skipped_probe_fails_the_step) {
  Fixture f(config_of(cpus(3)));
  {
    Background first(&f, "cpu(0)");
    f.wait_until_waiting(1);
    f.answer("cpu(1)", true);
    CHECK(contains(first.error(),
                   "forward call 0: Arrived: cpu(0). Missing: cpu(1), cpu(2).\n" + kSkipped));
  }
  // The first failure counts.
  f.answer("cpu(2)", true);
  CHECK(contains(f.rendezvous.failure(), kSkipped));
  f.rendezvous.recover();
  CHECK_EQ(f.rendezvous.failure(), "");
  // A device that has arrived: not that call was skipped, but another one.
  {
    Background first(&f, "cpu(1)");
    f.wait_until_waiting(1);
    f.answer("cpu(1)", true);
    CHECK_EQ(first.error().find("SyncBatchNorm 'net0_norm7': " + kSkipped), 0u);
  }
  f.rendezvous.recover();
  // Nobody waits.
  f.answer("cpu(1)", true);
  CHECK_EQ(f.rendezvous.failure().find("SyncBatchNorm 'net0_norm7': " + kSkipped), 0u);
  f.rendezvous.recover();
  // A probe that reads gradients says the same.
  f.rendezvous.answer(f.rendezvous.ask(f.kLayer, "cpu(1)", Calls::Of::kGradients), true);
  CHECK(contains(f.rendezvous.failure(), kSkipped));
  f.rendezvous.recover();
  check_synchronizes(&f, cpus(3));
}

TEST(a_probe_that_ends_and_a_skipped_one_of_who_meets_nobody_fail_nothing) {
  Fixture f(config_of(cpus(2))), alone(config_of(cpus(1))), pair(config_of_two_processes(cpus(1)));
  f.answer("cpu(1)", false);
  f.rendezvous.answer(f.rendezvous.ask(f.kLayer + 1, "cpu(1)", Calls::Of::kAll), true);
  alone.answer("cpu(0)", true);
  pair.answer("cpu(0)", true);
  CHECK_EQ(f.rendezvous.failure() + alone.rendezvous.failure(), "");
  CHECK(contains(pair.rendezvous.failure(), "An earlier operation on cpu(0) has failed"));
  // The layer has gone when its probe ends.
  const Calls::Ticket ticket = f.ask("cpu(1)");
  f.rendezvous.forget(f.kLayer);
  f.layer = nullptr;
  f.rendezvous.answer(ticket, true);
  CHECK_EQ(f.rendezvous.failure(), "");
}

// A call of each device of a layer, and then backward calls of some.
struct Backwards : Fixture {
  std::vector<CallId> ids;

  explicit Backwards(const LayerConfig& config, size_t devices) : Fixture(config) {
    std::vector<std::unique_ptr<Background>> calls;
    for (size_t i = 0; i < devices; ++i) {
      const std::string& device = config.devices[i];
      ids.push_back(next(device));
      calls.emplace_back(new Background([this, device, id = ids[i]] { reduce(id, device); }));
    }
  }

  std::unique_ptr<Background> start(size_t device) {
    return backward(ids[device], "cpu(" + std::to_string(device) + ")");
  }
  void drop(size_t device) {
    rendezvous.drop(layer, ids[device], "cpu(" + std::to_string(device) + ")");
  }
};

TEST(a_backward_call_does_not_wait_for_a_forward_call_that_has_gone) {
  for (const bool drops_first : {false, true}) {
    Backwards f(config_of(cpus(2)), 2);
    if (drops_first) f.drop(1);
    const auto waits = f.start(0);
    if (!drops_first) f.wait_until_waiting(1);
    if (!drops_first) f.drop(1);
    CHECK(contains(waits->error(), "backward call 0: Arrived: cpu(0). Missing: cpu(1).\n" + kGone));
    CHECK(waits->seconds() < kSoon);
    CHECK_EQ(f.failures.size(), 1u);
  }
  // It never went forward.
  Backwards f(config_of(cpus(2)), 0);
  CHECK_THROWS(Error, f.reduce(f.next("cpu(0)"), "cpu(0)", Direction::kBackward), kGone);
}

TEST(other_forward_calls_may_go) {
  Backwards f(config_of(cpus(2)), 2);
  const auto waits = f.start(0);
  f.wait_until_waiting(1);
  // Another call, another node, another layer; and one who has arrived.
  CallId other = f.ids[1];
  ++other.sequence;
  f.rendezvous.drop(f.layer, other, "cpu(1)");
  other = f.ids[1];
  ++other.node;
  f.rendezvous.drop(f.layer, other, "cpu(1)");
  f.rendezvous.configure(f.kLayer + 1, config_of(cpus(2)));
  f.rendezvous.drop(f.rendezvous.find(f.kLayer + 1), f.ids[1], "cpu(1)");
  f.drop(0);
  // One who waits in forward.
  const CallId forward = f.next("cpu(0)");
  Background forwards([&] { f.reduce(forward, "cpu(0)"); });
  f.wait_until_waiting(2);
  f.rendezvous.drop(f.layer, f.next("cpu(1)"), "cpu(1)");
  CHECK_EQ(f.rendezvous.failure(), "");
  CHECK_EQ(f.start(1)->error(), "");
  CHECK_EQ(waits->error(), "");
  f.rendezvous.fail(nullptr, "the end of the test");
}

// Of three devices, any two take part.
TEST(a_device_is_no_reason_while_others_may_come) {
  {
    Backwards f(config_of_any(2, cpus(3)), 2);
    const auto waits = f.start(0);
    f.wait_until_waiting(1);
    CHECK_EQ(f.rendezvous.failure(), "");
    f.drop(1);
    CHECK(contains(waits->error(), "Missing: 1 of cpu(1), cpu(2).\n"));
    CHECK(contains(waits->error(), "cannot go backward"));
  }
  for (const bool comes : {true, false}) {
    Fixture f(config_of_any(2, cpus(3)));
    const Calls::Ticket from = f.rendezvous.next_ticket();
    Background waits(&f, "cpu(0)");
    f.wait_until_waiting(1);
    const Calls::Ticket other = f.ask("cpu(2)");
    f.answer("cpu(1)", false);
    Background settles([&] { f.rendezvous.settle({f.kLayer}, from, "it was given up"); });
    sleep(0.2);
    CHECK_EQ(f.rendezvous.failure(), "");
    if (comes) f.call("cpu(2)");
    f.rendezvous.answer(other, false);
    CHECK_EQ(contains(waits.error(), "it was given up"), !comes);
  }
}

// A call of settle in the background.
class Settles {
 public:
  explicit Settles(Fixture* f, Calls::Ticket from, const std::string& why = "",
                   const std::set<int64_t>& layers = {Fixture::kLayer})
      : settles_([=] {
          f->rendezvous.settle(layers, from, why);
          has_ended_ = true;
        }) {}
  bool has_ended_after(double seconds) const {
    sleep(seconds);
    return has_ended_;
  }
  double seconds() { return settles_.seconds(); }

 private:
  std::atomic<bool> has_ended_{false};
  Background settles_;
};

TEST(settling_waits_for_probes_of_its_layers_from_its_first_on) {
  Fixture f(config_of(cpus(2)));
  // Never answered: it was asked before; it is of another layer; it is asked later.
  f.ask("cpu(0)");
  const Calls::Ticket from = f.rendezvous.next_ticket();
  f.rendezvous.ask(f.kLayer + 1, "cpu(0)", Calls::Of::kAll);
  const Calls::Ticket all = f.ask("cpu(0)");
  const Calls::Ticket gradients = f.rendezvous.ask(f.kLayer, "cpu(1)", Calls::Of::kGradients);
  Settles settles(&f, from, "it was given up");
  CHECK(!settles.has_ended_after(0.2));
  f.ask("cpu(0)");
  f.rendezvous.answer(all, false);
  CHECK(!settles.has_ended_after(0.2));
  f.rendezvous.answer(gradients, false);
  CHECK(settles.seconds() < kSoon);
  CHECK_EQ(f.rendezvous.failure(), "");
}

// cpu(0) waits for cpu(1), so the probe behind its call does not end.
TEST(settling_ends_at_a_call_that_was_not_made) {
  for (const std::string why : {"", "it was given up"}) {
    Fixture f(config_of(cpus(2)));
    f.answer("cpu(1)", false);
    Background waits(&f, "cpu(0)");
    f.wait_until_waiting(1);
    const Calls::Ticket from = f.rendezvous.next_ticket();
    const Calls::Ticket first = f.ask("cpu(0)"), second = f.ask("cpu(1)");
    Settles settles(&f, from, why);
    // As cpu(1) may still arrive. What is known from before does not count.
    CHECK(!settles.has_ended_after(0.3));
    f.rendezvous.answer(second, false);
    CHECK(settles.seconds() < kSoon);
    if (why.empty()) {
      CHECK_EQ(f.rendezvous.failure(), "");
      f.call("cpu(1)");
    }
    const std::string expected = "forward call 0: Arrived: cpu(0). Missing: cpu(1).\n" + why;
    CHECK_EQ(contains(waits.error(), expected), !why.empty());
    CHECK_EQ(waits.error().empty(), why.empty());
    f.rendezvous.answer(first, false);
  }
}

// Also if a probe has just ended, the others may be on their way.
TEST(settling_leaves_calls_alone_that_devices_go_on_with) {
  Fixture f(config_of(cpus(3)));
  std::vector<std::unique_ptr<Background>> waits;
  waits.emplace_back(new Background(&f, "cpu(0)"));
  f.wait_until_waiting(1);
  const Calls::Ticket from = f.rendezvous.next_ticket(), first = f.ask("cpu(0)");
  f.ask("cpu(2)");
  Settles settles(&f, from, "it was given up");
  f.answer("cpu(1)", false);
  waits.emplace_back(new Background(&f, "cpu(2)"));
  f.wait_until_waiting(2);
  f.call("cpu(1)");
  for (const auto& call : waits) CHECK_EQ(call->error(), "");
  f.rendezvous.answer(first, false);
  f.rendezvous.answer(first + 1, false);
  CHECK(settles.seconds() < kSoon);
  CHECK_EQ(f.rendezvous.failure(), "");
}

TEST(settling_does_not_look_at_other_layers) {
  Fixture f(config_of(cpus(2)));
  Background waits(&f, "cpu(0)");
  f.wait_until_waiting(1);
  const Calls::Ticket from = f.rendezvous.next_ticket();
  f.answer("cpu(1)", false);
  f.rendezvous.settle({f.kLayer + 1}, from, "it was given up");
  CHECK_EQ(f.rendezvous.failure(), "");
  // Here nothing is open, and a call waits for one that was not made.
  f.rendezvous.settle({f.kLayer + 1, f.kLayer}, from, "it was given up");
  CHECK(contains(waits.error(), "it was given up"));
}

TEST(settling_has_a_limit_and_ctrl_c_ends_what_waits) {
  Fixture late(config_of(cpus(2), 0.3)), f(config_of(cpus(3)));
  const Calls::Ticket never = late.ask("cpu(0)");
  Settles limited(&late, never, "it was given up");
  CHECK(limited.seconds() > 0.29 && limited.seconds() < kSoon);
  CHECK_EQ(late.rendezvous.failure(), "");

  // First, so that it waits by the time of the interrupt.
  Settles settles(&f, f.ask("cpu(0)"), "it was given up");
  const CallId earlier = f.next("cpu(2)");
  f.next("cpu(0)");
  f.next("cpu(1)");
  Background first(&f, "cpu(0)"), other(&f, "cpu(1)");
  const auto backward = f.backward(earlier, "cpu(2)");
  f.wait_until_waiting(3);
  sleep(0.2);
  ++interrupts;
  for (Background* call : {&first, &other, backward.get()}) CHECK_EQ(call->error(), "Interrupted.");
  CHECK(settles.seconds() < kSoon);
}

TEST(settling_ends_where_the_step_has_failed_or_mxnet_waits_in_vain) {
  Fixture f(config_of(cpus(2)));
  const Calls::Ticket never = f.ask("cpu(0)");
  abandoned = true;
  CHECK(Settles(&f, never).seconds() < kSoon);
  abandoned = false;
  Settles settles(&f, never);
  CHECK(!settles.has_ended_after(0.1));
  f.rendezvous.fail(nullptr, "it fails");
  CHECK(settles.seconds() < kSoon);
}

// The end of a script waits for devices that still arrive.
TEST(a_probe_that_ends_is_no_arrival) {
  Fixture f(config_of(cpus(2)));
  CHECK_EQ(f.rendezvous.stuck_seconds(), 0);
  Background waits(&f, "cpu(0)");
  f.wait_until_waiting(1);
  sleep(0.2);
  f.answer("cpu(1)", false);
  CHECK(f.rendezvous.stuck_seconds() > 0.19);
  f.call("cpu(1)");
  CHECK_EQ(waits.error(), "");
  CHECK_EQ(f.rendezvous.stuck_seconds(), 0);
}

// Whoever waits asks for each device that is missing, again once a probe has ended, and the causes
// of its error are of what it knows.
TEST(causes_are_of_what_is_known) {
  const auto error = [](const std::function<void(Fixture*)>& probe) {
    // Long enough for a second look.
    Fixture f(config_of(cpus(2), 2.5));
    // Of earlier calls.
    f.answer("cpu(1)", false);
    std::atomic<int> asked{0};
    Observer observer;
    observer.waits = [&](int64_t layer, const std::string& device) {
      CHECK_EQ(layer, Fixture::kLayer);
      CHECK_EQ(device, "cpu(1)");
      ++asked;
      probe(&f);
    };
    f.rendezvous.observe(observer);
    const std::string text = Background(&f, "cpu(0)").error();
    return std::to_string(asked > 1) + text;
  };
  const std::string unknown = error([](Fixture*) {});
  CHECK(contains(unknown, "left out cpu(1)") && contains(unknown, "MXNET_CPU_TEMP_COPY"));
  const std::string queued = error([](Fixture* f) { f->ask("cpu(1)"); });
  CHECK_EQ(queued[0], '0');
  CHECK(contains(queued, "the call of cpu(1) has been made, and operations before it have not"));
  CHECK(contains(queued, "MXNET_CPU_TEMP_COPY") && !contains(queued, "left out"));
  const std::string not_made = error([](Fixture* f) { f->answer("cpu(1)", false); });
  CHECK_EQ(not_made[0], '1');
  CHECK(contains(not_made, "the loop over the devices left out cpu(1)"));
  CHECK(!contains(not_made, "MXNET_CPU_TEMP_COPY") && !contains(not_made, "has been made"));
}

// Checks that take seconds, at once, each in a process of its own in which nothing else runs.
class Quietly {
 public:
  void start(const std::function<void()>& f) {
    pids_.push_back(fork());
    if (pids_.back() != 0) return;
    alarm(60);
    check::failed = 0;
    f();
    _exit(check::failed > 0);
  }
  ~Quietly() {
    for (const pid_t pid : pids_) {
      int status = -1;
      waitpid(pid, &status, 0);
      CHECK_EQ(status, 0);
    }
  }

 private:
  std::vector<pid_t> pids_;
};

// A layer whose probes never end, in a process in which nothing runs.
struct Stuck : Fixture {
  std::atomic<int> quiet_looks{0};
  std::atomic<bool> has_probes{true};

  explicit Stuck(const LayerConfig& config, bool may_run = false, bool are_made = true)
      : Fixture(config) {
    Observer observer;
    observer.waits = [this, are_made](int64_t of, const std::string& device) {
      if (!has_probes) return;
      const Calls::Ticket ticket = rendezvous.ask(of, device, Calls::Of::kAll);
      if (!are_made) rendezvous.answer(ticket, false);
    };
    observer.may_run = [this, may_run] {
      ++quiet_looks;
      return may_run;
    };
    rendezvous.observe(observer);
  }

  // More looks than are enough. Returns whether all still wait.
  bool waits_long() {
    while (quiet_looks < 8 && rendezvous.failure().empty()) sleep(0.5);
    CHECK_EQ(rendezvous.failure(), "");
    return rendezvous.failure().empty();
  }
};

void check_queued() {
  Stuck f(config_of(cpus(3)));
  Background first(&f, "cpu(0)"), second(&f, "cpu(1)");
  for (Background* call : {&first, &second}) {
    CHECK(contains(call->error(), "forward call 0: cpu("));
    CHECK(contains(call->error(), "Missing: cpu(2).\ncpu(2) has been called, and MXNet cannot"));
    CHECK(contains(call->error(), "call each context in a thread of its own"));
    // Alone.
    CHECK(!contains(call->error(), "causes") && !contains(call->error(), "All devices"));
    CHECK(call->seconds() > 3.5 && call->seconds() < 3 * kSoon);
  }
}

void check_waits(const LayerConfig& config, const Names& devices, bool may_run, bool are_made) {
  Stuck f(config, may_run, are_made);
  Background first(&f, devices[0]);
  if (f.waits_long()) f.call(devices[1]);
}

// Each device waits for the other, in another layer.
void check_crossed(bool has_probes, bool are_made) {
  Stuck f(config_of(cpus(2)), false, are_made);
  f.has_probes = has_probes;
  f.rendezvous.configure(f.kLayer + 1, config_of(cpus(2)));
  const LayerPtr second = f.rendezvous.find(f.kLayer + 1);
  const auto call_second = [&](const std::string& device) {
    const CallId id = f.rendezvous.next_call(second, device);
    f.rendezvous.reduce(second, id, Direction::kForward, device, "float32", on_host(Sums(2), 1));
  };
  Background one(&f, "cpu(0)"), other([&] { call_second("cpu(1)"); });
  if (has_probes && are_made) {
    CHECK(contains(one.error(), "All devices wait for each other"));
  } else if (f.waits_long()) {
    f.call("cpu(1)");
    call_second("cpu(0)");
  }
  CHECK_EQ(other.error(), one.error());
}

void check_busy() {
  Stuck f(config_of(cpus(2)));
  Background first(&f, "cpu(0)");
  for (const auto start = Clock::now(); seconds_since(start) < 7;) {
  }
  CHECK_EQ(f.quiet_looks, 0);
  f.call("cpu(1)");
}

void check_arrivals_now_and_then() {
  Stuck f(config_of(cpus(3)));
  Background first(&f, "cpu(0)");
  sleep(3.2);
  Background second(&f, "cpu(1)");
  sleep(3.2);
  f.call("cpu(2)");
  CHECK_EQ(first.error() + second.error(), "");
}

TEST(what_mxnet_cannot_run_is_an_error) {
  Quietly quietly;
  quietly.start(check_queued);
  quietly.start([] { check_crossed(true, true); });
  // Not made; nobody knows; a thread runs; an observer says that something may run.
  quietly.start([] { check_waits(config_of(cpus(2)), cpus(2), false, false); });
  quietly.start([] { check_crossed(true, false); });
  quietly.start([] { check_crossed(false, true); });
  quietly.start([] { check_waits(config_of_any(2, {}), cpus(2), false, true); });
  quietly.start([] { check_waits(config_of(cpus(2)), cpus(2), true, true); });
  const Names gpus{"gpu(0)", "gpu(1)"};
  quietly.start([=] { check_waits(config_of(gpus), gpus, false, true); });
  quietly.start(check_busy);
  quietly.start(check_arrivals_now_and_then);
}

}  // namespace
}  // namespace gluon_syncbn

int main() { return check::run_all("probes", 120); }
