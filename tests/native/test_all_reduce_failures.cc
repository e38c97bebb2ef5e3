// How meetings end that do not succeed, and what comes after.
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <stdexcept>

#include "all_reduce_fixture.h"

namespace gluon_syncbn {
namespace {

void missing_device_is_told_early_and_late() {
  check::context = "timeout";
  setenv("MXNET_CPU_TEMP_COPY", "4", 1);
  Fixture f(config_of(cpus(4), 0.5));
  for (const char* device : {"cpu(0)", "cpu(1)", "cpu(2)"}) f.next(device);
  Call first(&f, "cpu(2)"), second(&f, "cpu(0)");
  CHECK(first.seconds() >= 0.5 && first.seconds() < kSoon);
  CHECK_EQ(first.error(), second.error());

  CHECK_EQ(f.warnings.size(), 1u);
  CHECK_EQ(f.failures_before_warning, 0u);
  f.warnings.resize(1);
  CHECK(f.failures == std::vector<std::string>{first.error()});
  for (const std::string& text : {f.warnings[0], first.error()}) {
    for (const char* part :
         {"SyncBatchNorm 'net0_norm7', forward call 1: cpu(", " has waited ",
          "Missing: cpu(1), cpu(3).", "cpu(0)", "cpu(2)", "Usual causes: ", "num_devices is larger",
          "MXNET_CPU_TEMP_COPY=4096", "(now MXNET_CPU_TEMP_COPY is 4)"}) {
      CHECK_SAY(contains(text, part), "'" << text << "' does not say '" << part << "'");
    }
  }
  CHECK(contains(f.warnings[0], "After 0.5 s this is an error."));
  CHECK(contains(first.error(), "Came: cpu(2), cpu(0).") ||
        contains(first.error(), "Came: cpu(0), cpu(2)."));
}

void causes_fit_the_direction_and_the_devices() {
  check::context = "causes";
  unsetenv("MXNET_CPU_TEMP_COPY");
  Fixture gpus(config_of({"gpu(0)", "gpu(1)"}, 0.3)), mixed(config_of(cpus(2), 0.3));
  const Ticket ticket = gpus.next("gpu(1)");
  Call backward([&] { gpus.reduce(ticket, "gpu(1)", Direction::kBackward); });
  Call forward(&mixed, "cpu(1)");
  CHECK(contains(backward.error(), "backward call 0: gpu(1) has waited "));
  CHECK(contains(backward.error(), "Came: gpu(1). Missing: gpu(0)."));
  CHECK(contains(backward.error(), "backward is not called for every device"));
  CHECK(!contains(backward.error(), "MXNET_CPU_TEMP_COPY"));
  CHECK(contains(forward.error(), "MXNET_CPU_TEMP_COPY is not set"));
}

void second_arrival_is_an_error_for_all() {
  check::context = "second arrival";
  Fixture f(config_of(cpus(3)));
  const Ticket ticket = f.next("cpu(1)");
  Call first([&] { f.reduce(ticket, "cpu(1)"); }), other(&f, "cpu(2)");
  f.wait_until_waiting(2);
  CHECK_THROWS(Error, f.reduce(ticket, "cpu(1)"), "net0_norm7", "forward call 0",
               "cpu(1) came a second time", "Missing: cpu(0).", "for all devices before");
  CHECK(contains(first.error(), "cpu(1) came a second time"));
  CHECK_EQ(first.error(), other.error());
  CHECK(first.seconds() < kSoon);
  CHECK_EQ(f.failures.size(), 1u);
}

void channels_have_to_match() {
  check::context = "channels";
  Fixture f(config_of(cpus(2)));
  Call first([&] { f.reduce(f.next("cpu(1)"), "cpu(1)", Direction::kForward, 8); });
  f.wait_until_waiting(1);
  CHECK_THROWS(Error, f.reduce(f.next("cpu(0)"), "cpu(0)", Direction::kForward, 16), "net0_norm7",
               "cpu(1) has 8 channels", "cpu(0) has 16", "same number of channels");
  CHECK(contains(first.error(), "cpu(1) has 8 channels"));
}

void dtypes_have_to_match() {
  check::context = "dtypes";
  Fixture f(config_of({"gpu(0)", "gpu(1)"}));
  Call first([&] { f.reduce(f.next("gpu(1)"), "gpu(1)"); });
  f.wait_until_waiting(1);
  CHECK_THROWS(Error, f.reduce(f.next("gpu(0)"), "gpu(0)", Direction::kForward, 2, "float16"),
               "net0_norm7", "gpu(1) has float32 data, gpu(0) has float16 data", "one dtype");
  CHECK(contains(first.error(), "gpu(1) has float32 data"));
}

void failure_reaches_all_and_the_layer_recovers() {
  check::context = "failure";
  Fixture f(config_of(cpus(3)));
  check_meets(&f, cpus(3));
  const Ticket stale = f.next("cpu(2)"), stale_too = f.next("cpu(2)");
  {
    Call forward(&f, "cpu(0)"), other(&f, "cpu(1)");
    Call backward([&] { f.reduce(stale, "cpu(2)", Direction::kBackward); });
    f.wait_until_waiting(3);
    f.all_reduce.fail(f.layer, "out of memory on cpu(2)");
    for (Call* call : {&forward, &other, &backward}) {
      CHECK_EQ(call->error(), "out of memory on cpu(2)");
      CHECK(call->seconds() < kSoon);
    }
  }
  CHECK_EQ(f.all_reduce.waiting(), 0);
  CHECK_EQ(f.failures.size(), 1u);
  CHECK(f.failed_layers == std::set<int64_t>{f.kNumber});
  CHECK(f.generation > stale.generation);
  for (const std::string& device : cpus(3)) {
    CHECK_THROWS(Error, f.next(device), "failed before", "out of memory on cpu(2)");
  }
  CHECK_THROWS(Error, f.reduce(stale_too, "cpu(2)"), "failed before", "out of memory on cpu(2)");

  // Only the device that is settled takes part again, and only by word of the last failure.
  f.all_reduce.settle(f.kNumber, f.generation - 1, "cpu(0)");
  CHECK_THROWS(Error, f.next("cpu(0)"), "failed before");
  f.settle("cpu(0)");
  const Ticket fresh = f.next("cpu(0)");
  CHECK_EQ(fresh.number, 0);
  CHECK_EQ(fresh.generation, f.generation);
  CHECK_THROWS(Error, f.next("cpu(1)"), "failed before");
  f.settle("cpu(1)");
  f.settle("cpu(2)");
  {
    Call first([&] { f.reduce(fresh, "cpu(0)"); }), second(&f, "cpu(1)"), third(&f, "cpu(2)");
    for (Call* call : {&first, &second, &third}) CHECK_EQ(call->error(), "");
  }
  check_meets(&f, cpus(3));
  CHECK_THROWS(Error, f.reduce(stale_too, "cpu(2)", Direction::kBackward), "failed before");
  check_meets(&f, cpus(3));
}

// Whose layer is configured at the same time.
void what_a_join_throws_names_the_layer() {
  check::context = "join throws";
  Fixture f(config_of(cpus(1)));
  std::atomic<bool> done{false};
  std::thread other([&] {
    while (!done) f.all_reduce.configure(f.kNumber, config_of(cpus(1)));
  });
  Part part;
  const auto fails = [](const std::vector<Part*>&) { throw std::runtime_error("no memory"); };
  for (int i = 0; i < 50; ++i) {
    CHECK_THROWS(
        Error,
        f.all_reduce.meet(f.layer, f.next("cpu(0)"), Direction::kForward, "cpu(0)", &part, fails),
        "net0_norm7", "no memory");
    f.settle("cpu(0)");
  }
  done = true;
  other.join();
}

// Failures while devices come and go, again and again: nobody hangs, and afterwards all meet.
void layer_recovers_under_load() {
  check::context = "failures under load";
  Fixture f(config_of(cpus(4)));
  std::atomic<bool> stop{false};
  std::atomic<int> met{0}, running{4};
  std::vector<std::thread> threads;
  for (const std::string& device : cpus(4)) {
    threads.emplace_back([&, device] {
      while (!stop) {
        try {
          const Ticket ticket = f.next(device);
          f.reduce(ticket, device);
          f.reduce(ticket, device, Direction::kBackward);
          ++met;
        } catch (const Error&) {
          const std::lock_guard<std::mutex> lock(f.mutex);
          f.settle(device);
        }
      }
      --running;
    });
  }
  for (int i = 0; i < 40; ++i) {
    const int before = met;
    const Clock::time_point start = Clock::now();
    while (met < before + 8 && seconds_since(start) < kSoon) sleep(0.001);
    CHECK(met >= before + 8);
    f.all_reduce.fail(f.layer, "failure " + std::to_string(i));
  }
  stop = true;
  // Who has not seen it yet waits for those who have gone.
  while (running > 0) {
    f.all_reduce.fail(f.layer, "the end");
    sleep(0.005);
  }
  for (std::thread& thread : threads) thread.join();
  for (const std::string& device : cpus(4)) f.settle(device);
  check_meets(&f, cpus(4));
}

void closing_releases_all() {
  check::context = "close";
  Fixture f(config_of(cpus(2)));
  f.all_reduce.configure(6, config_of(cpus(2)));
  const AllReduce::LayerPtr other_layer = f.all_reduce.find(6);
  Call first(&f, "cpu(0)"), second([&] {
    const Ticket ticket = f.all_reduce.next_ticket(other_layer, "cpu(1)");
    Sums sums(1);
    double count = 1;
    f.all_reduce.reduce(other_layer, ticket, Direction::kForward, "cpu(1)", "float32", &sums,
                        &count);
  });
  f.wait_until_waiting(2);
  const Ticket drawn = f.next("cpu(1)");
  f.all_reduce.close("a reason that nobody waited to hear");
  for (Call* call : {&first, &second}) {
    CHECK(contains(call->error(), "The process ended before SyncBatchNorm 'net0_norm7', forward "));
    CHECK(contains(call->error(), "Came: cpu("));
    CHECK(call->seconds() < kSoon);
  }
  CHECK_EQ(f.all_reduce.waiting(), 0);
  CHECK_THROWS(Error, f.next("cpu(1)"), "The process ended before SyncBatchNorm");
  CHECK_THROWS(Error, f.reduce(drawn, "cpu(1)"), "The process ended before SyncBatchNorm");
  CHECK_THROWS(Error, f.all_reduce.participants(f.layer), "The process ended before SyncBatchNorm");
  f.all_reduce.fail(f.layer, "too late");

  Fixture idle(config_of(cpus(2)));
  idle.all_reduce.close("The net has gone home.");
  CHECK_THROWS(Error, idle.next("cpu(0)"), "The net has gone home.");
}

void interrupt_releases_those_who_wait_on() {
  check::context = "interrupt";
  Fixture f(config_of(cpus(2)));
  {
    // Who is met within half a second is not harmed.
    Call met(&f, "cpu(0)");
    f.wait_until_waiting(1);
    AllReduce::interrupt();
    f.call("cpu(1)");
    CHECK_EQ(met.error(), "");
  }
  {
    Call waits(&f, "cpu(0)");
    f.wait_until_waiting(1);
    const Clock::time_point start = Clock::now();
    AllReduce::interrupt();
    CHECK(contains(waits.error(), "Interrupted."));
    CHECK(contains(waits.error(), "Missing: cpu(1)."));
    CHECK(seconds_since(start) > 0.4 && seconds_since(start) < kSoon);
  }
  for (const std::string& device : cpus(2)) f.settle(device);
  // Later meetings wait as long as they need.
  Call later(&f, "cpu(0)");
  sleep(1);
  f.call("cpu(1)");
  CHECK_EQ(later.error(), "");
}

void a_step_that_is_given_up_releases_who_waits_and_who_comes() {
  check::context = "given up";
  Fixture f(config_of(cpus(2)));
  Call waiting(&f, "cpu(1)");
  f.wait_until_waiting(1);
  f.all_reduce.give_up("the step was given up");
  CHECK(contains(waiting.error(), "forward call 0: the step was given up"));
  for (const char* device : {"cpu(0)", "cpu(1)"}) f.settle(device);
  CHECK_THROWS(Error, f.call("cpu(0)"), "forward call 0: the step was given up");
  CHECK(waiting.seconds() < kSoon);
  CHECK_EQ(f.failures.size(), 2u);
  f.all_reduce.give_up("");
  for (const char* device : {"cpu(0)", "cpu(1)"}) f.settle(device);
  Call first(&f, "cpu(0)"), second(&f, "cpu(1)");
  CHECK(first.error().empty() && second.error().empty());
}

void a_misfit_is_told_in_training() {
  check::context = "misfit";
  LayerConfig config = config_of(cpus(3));
  config.misfit = "three are odd";
  Fixture f(config);
  CHECK_THROWS(Error, f.next("cpu(0)"), "three are odd");
  CHECK_EQ(f.failures.size(), 1u);
}

void calls_count_on_where_others_do() {
  check::context = "moved";
  LayerConfig config = config_of(cpus(2));
  config.processes = config.end_rank = 2;
  Fixture f(config);
  for (const char* device : {"cpu(0)", "cpu(1)", "cpu(0)"}) f.next(device);
  config.devices = {"cpu(5)"};
  f.configure(config);
  CHECK_EQ(f.next("cpu(5)").number, 2);
  config.processes = config.end_rank = 1;
  config.devices = {"cpu(6)"};
  f.configure(config);
  CHECK_EQ(f.next("cpu(6)").number, 0);
}

}  // namespace
}  // namespace gluon_syncbn

int main() {
  using namespace gluon_syncbn;
  // To hang is to fail.
  alarm(120);
  missing_device_is_told_early_and_late();
  causes_fit_the_direction_and_the_devices();
  second_arrival_is_an_error_for_all();
  channels_have_to_match();
  dtypes_have_to_match();
  failure_reaches_all_and_the_layer_recovers();
  what_a_join_throws_names_the_layer();
  layer_recovers_under_load();
  closing_releases_all();
  interrupt_releases_those_who_wait_on();
  a_step_that_is_given_up_releases_who_waits_and_who_comes();
  a_misfit_is_told_in_training();
  calls_count_on_where_others_do();
  return check::finish("all_reduce_failures");
}
