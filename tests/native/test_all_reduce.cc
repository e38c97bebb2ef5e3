#include <unistd.h>

#include <cstring>

#include "all_reduce.h"
#include "all_reduce_fixture.h"
#include "reference.h"

namespace gluon_syncbn {
namespace {

// What a device brings: other numbers in each call, of which the order would show in a plain sum.
Sums brought(size_t device, int64_t call, size_t channels) {
  Random random(static_cast<uint64_t>(call) * 64 + device);
  Sums sums(channels);
  for (ChannelSums& s : sums) {
    s.first.add(random.sign() * 1e17);
    s.first.add(random.normal());
    s.second.add_product(1e10 + random.normal(), 1e10 + random.normal());
  }
  return sums;
}

Sums added_in_rank_order(size_t devices, int64_t call, size_t channels) {
  Sums sums(channels);
  for (size_t device = 0; device < devices; ++device) {
    const Sums part = brought(device, call, channels);
    for (size_t c = 0; c < channels; ++c) sums[c].add(part[c]);
  }
  return sums;
}

bool same_bits(const Sums& a, const Sums& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(a[0])) == 0;
}

// One call of a device in one direction, which meets its like of the others.
void check_call(AllReduce* all_reduce, const AllReduce::LayerPtr& layer, const Ticket& ticket,
                Direction direction, size_t device, size_t devices, int64_t call) {
  const size_t channels = 1 + static_cast<size_t>(call) % 3;
  Sums sums = brought(device, call, channels);
  double count = static_cast<double>(device + 1);
  const std::string name = "cpu(" + std::to_string(device) + ")";
  all_reduce->reduce(layer, ticket, direction, name, &sums, &count);
  CHECK(same_bits(sums, added_in_rank_order(devices, call, channels)));
  CHECK_EQ(count, static_cast<double>(devices * (devices + 1) / 2));
}

// Every device goes forward through all layers and backward again, at its own pace.
void devices_meet_in_every_layer() {
  constexpr int kLayers = 4;
  for (const size_t devices : {2, 3, 5, 8}) {
    check::context = std::to_string(devices) + " devices";
    AllReduce all_reduce;
    std::vector<AllReduce::LayerPtr> layers;
    for (int number = 0; number < kLayers; ++number) {
      all_reduce.configure(number, config_of(cpus(static_cast<int>(devices))));
      layers.push_back(all_reduce.find(number));
    }
    std::vector<std::thread> threads;
    for (size_t device = 0; device < devices; ++device) {
      threads.emplace_back([&, device] {
        Random random(device);
        const std::string name = "cpu(" + std::to_string(device) + ")";
        for (int64_t round = 0; round < static_cast<int64_t>(480 / devices); ++round) {
          Ticket tickets[kLayers];
          for (int i = 0; i < 2 * kLayers; ++i) {
            const bool forward = i < kLayers;
            const int number = forward ? i : 2 * kLayers - 1 - i;
            if (forward) tickets[number] = all_reduce.next_ticket(layers[number], name);
            if (random.below(8) == 0) sleep(1e-4 * random.uniform());
            check_call(&all_reduce, layers[number], tickets[number],
                       forward ? Direction::kForward : Direction::kBackward, device, devices,
                       round * 2 * kLayers + i);
          }
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    CHECK_EQ(all_reduce.waiting(), 0);
  }
}

// As MXNet runs them: each call on a thread of its own, many calls of a layer at a time, in another
// order on each device.
void meetings_are_open_side_by_side() {
  check::context = "side by side";
  constexpr size_t kDevices = 3;
  constexpr int64_t kCalls = 4;
  AllReduce all_reduce;
  for (int number = 0; number < 2; ++number)
    all_reduce.configure(number, config_of(cpus(kDevices)));
  Random random(1);
  for (int64_t round = 0; round < 25; ++round) {
    struct Work {
      int64_t call;
      size_t device;
      int number;
      Ticket ticket;
      Direction direction;
    };
    std::vector<Work> work;
    for (size_t device = 0; device < kDevices; ++device) {
      for (int number = 0; number < 2; ++number) {
        const AllReduce::LayerPtr layer = all_reduce.find(number);
        for (int64_t i = 0; i < kCalls; ++i) {
          const Ticket ticket = all_reduce.next_ticket(layer, cpus(kDevices)[device]);
          CHECK_EQ(ticket.number, round * kCalls + i);
          const int64_t call = 2 * ((round * 2 + number) * kCalls + i);
          work.push_back({call, device, number, ticket, Direction::kForward});
          work.push_back({call + 1, device, number, ticket, Direction::kBackward});
        }
      }
    }
    random.shuffle(&work);
    std::vector<std::thread> threads;
    for (const Work& w : work) {
      threads.emplace_back([&all_reduce, w] {
        check_call(&all_reduce, all_reduce.find(w.number), w.ticket, w.direction, w.device,
                   kDevices, w.call);
      });
    }
    for (std::thread& thread : threads) thread.join();
  }
}

void one_device_meets_itself() {
  check::context = "one device";
  Fixture f(config_of({"gpu(0)"}));
  CHECK_EQ(f.all_reduce.participants(f.layer), 1u);
  Sums sums = brought(0, 1, 3);
  double count = 7;
  f.all_reduce.reduce(f.layer, f.next("gpu(0)"), Direction::kForward, "gpu(0)", &sums, &count);
  CHECK(same_bits(sums, brought(0, 1, 3)));
  CHECK_EQ(count, 7);
}

void num_devices_may_be_less() {
  check::context = "num_devices";
  LayerConfig config = config_of(cpus(4), 0.3);
  config.num_devices = 2;
  Fixture f(config);
  CHECK_EQ(f.all_reduce.participants(f.layer), 2u);
  for (int i = 0; i < 20; ++i) check_meets(&f, {"cpu(1)", "cpu(3)"});
  Call alone(&f, "cpu(1)");
  CHECK(contains(alone.error(), "Came: cpu(1). Missing: 1 of cpu(0), cpu(2), cpu(3)."));
}

void devices_have_to_fit() {
  check::context = "wrong devices";
  LayerConfig config = config_of({"gpu(0)", "gpu(1)"});
  Fixture f(config);
  CHECK_THROWS(Error, f.call("gpu(2)"), "net0_norm7", "gpu(2)", "2 (gpu(0), gpu(1))", "SyncGroup");
  config.num_devices = 3;
  f.configure(config);
  CHECK_THROWS(Error, f.call("gpu(0)"), "net0_norm7", "num_devices=3", "2 (gpu(0), gpu(1))",
               "Leave num_devices out");
}

void missing_layer_is_an_error() {
  check::context = "no layer";
  Fixture f(config_of(cpus(2)));
  const AllReduce::LayerPtr none = f.all_reduce.find(6);
  CHECK(none == nullptr);
  Sums sums(1);
  double count = 1;
  const char* const remedy = "build the net again";
  CHECK_THROWS(Error, f.all_reduce.next_ticket(none, "cpu(0)"), "does not exist", remedy);
  CHECK_THROWS(Error, f.all_reduce.participants(none), "does not exist", remedy);
  CHECK_THROWS(Error, f.all_reduce.reduce(none, {}, Direction::kForward, "cpu(0)", &sums, &count),
               "does not exist", remedy);
  f.all_reduce.fail(none, "nobody is there");
  f.all_reduce.settle(6, 1, "cpu(0)");
  f.all_reduce.forget(6);
  CHECK(f.failures.empty());
}

void devices_may_change() {
  check::context = "other devices";
  Fixture f(config_of(cpus(2)));
  check_meets(&f, cpus(2));
  // The same devices: the step goes on.
  const Ticket kept = f.next("cpu(0)");
  f.configure(config_of(cpus(2), kLong + 1));
  {
    Call first([&] { f.reduce(kept, "cpu(0)"); }), second(&f, "cpu(1)");
    CHECK_EQ(first.error() + second.error(), "");
  }
  const Ticket stale = f.next("cpu(0)");
  f.all_reduce.fail(f.layer, "a step of before");
  const AllReduce::LayerPtr layer = f.layer;
  f.configure(config_of({"cpu(2)", "cpu(0)", "cpu(1)"}));
  CHECK(f.layer == layer);
  CHECK_THROWS(Error, f.reduce(stale, "cpu(0)"),
               "changed from cpu(0), cpu(1) to cpu(2), cpu(0), cpu(1)");
  for (int i = 0; i < 10; ++i) check_meets(&f, cpus(3));
  f.configure(config_of({"cpu(2)"}));
  check_meets(&f, {"cpu(2)"});
  CHECK_THROWS(Error, f.call("cpu(0)"), "its devices are 1 (cpu(2))");

  f.configure(config_of(cpus(2)));
  Call waits(&f, "cpu(0)");
  f.wait_until_waiting(1);
  f.configure(config_of(cpus(3)));
  CHECK(contains(waits.error(), "were changed"));
}

void calls_outlive_the_registration() {
  check::context = "forget";
  Fixture f(config_of(cpus(2)));
  {
    const AllReduce::LayerPtr held = f.layer;
    f.layer = nullptr;
    const Ticket ticket = f.all_reduce.next_ticket(held, "cpu(0)");
    const Ticket ticket_too = f.all_reduce.next_ticket(held, "cpu(1)");
    const auto reduce = [&](const Ticket& t, const std::string& device) {
      Sums sums(1);
      double count = 1;
      f.all_reduce.reduce(held, t, Direction::kForward, device, &sums, &count);
      CHECK_EQ(count, 2);
    };
    Call waits([&] { reduce(ticket, "cpu(0)"); });
    f.wait_until_waiting(1);
    f.all_reduce.forget(f.kNumber);
    reduce(ticket_too, "cpu(1)");
    CHECK_EQ(waits.error(), "");
  }
  CHECK(f.all_reduce.find(f.kNumber) == nullptr);
  // The number begins anew.
  f.configure(config_of(cpus(2)));
  CHECK_EQ(f.next("cpu(0)").number, 0);
}

}  // namespace
}  // namespace gluon_syncbn

int main() {
  using namespace gluon_syncbn;
  // To hang is to fail.
  alarm(120);
  devices_meet_in_every_layer();
  meetings_are_open_side_by_side();
  one_device_meets_itself();
  num_devices_may_be_less();
  devices_have_to_fit();
  missing_layer_is_an_error();
  devices_may_change();
  calls_outlive_the_registration();
  return check::finish("all_reduce");
}
