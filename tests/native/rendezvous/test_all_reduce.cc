#include <unistd.h>

#include "rendezvous/all_reduce_fixture.h"

namespace gluon_syncbn {
namespace {

// Checks one call of a device in one direction.
void check_call(AllReduce* all_reduce, const LayerPtr& layer, const CallId& id, Direction direction,
                size_t device, size_t devices, int64_t call) {
  const size_t channels = 1 + static_cast<size_t>(call) % 3;
  Sums sums = contribution(device, call, channels);
  double count = static_cast<double>(device + 1);
  const std::string name = "cpu(" + std::to_string(device) + ")";
  all_reduce->reduce(layer, id, direction, name, "float32", &sums, &count);
  CHECK(same_bits(sums, added_in_rank_order(devices, call, channels)));
  CHECK_EQ(count, static_cast<double>(devices * (devices + 1) / 2));
}

// Every device goes forward and backward through all layers, at its own pace.
void devices_synchronize_in_every_layer() {
  constexpr int kLayers = 4;
  for (const size_t devices : {2, 3, 5, 8}) {
    check::context = std::to_string(devices) + " devices";
    AllReduce all_reduce;
    std::vector<LayerPtr> layers;
    for (int layer = 0; layer < kLayers; ++layer) {
      all_reduce.configure(layer, config_of(cpus(static_cast<int>(devices))));
      layers.push_back(all_reduce.find(layer));
    }
    std::vector<std::thread> threads;
    for (size_t device = 0; device < devices; ++device) {
      threads.emplace_back([&, device] {
        Random random(device);
        const std::string name = "cpu(" + std::to_string(device) + ")";
        for (int64_t round = 0; round < static_cast<int64_t>(480 / devices); ++round) {
          CallId ids[kLayers];
          for (int i = 0; i < 2 * kLayers; ++i) {
            const bool forward = i < kLayers;
            const int layer = forward ? i : 2 * kLayers - 1 - i;
            if (forward) ids[layer] = all_reduce.next_call(layers[layer], name);
            if (random.below(8) == 0) sleep(1e-4 * random.uniform());
            check_call(&all_reduce, layers[layer], ids[layer],
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

// As in MXNet: many calls of a layer at a time, each on its own thread, in a different order on
// each device.
void calls_are_in_progress_concurrently() {
  check::context = "concurrent calls";
  constexpr size_t kDevices = 3;
  constexpr int64_t kCalls = 4;
  AllReduce all_reduce;
  for (int layer = 0; layer < 2; ++layer) all_reduce.configure(layer, config_of(cpus(kDevices)));
  Random random(1);
  for (int64_t round = 0; round < 25; ++round) {
    struct Work {
      int64_t call;
      size_t device;
      int layer_id;
      CallId id;
      Direction direction;
    };
    std::vector<Work> work;
    for (size_t device = 0; device < kDevices; ++device) {
      for (int layer_id = 0; layer_id < 2; ++layer_id) {
        const LayerPtr layer = all_reduce.find(layer_id);
        for (int64_t i = 0; i < kCalls; ++i) {
          const CallId id = all_reduce.next_call(layer, cpus(kDevices)[device]);
          CHECK_EQ(id.sequence, round * kCalls + i);
          const int64_t call = 2 * ((round * 2 + layer_id) * kCalls + i);
          work.push_back({call, device, layer_id, id, Direction::kForward});
          work.push_back({call + 1, device, layer_id, id, Direction::kBackward});
        }
      }
    }
    random.shuffle(&work);
    std::vector<std::thread> threads;
    for (const Work& w : work) {
      threads.emplace_back([&all_reduce, w] {
        check_call(&all_reduce, all_reduce.find(w.layer_id), w.id, w.direction, w.device, kDevices,
                   w.call);
      });
    }
    for (std::thread& thread : threads) thread.join();
  }
}

void one_device_needs_no_other() {
  check::context = "one device";
  Fixture f(config_of({"gpu(0)"}));
  CHECK_EQ(f.all_reduce.participants(f.layer), 1u);
  Sums sums = contribution(0, 1, 3);
  double count = 7;
  f.all_reduce.reduce(f.layer, f.next("gpu(0)"), Direction::kForward, "gpu(0)", "float32", &sums,
                      &count);
  CHECK(same_bits(sums, contribution(0, 1, 3)));
  CHECK_EQ(count, 7);
}

void num_devices_may_be_less() {
  check::context = "num_devices";
  LayerConfig config = config_of(cpus(4), 0.3);
  config.num_devices = 2;
  Fixture f(config);
  CHECK_EQ(f.all_reduce.participants(f.layer), 2u);
  for (int i = 0; i < 20; ++i) check_synchronizes(&f, {"cpu(1)", "cpu(3)"});
  Background alone(&f, "cpu(1)");
  CHECK(contains(alone.error(), "Came: cpu(1). Missing: 1 of cpu(0), cpu(2), cpu(3)."));
}

void wrong_devices_are_an_error() {
  check::context = "wrong devices";
  LayerConfig config = config_of({"gpu(0)", "gpu(1)"});
  Fixture f(config);
  CHECK_THROWS(Error, f.call("gpu(2)"), "net0_norm7", "gpu(2)", "2 (gpu(0), gpu(1))", "SyncGroup");
  config.num_devices = 3;
  f.configure(config);
  CHECK_THROWS(Error, f.call("gpu(0)"), "net0_norm7", "num_devices=3", "2 (gpu(0), gpu(1))",
               "Leave num_devices out");
}

void groups_synchronize_separately() {
  check::context = "group_size";
  LayerConfig config = config_of(cpus(6), 0.3);
  config.group_size = 2;
  Fixture f(config);
  CHECK_EQ(f.all_reduce.participants(f.layer), 2u);
  for (int i = 0; i < 20; ++i) {
    check_synchronizes(&f, {"cpu(2)", "cpu(3)"});
    check_synchronizes(&f, {"cpu(1)", "cpu(5)", "cpu(0)", "cpu(4)"});
  }
  Background alone(&f, "cpu(4)");
  CHECK(contains(alone.error(), "Came: cpu(4). Missing: cpu(5)."));
}

void missing_layer_is_an_error() {
  check::context = "no layer";
  Fixture f(config_of(cpus(2)));
  const LayerPtr none = f.all_reduce.find(6);
  CHECK(none == nullptr);
  Sums sums(1);
  double count = 1;
  const char* const remedy = "build the net again";
  CHECK_THROWS(Error, f.all_reduce.next_call(none, "cpu(0)"), "does not exist", remedy);
  CHECK_THROWS(Error, f.all_reduce.participants(none), "does not exist", remedy);
  CHECK_THROWS(
      Error, f.all_reduce.reduce(none, {}, Direction::kForward, "cpu(0)", "float32", &sums, &count),
      "does not exist", remedy);
  f.all_reduce.fail(none, "there is no layer");
  f.all_reduce.drain(6, 1, "cpu(0)");
  f.all_reduce.forget(6);
  CHECK(f.failures.empty());
}

void devices_may_change() {
  check::context = "other devices";
  Fixture f(config_of(cpus(2)));
  check_synchronizes(&f, cpus(2));
  // With the same devices, the step continues.
  const CallId kept = f.next("cpu(0)");
  f.configure(config_of(cpus(2), kLong + 1));
  {
    Background first([&] { f.reduce(kept, "cpu(0)"); }), second(&f, "cpu(1)");
    CHECK_EQ(first.error() + second.error(), "");
  }
  const CallId stale = f.next("cpu(0)");
  f.all_reduce.fail(f.layer, "an earlier step");
  const LayerPtr layer = f.layer;
  f.configure(config_of({"cpu(2)", "cpu(0)", "cpu(1)"}));
  CHECK(f.layer == layer);
  CHECK_THROWS(Error, f.reduce(stale, "cpu(0)"),
               "changed from cpu(0), cpu(1) to cpu(2), cpu(0), cpu(1)");
  for (int i = 0; i < 10; ++i) check_synchronizes(&f, cpus(3));
  f.configure(config_of({"cpu(2)"}));
  check_synchronizes(&f, {"cpu(2)"});
  CHECK_THROWS(Error, f.call("cpu(0)"), "its devices are 1 (cpu(2))");

  f.configure(config_of(cpus(2)));
  Background waits(&f, "cpu(0)");
  f.wait_until_waiting(1);
  f.configure(config_of(cpus(3)));
  CHECK(contains(waits.error(), "were changed"));
}

void calls_outlive_the_registration() {
  check::context = "forget";
  Fixture f(config_of(cpus(2)));
  {
    const LayerPtr held = f.layer;
    f.layer = nullptr;
    const CallId id = f.all_reduce.next_call(held, "cpu(0)");
    const CallId other_id = f.all_reduce.next_call(held, "cpu(1)");
    const auto reduce = [&](const CallId& call, const std::string& device) {
      Sums sums(1);
      double count = 1;
      f.all_reduce.reduce(held, call, Direction::kForward, device, "float32", &sums, &count);
      CHECK_EQ(count, 2);
    };
    Background waits([&] { reduce(id, "cpu(0)"); });
    f.wait_until_waiting(1);
    f.all_reduce.forget(f.kLayer);
    reduce(other_id, "cpu(1)");
    CHECK_EQ(waits.error(), "");
  }
  CHECK(f.all_reduce.find(f.kLayer) == nullptr);
  // The sequence starts again.
  f.configure(config_of(cpus(2)));
  CHECK_EQ(f.next("cpu(0)").sequence, 0);
}

}  // namespace
}  // namespace gluon_syncbn

int main() {
  using namespace gluon_syncbn;
  // A test that hangs fails.
  alarm(120);
  devices_synchronize_in_every_layer();
  calls_are_in_progress_concurrently();
  one_device_needs_no_other();
  num_devices_may_be_less();
  wrong_devices_are_an_error();
  groups_synchronize_separately();
  missing_layer_is_an_error();
  devices_may_change();
  calls_outlive_the_registration();
  return check::finish("all_reduce");
}
