// How a rendezvous fails, and how the layer recovers.
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <stdexcept>

#include "mxnet/waits.h"
#include "rendezvous/rendezvous_fixture.h"

namespace gluon_syncbn {
namespace {

TEST(causes_fit_the_direction_and_the_devices) {
  Fixture gpus(config_of({"gpu(0)", "gpu(1)"}, 0.3)), mixed(config_of(cpus(2), 0.3));
  const CallId id = gpus.next("gpu(1)");
  Background backward([&] { gpus.reduce(id, "gpu(1)", Direction::kBackward); });
  Background forward(&mixed, "cpu(1)");
  CHECK(contains(backward.error(), "backward call 0: gpu(1) has waited "));
  CHECK(contains(backward.error(), "Arrived: gpu(1). Missing: gpu(0)."));
  CHECK(contains(backward.error(), "backward was not called for the loss of gpu(0)"));
  CHECK(!contains(backward.error(), "MXNET_CPU_TEMP_COPY"));
  CHECK(contains(forward.error(), "sync=False"));

  LayerConfig some = config_of({"gpu(0)", "gpu(1)", "gpu(2)"}, 0.3);
  some.num_devices = 2;
  Fixture fewer(some);
  CHECK(contains(Background(&fewer, "gpu(2)").error(), "num_devices=2 is larger"));
}

TEST(too_few_workspaces_are_a_cause_also_where_their_number_is_set) {
  const auto error = [](const char* set) {
    set ? setenv("MXNET_CPU_TEMP_COPY", set, 1) : unsetenv("MXNET_CPU_TEMP_COPY");
    Fixture f(config_of(cpus(2), 0.1));
    return Background(&f, "cpu(1)").error();
  };
  CHECK(contains(error(nullptr), "one of the 4 workspaces"));
  CHECK(contains(error(nullptr), "set MXNET_CPU_TEMP_COPY=64,"));
  CHECK(contains(error("64"), "one of the 64 workspaces"));
  CHECK(contains(error("64"), "set MXNET_CPU_TEMP_COPY=256,"));
  CHECK(contains(error("4096"), "set MXNET_CPU_TEMP_COPY=16384,"));
  CHECK(!contains(error("16384"), "workspaces"));
}

TEST(a_device_that_is_further_is_named) {
  Fixture f(config_of({"gpu(0)", "gpu(1)", "gpu(2)"}, 2));
  Background first(&f, "gpu(0)");
  f.wait_until_waiting(1);
  // So that the time of the first is up first.
  sleep(0.5);
  Background second(&f, "gpu(0)"), other(&f, "gpu(1)");
  CHECK(contains(first.error(), "Missing: gpu(2). Already in a later call: gpu(0)."));
  CHECK(contains(first.error(), "called more often on one device than on another"));
}

TEST(a_second_arrival_is_an_error_for_all) {
  Fixture f(config_of(cpus(3)));
  const CallId id = f.next("cpu(1)");
  Background first([&] { f.reduce(id, "cpu(1)"); }), other(&f, "cpu(2)");
  f.wait_until_waiting(2);
  CHECK_THROWS(Error, f.reduce(id, "cpu(1)"), "net0_norm7", "forward call 0",
               "cpu(1) arrived a second time", "Missing: cpu(0).", "for all devices before");
  CHECK(contains(first.error(), "cpu(1) arrived a second time"));
  CHECK_EQ(first.error(), other.error());
  CHECK(first.seconds() < kSoon);
}

TEST(a_failure_reaches_all_and_the_layer_recovers) {
  Fixture f(config_of(cpus(3)));
  check_synchronizes(&f, cpus(3));
  const CallId earlier = f.next("cpu(2)");
  {
    Background forward(&f, "cpu(0)"), other(&f, "cpu(1)");
    Background backward([&] { f.reduce(earlier, "cpu(2)", Direction::kBackward); });
    f.wait_until_waiting(3);
    CHECK(f.rendezvous.fail("out of memory on cpu(2)"));
    for (Background* call : {&forward, &other, &backward}) {
      CHECK_EQ(call->error(), "out of memory on cpu(2)");
      CHECK(call->seconds() < kSoon);
    }
  }
  CHECK_EQ(f.rendezvous.waiting(), 0);
  // The first failure counts, until it has been raised.
  CHECK(!f.rendezvous.fail("another"));
  CHECK_THROWS(Error, f.next("cpu(1)"), "out of memory on cpu(2)");
  CHECK_THROWS(Error, f.reduce(earlier, "cpu(2)"), "out of memory on cpu(2)");
  // The observer learns of each call that has ended, as other processes may wait for it.
  CHECK(f.failures == std::vector<std::string>(5, "out of memory on cpu(2)"));
  CHECK_EQ(f.rendezvous.failure(), "out of memory on cpu(2)");
  f.rendezvous.resume();
  CHECK_EQ(f.rendezvous.failure(), "");
  // No number of a call is used twice.
  CHECK(f.next("cpu(0)").sequence > earlier.sequence);
  CHECK(f.next("cpu(1)").sequence > earlier.sequence);
  CHECK(f.next("cpu(2)").sequence > earlier.sequence);
  check_synchronizes(&f, cpus(3));
}

TEST(a_device_alone_goes_on_while_others_have_failed) {
  Fixture f(config_of(cpus(1)));
  f.rendezvous.fail("elsewhere");
  CHECK(!f.next("cpu(0)").meets);
}

// A layer of two processes, one of which is here.
LayerConfig config_of_two_processes(std::vector<std::string> devices) {
  LayerConfig config = config_of(std::move(devices));
  config.spans_processes = true;
  config.end_rank = 2;
  return config;
}

// Also while the layer is being configured.
TEST(errors_of_the_last_device_name_the_layer) {
  const LayerConfig config = config_of_two_processes(cpus(1));
  Fixture f(config);
  Observer observer;
  observer.open = [](const ProcessCall& call, int64_t, int64_t) -> RoutePtr {
    throw std::runtime_error(call.title + ": no memory");
  };
  f.rendezvous.observe(observer);
  std::atomic<bool> done{false};
  std::thread other([&] {
    while (!done) f.rendezvous.configure(f.kLayer, config);
  });
  for (int i = 0; i < 50; ++i) {
    CHECK_THROWS(Error, f.call("cpu(0)"), "net0_norm7", "no memory");
    f.rendezvous.resume();
  }
  done = true;
  other.join();
}

// The last device begins to work with what the others have brought while one that was interrupted
// looks for devices that cannot arrive.
TEST(an_interrupt_does_not_take_back_what_the_last_device_uses) {
  Fixture f(config_of_two_processes(cpus(2)));
  std::atomic<int> probes{0};
  std::atomic<bool> sending{false}, is_there{true};
  Observer observer;
  // Long probes are made at every turn of a wait, and the sixth turn after an interrupt ends it.
  observer.waits = [&](int64_t, Direction, int64_t) {
    if (++probes < 6) return sleep(1);
    while (!sending) sleep(0.001);
  };
  std::vector<std::string> keys;
  observer.open = opens(2, &keys, [&](const Doubles& message, Doubles* all) {
    sending = true;
    sleep(0.5);
    CHECK(is_there);
    *all = message;
    all->insert(all->end(), message.begin(), message.end());
    return std::string();
  });
  f.rendezvous.observe(observer);
  Background first([&] {
    try {
      f.call("cpu(0)");
    } catch (const Error&) {
      is_there = false;
      throw;
    }
  });
  f.wait_until_waiting(1);
  ++interrupts;
  while (probes < 6) sleep(0.001);
  f.call("cpu(1)");
  CHECK_EQ(first.error(), "");
}

// A probe has found that MXNet has skipped a call. It may come late.
TEST(an_unreachable_device_ends_its_meeting_alone) {
  Fixture f(config_of(cpus(2)));
  std::atomic<int64_t> meeting{-1};
  Observer observer;
  observer.waits = [&](int64_t, Direction, int64_t id) { meeting = id; };
  f.rendezvous.observe(observer);
  Background first(&f, "cpu(0)");
  while (meeting < 0) sleep(0.001);
  f.rendezvous.unreachable(meeting, "cpu(0)");
  f.rendezvous.unreachable(meeting + 1, "cpu(1)");
  CHECK_EQ(f.rendezvous.failure(), "");
  f.rendezvous.unreachable(meeting, "cpu(1)");
  CHECK(contains(first.error(), "Missing: cpu(1).\nAn earlier operation on cpu(1) has failed"));
  f.rendezvous.resume();
  const int64_t old = meeting;
  Background second(&f, "cpu(0)");
  f.wait_until_waiting(1);
  f.rendezvous.unreachable(old, "cpu(1)");
  f.call("cpu(1)");
  CHECK_EQ(second.error(), "");
}

TEST(a_flush_leaves_calls_of_all_devices_alone) {
  Fixture f(config_of(cpus(2)));
  const auto flush = std::make_shared<Rendezvous::Flush>();
  for (int i = 0; i < 2; ++i) f.rendezvous.add(flush, f.kLayer);
  Background first(&f, "cpu(0)");
  f.wait_until_waiting(1);
  Background finish([&] { f.rendezvous.finish(flush); });
  sleep(0.2);
  f.call("cpu(1)");
  CHECK_EQ(first.error(), "");
  for (const std::string& device : cpus(2)) {
    f.rendezvous.passed(flush, f.kLayer, Direction::kForward, device);
  }
  CHECK_EQ(finish.error(), "");
  CHECK_EQ(f.rendezvous.failure(), "");
  check_synchronizes(&f, cpus(2));
}

TEST(a_flush_has_a_limit_and_ctrl_c_ends_what_waits) {
  Fixture late(config_of(cpus(2), 0.3)), f(config_of(cpus(3)));
  const auto never = std::make_shared<Rendezvous::Flush>();
  late.rendezvous.add(never, f.kLayer);
  late.rendezvous.finish(never);
  const auto flush = std::make_shared<Rendezvous::Flush>();
  f.rendezvous.add(flush, f.kLayer);
  const CallId earlier = f.next("cpu(2)");
  // First, so that it waits by the time of the interrupt.
  Background finish([&] { f.rendezvous.finish(flush); });
  Background first(&f, "cpu(0)"), other(&f, "cpu(1)");
  Background backward([&] { f.reduce(earlier, "cpu(2)", Direction::kBackward); });
  f.wait_until_waiting(3);
  sleep(0.2);
  ++interrupts;
  CHECK_EQ(first.error(), "Interrupted.");
  CHECK_EQ(first.is_first() + other.is_first() + backward.is_first(), 1);
  f.rendezvous.passed(flush, f.kLayer, Direction::kForward, "cpu(0)");
  CHECK(finish.seconds() < kSoon);
}

TEST(the_child_of_a_fork_and_the_end_of_the_process) {
  Fixture f(config_of(cpus(2)));
  f.rendezvous.fail("in the parent");
  f.rendezvous.after_fork();
  Background first(&f, "cpu(0)");
  f.wait_until_waiting(1);
  f.rendezvous.close("the end");
  CHECK(contains(first.error(), "The process ended before ") && first.is_first());
}

// The exchange of the last device may fail after the step has.
TEST(a_second_failure_is_not_reported) {
  Fixture f(config_of_two_processes(cpus(1)));
  Observer observer;
  observer.open = [&](const ProcessCall&, int64_t, int64_t) -> RoutePtr {
    f.rendezvous.fail("first");
    throw std::runtime_error("second");
  };
  f.rendezvous.observe(observer);
  Background call(&f, "cpu(0)");
  CHECK_EQ(call.error(), "first");
  CHECK(!call.is_first());
}

// A step of some layers, whose devices call them in the same order, forward and then backward.
// MXNet skips a device's calls from some moment on, the loop leaves them out, a call fails by
// itself, or the data does not fit. Then Python raises the error, and the next step is as if
// nothing had been.
class RandomSteps {
 public:
  explicit RandomSteps(uint64_t seed)
      : random_(seed), layers_(pick(1, 3)), names_(cpus(static_cast<int>(pick(2, 4)))) {
    check::context = "seed " + std::to_string(seed);
    for (int64_t layer = 0; layer < layers_; ++layer) {
      rendezvous_.configure(layer, config_of(names_));
    }
    for (int step = 0; step < 4; ++step) {
      run(step % 2 == 0 ? 0 : pick(1, 2));
      rendezvous_.resume();
    }
  }

 private:
  enum Fault { kNone, kSkipped, kFails, kDoesNotFit, kFaults };

  int64_t pick(int64_t from, int64_t to) {
    return from + static_cast<int64_t>(random_.uniform() * static_cast<double>(to - from + 1));
  }

  void run(int64_t faults) {
    const size_t devices = names_.size();
    const int64_t calls = pick(1, 3) * layers_;
    std::vector<Fault> fault(devices, kNone);
    std::vector<int64_t> moment(devices, 0);
    for (; faults > 0; --faults) {
      const auto device = static_cast<size_t>(pick(0, static_cast<int64_t>(devices) - 1));
      fault[device] = static_cast<Fault>(pick(kNone + 1, kFaults - 1));
      moment[device] = pick(0, 2 * calls - 1);
    }
    const auto flush = std::make_shared<Rendezvous::Flush>();
    const int64_t places = 2 * layers_ * static_cast<int64_t>(devices);
    for (int64_t i = 0; i < places; ++i) rendezvous_.add(flush, i % layers_);
    std::atomic<int> reports{0}, ended{0}, wrong{0};
    std::vector<std::thread> threads;
    for (size_t device = 0; device < devices; ++device) {
      threads.emplace_back([&, device] {
        const auto pass = [&](Direction direction) {
          for (int64_t layer = 0; layer < layers_; ++layer) {
            rendezvous_.passed(flush, layer, direction, names_[device]);
          }
        };
        std::vector<CallId> ids(static_cast<size_t>(calls));
        int64_t i = 0;
        for (; i < 2 * calls; ++i) {
          if (i == calls) pass(Direction::kForward);
          const bool now = fault[device] != kNone && moment[device] == i;
          if (now && fault[device] == kSkipped) break;
          const bool forward = i < calls;
          const int64_t call = forward ? i : 2 * calls - 1 - i;
          const LayerPtr layer = rendezvous_.find(call % layers_);
          CallId& id = ids[static_cast<size_t>(call)];
          try {
            if (forward) id = rendezvous_.next_call(layer, names_[device]);
            if (now && fault[device] == kFails) {
              reports += rendezvous_.fail("it fails on " + names_[device]);
              throw Error("");
            }
            const size_t channels = now && fault[device] == kDoesNotFit ? 3 + device : 2;
            const PassSums all = rendezvous_.reduce(
                layer, id, forward ? Direction::kForward : Direction::kBackward, names_[device],
                "float32", on_host(contribution(device, i, channels), 1));
            wrong += !same_bits(all.on_host, added_in_rank_order(devices, i, 2));
          } catch (const Error& error) {
            reports += error.is_first;
            ++ended;
          }
        }
        if (i < calls) pass(Direction::kForward);
        pass(Direction::kBackward);
      });
    }
    const Clock::time_point start = Clock::now();
    const std::string why = pick(0, 1) ? "it was given up" : "";
    rendezvous_.finish(flush, why);
    for (std::thread& thread : threads) thread.join();
    CHECK(seconds_since(start) < kSoon);
    CHECK_EQ(wrong.load(), 0);
    CHECK_EQ(rendezvous_.waiting(), 0);
    const std::string text = rendezvous_.failure();
    const auto has = [&](Fault kind) { return std::count(fault.begin(), fault.end(), kind) > 0; };
    // If all are skipped from the same call on, none waits.
    const bool failed =
        has(kFails) || has(kDoesNotFit) ||
        (has(kSkipped) && (has(kNone) || moment != decltype(moment)(devices, moment[0])));
    CHECK_EQ(failed, !text.empty());
    if (!failed) {
      CHECK_EQ(ended.load(), 0);
      return;
    }
    const bool is_skipped = contains(text, why.empty() ? "An earlier operation on " : why);
    CHECK_EQ(reports.load(), is_skipped ? 0 : 1);
    const bool fits = (is_skipped && has(kSkipped)) ||
                      (contains(text, "it fails on ") && has(kFails)) ||
                      (contains(text, "channels") && has(kDoesNotFit));
    CHECK_SAY(fits, text);
  }

  Random random_;
  const int64_t layers_;
  const std::vector<std::string> names_;
  Rendezvous rendezvous_;
};

TEST(random_failures) {
  const char* const count = std::getenv("CASES");
  const uint64_t cases = count ? std::strtoull(count, nullptr, 10) : 1000;
  for (uint64_t seed = 0; seed < cases; ++seed) RandomSteps steps(seed);
}

}  // namespace
}  // namespace gluon_syncbn

int main() { return check::run_all("rendezvous_failures", 600); }
