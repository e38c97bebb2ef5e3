// How a rendezvous fails, and how the layer recovers.
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <stdexcept>

#include "mxnet/interrupts.h"
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
  CHECK(contains(error(nullptr), "set MXNET_CPU_TEMP_COPY=4096 and"));
  CHECK(contains(error("64"), "one of the 64 workspaces"));
  CHECK(contains(error("64"), "set MXNET_CPU_TEMP_COPY=4096 and"));
  CHECK(contains(error("4096"), "set MXNET_CPU_TEMP_COPY=16384 and"));
  CHECK(!contains(error("16384"), "workspaces"));
}

TEST(a_device_that_is_further_is_named) {
  Fixture f(config_of({"gpu(0)", "gpu(1)", "gpu(2)"}, 2));
  Background first(&f, "gpu(0)");
  f.wait_until_waiting(1);
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
  CHECK_EQ(f.failures.size(), 1u);
}

TEST(failure_reaches_all_and_the_layer_recovers) {
  Fixture f(config_of(cpus(3)));
  check_synchronizes(&f, cpus(3));
  const CallId stale = f.next("cpu(2)"), other_stale = f.next("cpu(2)");
  {
    Background forward(&f, "cpu(0)"), other(&f, "cpu(1)");
    Background backward([&] { f.reduce(stale, "cpu(2)", Direction::kBackward); });
    f.wait_until_waiting(3);
    f.fail("out of memory on cpu(2)");
    for (Background* call : {&forward, &other, &backward}) {
      CHECK_EQ(call->error(), "out of memory on cpu(2)");
      CHECK(call->seconds() < kSoon);
    }
  }
  CHECK_EQ(f.rendezvous.waiting(), 0);
  CHECK_EQ(f.failures.size(), 1u);
  CHECK_THROWS(Error, f.next("cpu(1)"), "failed before", "out of memory on cpu(2)");
  CHECK_THROWS(Error, f.reduce(other_stale, "cpu(2)"), "failed before", "out of memory on cpu(2)");

  // Only a device that was drained after the last failure takes part again.
  f.rendezvous.drain(f.kLayer, f.epoch - 1, "cpu(0)");
  CHECK_THROWS(Error, f.next("cpu(0)"), "failed before");
  f.drain("cpu(0)");
  const CallId fresh = f.next("cpu(0)");
  CHECK_EQ(fresh.sequence, 0);
  CHECK_EQ(fresh.epoch, f.epoch);
  CHECK_THROWS(Error, f.next("cpu(1)"), "failed before");
  f.drain("cpu(1)");
  f.drain("cpu(2)");
  {
    Background first([&] { f.reduce(fresh, "cpu(0)"); }), second(&f, "cpu(1)"), third(&f, "cpu(2)");
    CHECK_EQ(first.error() + second.error() + third.error(), "");
  }
  check_synchronizes(&f, cpus(3));
  CHECK_THROWS(Error, f.reduce(other_stale, "cpu(2)", Direction::kBackward), "failed before");
  check_synchronizes(&f, cpus(3));
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
    f.rendezvous.drain(f.kLayer, i + 1, "cpu(0)");
  }
  done = true;
  other.join();
}

// Many failures while devices come and go: no call hangs, and finally all synchronize.
TEST(layer_recovers_under_load) {
  Fixture f(config_of(cpus(4)));
  std::atomic<bool> stop{false};
  std::atomic<int> completed{0}, running{4};
  std::vector<std::thread> threads;
  for (const std::string& device : cpus(4)) {
    threads.emplace_back([&, device] {
      while (!stop) {
        try {
          const CallId id = f.next(device);
          f.reduce(id, device);
          f.reduce(id, device, Direction::kBackward);
          ++completed;
        } catch (const Error&) {
          const std::lock_guard<std::mutex> lock(f.mutex);
          f.drain(device);
        }
      }
      --running;
    });
  }
  for (int i = 0; i < 40; ++i) {
    const int before = completed;
    const Clock::time_point start = Clock::now();
    while (completed < before + 8 && seconds_since(start) < kSoon) sleep(0.001);
    CHECK(completed >= before + 8);
    f.fail("failure " + std::to_string(i));
  }
  stop = true;
  // A thread that began another call waits for those that have stopped.
  while (running > 0) {
    f.fail("the end");
    sleep(0.005);
  }
  for (std::thread& thread : threads) thread.join();
  f.drain_all();
  check_synchronizes(&f, cpus(4));
}

// The last device begins to work with what the others have brought while one that was interrupted
// looks for devices that cannot arrive.
TEST(an_interrupt_does_not_take_back_what_the_last_device_uses) {
  Fixture f(config_of_two_processes(cpus(2)));
  std::atomic<int> probes{0};
  std::atomic<bool> sending{false}, is_there{true};
  Observer observer;
  // Long probes are made at every turn of a wait, and the sixth turn after an interrupt ends it.
  observer.waits = [&](int64_t, int64_t, Direction) {
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

// A step of the past fails late, when all devices have begun another.
TEST(a_call_of_an_earlier_step_ends_nothing) {
  Fixture f(config_of(cpus(2)));
  const CallId old = f.next("cpu(0)");
  f.fail("the step failed");
  f.drain_all();
  Background first(&f, "cpu(0)");
  f.wait_until_waiting(1);
  f.rendezvous.fail(f.layer, old, Direction::kForward, "cpu(0)", "out of memory");
  f.call("cpu(1)");
  CHECK_EQ(first.error(), "");
  CHECK_EQ(f.failures.size(), 1u);
}

// A device that was thought not to arrive arrives, while another waits for it and the exchange with
// other processes takes a moment.
TEST(an_unreachable_device_may_arrive) {
  Fixture f(config_of_two_processes(cpus(2)));
  Observer observer;
  std::vector<std::string> keys;
  observer.open = opens(2, &keys, [&](const Doubles& message, Doubles* all) {
    sleep(0.005);
    *all = message;
    all->insert(all->end(), message.begin(), message.end());
    return std::string();
  });
  f.rendezvous.observe(observer);
  for (int64_t round = 0; round < 100; ++round) {
    Background first(&f, "cpu(0)");
    f.wait_until_waiting(1);
    sleep(0.001);
    Background second([&] {
      const CallId id = f.next("cpu(1)");
      f.rendezvous.unreachable(f.kLayer, id.epoch, Direction::kForward, "cpu(1)");
      f.reduce(id, "cpu(1)");
    });
    // Either both meet, or the first has given up and the second is late.
    CHECK_EQ(first.error().empty(), second.error().empty());
    for (int64_t epoch = 0; epoch <= round + 1; ++epoch) {
      for (const std::string& device : cpus(2)) f.rendezvous.drain(f.kLayer, epoch, device);
    }
  }
}

// MXNet has skipped a call and forgotten why.
TEST(a_flush_ends_what_waits_for_a_skipped_call) {
  for (const Direction direction : {Direction::kForward, Direction::kBackward}) {
    for (const bool early : {false, true}) {
      Fixture f(config_of(cpus(3)));
      const CallId id = f.next("cpu(1)");
      f.rendezvous.begin_flush(f.kLayer, direction, cpus(3));
      CHECK_EQ(f.rendezvous.flushing(), kLong);
      const auto flush = [&](const char* device) {
        f.rendezvous.end_flush(f.kLayer, direction, device);
      };
      if (early) flush("cpu(0)");
      Background waits([&] { f.reduce(id, "cpu(1)", direction); });
      if (!early) {
        f.wait_until_waiting(1);
        flush("cpu(0)");
      }
      CHECK(contains(waits.error(), "An earlier operation on cpu(0) has failed"));
      CHECK(waits.seconds() < kSoon);
      // cpu(2) may still come to the failed step, which is not that of cpu(0) any more.
      f.drain_all();
      if (direction == Direction::kForward) {
        CHECK_THROWS(Error, f.next("cpu(0)"), "still under way on cpu(1)");
      }
      flush("cpu(1)");
      flush("cpu(2)");
      CHECK_EQ(f.rendezvous.flushing(), 0);
      if (direction == Direction::kForward) {
        CHECK_THROWS(Error, f.next("cpu(2)"), "part of a step that failed");
      }
      check_synchronizes(&f, cpus(3));
    }
  }
}

TEST(a_flush_leaves_calls_of_all_devices_alone) {
  Fixture f(config_of(cpus(2)));
  Background first(&f, "cpu(0)");
  f.wait_until_waiting(1);
  f.rendezvous.begin_flush(f.kLayer, Direction::kForward, cpus(2));
  sleep(0.2);
  f.call("cpu(1)");
  CHECK_EQ(first.error(), "");
  for (const std::string& device : cpus(2)) {
    f.rendezvous.end_flush(f.kLayer, Direction::kForward, device);
  }
  check_synchronizes(&f, cpus(2));
}

}  // namespace
}  // namespace gluon_syncbn

int main() { return check::run_all("rendezvous_failures", 120); }
