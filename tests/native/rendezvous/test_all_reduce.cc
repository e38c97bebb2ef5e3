#include <unistd.h>

#include <condition_variable>
#include <cstring>
#include <map>

#include "reference.h"
#include "rendezvous/all_reduce_fixture.h"

namespace gluon_syncbn {
namespace {

// The contribution of a device: different values in each call, for which a plain sum would depend
// on the order.
Sums contribution(size_t device, int64_t call, size_t channels) {
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
    const Sums part = contribution(device, call, channels);
    for (size_t c = 0; c < channels; ++c) sums[c].add(part[c]);
  }
  return sums;
}

bool same_bits(const Sums& a, const Sums& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(a[0])) == 0;
}

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

// One of three processes with two devices each. The exchange simulates the others.
struct Exchange {
  static constexpr size_t kProcesses = 3;
  Fixture fixture;
  std::mutex mutex;
  std::vector<Message> messages;
  std::string error;
  double sequence_of_others = -1;

  Exchange(size_t first_rank, size_t end_rank) : fixture(config(first_rank, end_rank)) {
    Observer observer;
    observer.exchange = [this](const Message& message, std::vector<double>* all) {
      const std::lock_guard<std::mutex> lock(mutex);
      messages.push_back(message);
      for (size_t rank = 0; rank < kProcesses; ++rank) {
        std::vector<double> values = message.values;
        if (rank != 1 && sequence_of_others >= 0) values[0] = sequence_of_others;
        values[1] = static_cast<double>(10 * rank);  // the count
        for (size_t i = 2; i < values.size(); ++i) values[i] = values[i] * (1 << rank);
        std::copy(values.begin(), values.end(), all->begin() + rank * values.size());
      }
      return error;
    };
    fixture.all_reduce.observe(observer);
  }

  static LayerConfig config(size_t first_rank, size_t end_rank) {
    LayerConfig config = config_of(cpus(2));
    config.processes = kProcesses;
    config.first_rank = first_rank;
    config.end_rank = end_rank;
    return config;
  }

  // The sums of each device; `texts` receives the errors.
  std::vector<Sums> call(Direction direction, const std::vector<CallId>& ids, double* count,
                         std::vector<std::string>* texts) {
    std::vector<Sums> sums{contribution(0, 1, 3), contribution(1, 1, 3)};
    std::vector<double> counts{4, 5};
    std::vector<std::unique_ptr<Background>> calls;
    for (size_t d = 0; d < 2; ++d) {
      calls.emplace_back(new Background([&, d] {
        fixture.all_reduce.reduce(fixture.layer, ids[d], direction, cpus(2)[d], "float32", &sums[d],
                                  &counts[d]);
      }));
    }
    for (const auto& call : calls) texts->push_back(call->error());
    if (error.empty() && sequence_of_others < 0) {
      CHECK_EQ(counts[0], counts[1]);
    }
    *count = counts[0];
    return sums;
  }

  std::vector<CallId> ids() { return {fixture.next("cpu(0)"), fixture.next("cpu(1)")}; }
};

void processes_exchange_their_sums_once() {
  check::context = "processes";
  Exchange e(1, 3);
  for (const Direction direction : {Direction::kForward, Direction::kBackward}) {
    const std::vector<CallId> ids = e.ids();
    std::vector<std::string> texts;
    double count = 0;
    const std::vector<Sums> sums = e.call(direction, ids, &count, &texts);
    CHECK_EQ(texts[0] + texts[1], "");
    // Ranks 1 and 2 contribute twice and four times the sums of this process.
    Sums mine = added_in_rank_order(2, 1, 3), expected(3);
    for (const int factor : {2, 4}) {
      for (size_t c = 0; c < mine.size(); ++c) {
        const auto scaled = [&](const Sum3& s) {
          return Sum3{s.high * factor, s.middle * factor, s.low * factor};
        };
        expected[c].add({scaled(mine[c].first), scaled(mine[c].second)});
      }
    }
    CHECK(same_bits(sums[0], expected) && same_bits(sums[1], expected));
    CHECK_EQ(count, 30);
  }
  CHECK_EQ(e.messages.size(), 2u);
  CHECK_EQ(e.messages[0].key, "5 forward 0");
  CHECK_EQ(e.messages[1].key, "5 backward 0");
  CHECK_EQ(e.messages[0].values.size(), 2u + 6 * 3);
  CHECK_EQ(e.messages[0].values[1], 9);
  CHECK_EQ(e.messages[1].values[0], 1);
}

void sums_of_the_store_are_taken_as_they_are() {
  check::context = "sums";
  Exchange e(0, 3);
  Observer observer;
  observer.exchange = [](const Message& message, std::vector<double>* all) {
    *all = message.values;
    for (double& value : *all) value *= 2;
    return std::string();
  };
  e.fixture.all_reduce.observe(observer);
  for (const Direction direction : {Direction::kForward, Direction::kBackward}) {
    std::vector<std::string> texts;
    double count = 0;
    const std::vector<Sums> sums = e.call(direction, e.ids(), &count, &texts);
    CHECK_EQ(texts[0] + texts[1], "");
    CHECK_EQ(count, 18);
    Sums expected = added_in_rank_order(2, 1, 3);
    for (ChannelSums& both : expected) {
      for (Sum3* sum : {&both.first, &both.second}) {
        for (double* part : {&sum->high, &sum->middle, &sum->low}) *part *= 2;
      }
    }
    CHECK(same_bits(sums[0], expected) && same_bits(sums[1], expected));
  }
}

void a_joined_process_contributes_zeros() {
  check::context = "joined";
  Exchange e(0, 3);
  Fixture alone(config_of(cpus(2)));
  for (AllReduce* const all_reduce : {&e.fixture.all_reduce, &alone.all_reduce}) {
    CHECK(all_reduce->has_data(nullptr));
    all_reduce->set_joined(true);
    CHECK(!all_reduce->has_data(nullptr));
  }
  // Other processes may still have data.
  CHECK(e.fixture.all_reduce.has_data(e.fixture.layer));
  CHECK(!alone.all_reduce.has_data(alone.layer));
  std::vector<std::string> texts;
  double count = 0;
  e.call(Direction::kForward, e.ids(), &count, &texts);
  CHECK_EQ(texts[0] + texts[1], "");
  const std::vector<double>& sent = e.messages[0].values;
  CHECK(std::all_of(sent.begin(), sent.end(), [](double value) { return value == 0; }));
}

void a_failed_exchange_is_everyones_error() {
  check::context = "failed exchange";
  Exchange e(0, 3);
  std::vector<std::string> texts;
  double count = 0;
  e.error = "rank 2 is gone";
  e.call(Direction::kForward, e.ids(), &count, &texts);
  CHECK_EQ(texts[0], e.error);
  CHECK_EQ(texts[1], e.error);

  Exchange other(0, 3);
  texts.clear();
  other.sequence_of_others = 7;
  other.call(Direction::kForward, other.ids(), &count, &texts);
  CHECK(contains(texts[0], "rank 0 is at its call 7") && texts[0] == texts[1]);
}

// Two processes with one device each, whose exchange waits for both.
struct Pair {
  static constexpr size_t kProcesses = 2;
  struct Round {
    // What was sent, by rank, and how many processes have fetched it.
    std::map<size_t, std::vector<double>> sent;
    size_t fetched = 0;
  };

  std::vector<std::unique_ptr<Fixture>> processes;
  std::vector<std::string> warnings;
  std::set<std::string> keys;
  std::mutex mutex, turns[kProcesses];
  std::condition_variable changed;
  Round round;

  explicit Pair(double timeout = kLong) {
    for (size_t rank = 0; rank < kProcesses; ++rank) {
      LayerConfig config = config_of(cpus(1), timeout);
      config.processes = config.end_rank = kProcesses;
      processes.emplace_back(new Fixture(config));
      Observer observer;
      observer.warn = [this](const std::string& text) {
        const std::lock_guard<std::mutex> lock(mutex);
        warnings.push_back(text);
      };
      observer.exchange = [this, rank](const Message& message, std::vector<double>* all) {
        // One message per key at a time. This test has one key.
        const std::lock_guard<std::mutex> turn(turns[rank]);
        std::unique_lock<std::mutex> lock(mutex);
        keys.insert(message.key);
        round.sent[rank] = message.values;
        changed.notify_all();
        changed.wait(lock, [&] { return round.sent.size() == kProcesses; });
        all->clear();
        for (const auto& part : round.sent) {
          all->insert(all->end(), part.second.begin(), part.second.end());
        }
        if (++round.fetched == kProcesses) round = Round();
        changed.notify_all();
        changed.wait(lock, [&] { return round.sent.count(rank) == 0; });
        return std::string();
      };
      processes.back()->all_reduce.observe(observer);
    }
  }

  // Returns the total count. A process contributes the sequence of its call plus 100 times its
  // rank.
  double backward(size_t rank, const CallId& id) {
    Sums sums(1);
    double count = static_cast<double>(id.sequence) + 100.0 * static_cast<double>(rank);
    processes[rank]->all_reduce.reduce(processes[rank]->layer, id, Direction::kBackward, "cpu(0)",
                                       "float32", &sums, &count);
    return count;
  }
};

// All calls use one key, even if each process goes backward in a different order.
void backward_calls_come_in_any_order() {
  check::context = "orders";
  const std::vector<std::vector<size_t>> orders{{0, 1, 2}, {2, 1, 0}, {1, 2, 0}, {0, 2, 1}};
  for (const std::vector<size_t>& order : orders) {
    Pair pair;
    for (int step = 0; step < 3; ++step) {
      std::vector<std::unique_ptr<Background>> calls;
      std::vector<CallId> ids[2];
      for (size_t rank = 0; rank < 2; ++rank) {
        // A call that never goes backward, as in an evaluation in training mode.
        pair.processes[rank]->next("cpu(0)");
        for (int i = 0; i < 3; ++i) ids[rank].push_back(pair.processes[rank]->next("cpu(0)"));
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
    CHECK_EQ(pair.keys.size(), 1u);
    CHECK_EQ(*pair.keys.begin(), "5 backward 0");
    CHECK(pair.warnings.empty());
  }
}

void a_backward_call_that_another_process_leaves_out_is_an_error() {
  check::context = "left out";
  Pair pair(1);
  std::vector<CallId> ids[2];
  for (size_t rank = 0; rank < 2; ++rank) {
    for (int i = 0; i < 2; ++i) ids[rank].push_back(pair.processes[rank]->next("cpu(0)"));
  }
  Background first([&] { pair.backward(0, ids[0][0]); });
  Background second([&] { pair.backward(1, ids[1][1]); });
  for (Background* call : {&first, &second}) {
    CHECK(contains(call->error(), "for all of 2 processes to go backward through this call."));
    CHECK(call->seconds() > 0.9 && call->seconds() < kSoon);
  }
  CHECK(contains(first.error(), "backward call 0") && contains(first.error(), "Came: ranks 0;"));
  CHECK(contains(second.error(), "backward call 1") && contains(second.error(), "Came: ranks 1;"));
  CHECK_EQ(pair.warnings.size(), 2u);
  CHECK(contains(pair.warnings[0], "After 1 s this is an error."));
}

// By a failure of another call of the layer, or the end of the process.
void waits_for_a_backward_call_are_released() {
  check::context = "released";
  for (const bool closes : {false, true}) {
    Pair pair;
    std::vector<CallId> ids[2];
    for (size_t rank = 0; rank < 2; ++rank) {
      for (int i = 0; i < 2; ++i) ids[rank].push_back(pair.processes[rank]->next("cpu(0)"));
    }
    Background first([&] { pair.backward(0, ids[0][0]); });
    Background second([&] { pair.backward(1, ids[1][1]); });
    sleep(0.2);
    for (const auto& process : pair.processes) {
      if (closes) {
        process->all_reduce.close("the end");
      } else {
        process->all_reduce.fail(process->layer, "it fails");
      }
    }
    for (Background* call : {&first, &second}) {
      CHECK(contains(call->error(), closes ? "the end" : "it fails"));
      CHECK(call->seconds() < kSoon);
    }
  }
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
  processes_exchange_their_sums_once();
  a_joined_process_contributes_zeros();
  sums_of_the_store_are_taken_as_they_are();
  a_failed_exchange_is_everyones_error();
  backward_calls_come_in_any_order();
  a_backward_call_that_another_process_leaves_out_is_an_error();
  waits_for_a_backward_call_are_released();
  missing_layer_is_an_error();
  devices_may_change();
  calls_outlive_the_registration();
  return check::finish("all_reduce");
}
