#include <atomic>
#include <cstdlib>
#include <stdexcept>

#include "rendezvous/rendezvous_fixture.h"
#include "threads/waits.h"

namespace gluon_syncbn {
namespace {

// Checks one call of a device in one direction.
void check_call(Rendezvous* rendezvous, const LayerPtr& layer, const CallId& id,
                Direction direction, size_t device, size_t devices, int64_t call) {
  const size_t channels = 1 + static_cast<size_t>(call) % 3;
  const PassSums own =
      on_host(contribution(device, call, channels), static_cast<double>(device + 1));
  const std::string name = "cpu(" + std::to_string(device) + ")";
  const PassSums all = rendezvous->reduce(layer, id, direction, name, "float32", own);
  CHECK(same_bits(all.on_host, added_in_rank_order(devices, call, channels)));
  CHECK_EQ(all.count, static_cast<double>(devices * (devices + 1) / 2));
}

// As in MXNet: many calls of a layer at a time, each on its own thread, in a different order on
// each device.
TEST(calls_are_in_progress_concurrently) {
  constexpr int64_t kCalls = 4;
  for (const size_t devices : {2, 3, 5, 8}) {
    check::context = std::to_string(devices) + " devices";
    const std::vector<std::string> names = cpus(static_cast<int>(devices));
    Rendezvous rendezvous;
    for (int layer = 0; layer < 2; ++layer) rendezvous.configure(layer, config_of(names));
    Random random(1);
    for (int64_t round = 0; round < static_cast<int64_t>(60 / devices); ++round) {
      struct Work {
        int64_t call;
        size_t device;
        LayerPtr layer;
        CallId id;
        Direction direction;
      };
      std::vector<Work> work;
      for (size_t device = 0; device < devices; ++device) {
        for (int layer_id = 0; layer_id < 2; ++layer_id) {
          const LayerPtr layer = rendezvous.find(layer_id);
          for (int64_t i = 0; i < kCalls; ++i) {
            const CallId id = rendezvous.next_call(layer, names[device]);
            CHECK_EQ(id.sequence, round * kCalls + i);
            const int64_t call = 2 * ((round * 2 + layer_id) * kCalls + i);
            work.push_back({call, device, layer, id, Direction::kForward});
            work.push_back({call + 1, device, layer, id, Direction::kBackward});
          }
        }
      }
      random.shuffle(&work);
      in_threads(static_cast<int>(work.size()), [&](int i) {
        const Work& w = work[static_cast<size_t>(i)];
        check_call(&rendezvous, w.layer, w.id, w.direction, w.device, devices, w.call);
      });
    }
    CHECK_EQ(rendezvous.waiting(), 0);
  }
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

// The end of a script waits for devices that still arrive.
TEST(a_probe_that_ends_is_no_arrival) {
  Fixture f(config_of(cpus(2)));
  CHECK_EQ(f.rendezvous.stuck_seconds(), 0);
  Background waits(&f, "cpu(0)");
  f.wait_until_waiting(1);
  sleep(0.2);
  f.rendezvous.answer(f.rendezvous.ask(f.kLayer, "cpu(1)", Calls::Of::kAll), false);
  CHECK(f.rendezvous.stuck_seconds() > 0.19);
  f.call("cpu(1)");
  CHECK_EQ(waits.error(), "");
  CHECK_EQ(f.rendezvous.stuck_seconds(), 0);
}

TEST(a_layer_that_was_forgotten_begins_again) {
  Fixture f(config_of(cpus(2)));
  CHECK_EQ(f.next("cpu(0)").sequence, 0);
  CHECK_EQ(f.next("cpu(0)").sequence, 1);
  f.layer = nullptr;
  f.rendezvous.forget(f.kLayer);
  CHECK(f.rendezvous.find(f.kLayer) == nullptr);
  f.configure(config_of(cpus(2)));
  CHECK_EQ(f.next("cpu(0)").sequence, 0);
}

}  // namespace
}  // namespace gluon_syncbn

int main() { return check::run_all("rendezvous", 120); }
