#include <unistd.h>

#include "rendezvous/rendezvous_fixture.h"

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

TEST(devices_may_change) {
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
  const LayerPtr layer = f.layer;
  f.configure(config_of({"cpu(2)", "cpu(0)", "cpu(1)"}));
  CHECK(f.layer == layer);
  CHECK_THROWS(Error, f.reduce(stale, "cpu(0)", Direction::kBackward), "before its devices changed",
               "they are cpu(2), cpu(0), cpu(1)");
  f.rendezvous.recover();
  for (int i = 0; i < 10; ++i) check_synchronizes(&f, cpus(3));
  f.configure(config_of({"cpu(2)"}));
  check_synchronizes(&f, {"cpu(2)"});
  CHECK_THROWS(Error, f.call("cpu(0)"), "its devices are 1 (cpu(2))");
  f.rendezvous.recover();

  f.configure(config_of(cpus(2)));
  Background waits(&f, "cpu(0)");
  f.wait_until_waiting(1);
  f.configure(config_of(cpus(3)));
  CHECK(contains(waits.error(), "were changed from cpu(0), cpu(1) to cpu(0), cpu(1), cpu(2)"));
  CHECK(waits.seconds() < kSoon);
  CHECK_EQ(f.rendezvous.failure(), waits.error());
  f.rendezvous.recover();
  check_synchronizes(&f, cpus(3));
}

TEST(calls_outlive_the_registration) {
  Fixture f(config_of(cpus(2)));
  {
    const LayerPtr held = f.layer;
    f.layer = nullptr;
    const CallId id = f.rendezvous.next_call(held, "cpu(0)");
    const CallId other_id = f.rendezvous.next_call(held, "cpu(1)");
    const auto reduce = [&](const CallId& call, const std::string& device) {
      const PassSums own = on_host(Sums(1), 1);
      CHECK_EQ(f.rendezvous.reduce(held, call, Direction::kForward, device, "float32", own).count,
               2);
    };
    Background waits([&] { reduce(id, "cpu(0)"); });
    f.wait_until_waiting(1);
    f.rendezvous.forget(f.kLayer);
    reduce(other_id, "cpu(1)");
    CHECK_EQ(waits.error(), "");
  }
  CHECK(f.rendezvous.find(f.kLayer) == nullptr);
  // The sequence starts again.
  f.configure(config_of(cpus(2)));
  CHECK_EQ(f.next("cpu(0)").sequence, 0);
}

}  // namespace
}  // namespace gluon_syncbn

int main() { return check::run_all("rendezvous", 120); }
