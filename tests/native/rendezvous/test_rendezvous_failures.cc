// How a rendezvous fails, and how the layer recovers.
#include <atomic>
#include <cstdlib>
#include <stdexcept>

#include "rendezvous/rendezvous_fixture.h"
#include "threads/waits.h"

namespace gluon_syncbn {
namespace {

TEST(causes_fit_the_direction_and_the_devices) {
  Fixture gpus(config_of({"gpu(0)", "gpu(1)"}, 0.3)), mixed(config_of(cpus(2), 0.3));
  const CallId id = gpus.next("gpu(1)");
  gpus.next("gpu(0)");
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
  CHECK(contains(error(nullptr), "one of the 4 workspaces of this thread"));
  CHECK(contains(error("64"), "one of the 64 workspaces of this thread"));
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
  for (const std::string& device : cpus(2)) f.next(device);
  {
    Background forward(&f, "cpu(0)"), other(&f, "cpu(1)");
    Background backward([&] { f.reduce(earlier, "cpu(2)", Direction::kBackward); });
    f.wait_until_waiting(3);
    f.rendezvous.fail(f.layer, "out of memory on cpu(2)");
    for (Background* call : {&forward, &other, &backward}) {
      CHECK_EQ(call->error(), "out of memory on cpu(2)");
      CHECK(call->seconds() < kSoon);
    }
  }
  CHECK_EQ(f.rendezvous.waiting(), 0);
  // The first failure counts, until it has been raised.
  f.rendezvous.fail(nullptr, "another");
  CHECK_THROWS(Error, f.next("cpu(1)"), "out of memory on cpu(2)");
  CHECK_THROWS(Error, f.reduce(earlier, "cpu(2)"), "out of memory on cpu(2)");
  CHECK_THROWS(Error, f.rendezvous.check_step(), "out of memory on cpu(2)");
  // The observer learns of each call that has ended, as other processes may wait for it.
  CHECK(f.failures == std::vector<std::string>(6, "out of memory on cpu(2)"));
  CHECK_EQ(f.rendezvous.failure(), "out of memory on cpu(2)");
  CHECK_EQ(f.rendezvous.has_failed(), 1);
  f.rendezvous.recover();
  CHECK_EQ(f.rendezvous.failure(), "");
  CHECK_EQ(f.rendezvous.has_failed(), 0);
  f.rendezvous.check_step();
  // No number of a call is used twice.
  CHECK(f.next("cpu(0)").sequence > earlier.sequence);
  CHECK(f.next("cpu(1)").sequence > earlier.sequence);
  CHECK(f.next("cpu(2)").sequence > earlier.sequence);
  check_synchronizes(&f, cpus(3));
}

TEST(a_device_alone_ends_too_while_others_have_failed) {
  Fixture f(config_of(cpus(1)));
  CHECK(!f.next("cpu(0)").meets);
  f.rendezvous.fail(nullptr, "elsewhere");
  CHECK_THROWS(Error, f.next("cpu(0)"), "elsewhere");
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
    f.rendezvous.recover();
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
  // Long probes are made at every turn of a wait, and the sixth turn after an interrupt would end
  // it.
  observer.waits = [&](int64_t, const std::string&) {
    if (++probes < 5) return sleep(1);
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
  while (probes < 5) sleep(0.001);
  f.call("cpu(1)");
  CHECK_EQ(first.error(), "");
}

TEST(the_child_of_a_fork_and_the_end_of_the_process) {
  LayerConfig unnamed = config_of({});
  unnamed.num_devices = 2;
  for (const LayerConfig& config : {config_of(cpus(2)), unnamed}) {
    Fixture f(config);
    f.rendezvous.fail(nullptr, "in the parent");
    f.rendezvous.after_fork();
    Background first(&f, "cpu(0)");
    f.wait_until_waiting(1);
    f.rendezvous.close("the end");
    CHECK(contains(first.error(), "The process ended before ") && contains(first.error(), "Miss"));
    // For good, and it is no failure that Python raises.
    f.rendezvous.recover();
    CHECK_THROWS(Error, f.next("cpu(0)"), first.error());
    CHECK_EQ(f.rendezvous.failure(), "");
    CHECK_EQ(f.rendezvous.has_failed(), 0);
  }
}

// The exchange of the last device may fail after the step has.
TEST(the_first_failure_counts) {
  Fixture f(config_of_two_processes(cpus(1)));
  Observer observer;
  observer.open = [&](const ProcessCall&, int64_t, int64_t) -> RoutePtr {
    f.rendezvous.fail(nullptr, "first");
    throw std::runtime_error("second");
  };
  f.rendezvous.observe(observer);
  CHECK_EQ(Background(&f, "cpu(0)").error(), "first");
}

}  // namespace
}  // namespace gluon_syncbn

int main() { return check::run_all("rendezvous_failures", 120); }
