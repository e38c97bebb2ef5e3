// Random steps, random faults, and all that must hold then.
#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdlib>
#include <set>

#include "rendezvous/rendezvous_fixture.h"

namespace gluon_syncbn {
namespace {

// A step of some layers, whose devices call them in the same order, forward and then backward. From
// some moment on MXNet skips a device's calls, Python leaves them out, or the forward calls whose
// backward is to come have gone; or a call fails by itself, or the data does not fit. Behind the
// calls of each layer on each device there are probes, and Python settles them, with or without a
// reason to give the step up. Without, it makes the calls that it left out then. At last Python
// raises the error, and the next step is as if nothing had been.
class RandomSteps {
 public:
  explicit RandomSteps(uint64_t seed)
      : seed_(seed),
        random_(seed),
        layers_(pick(1, 3)),
        names_(cpus(static_cast<int>(pick(2, 4)))) {
    for (int64_t layer = 0; layer < layers_; ++layer) {
      rendezvous_.configure(layer, config_of(names_));
    }
    for (int step = 0; step < 4; ++step) {
      run(step % 2 == 0 ? 0 : pick(1, 2));
      rendezvous_.recover();
    }
  }

 private:
  enum Fault { kNone, kSkipped, kLeftOut, kGone, kFails, kDoesNotFit, kFaults };

  int64_t pick(int64_t from, int64_t to) {
    return from + static_cast<int64_t>(random_.uniform() * static_cast<double>(to - from + 1));
  }

  // What happens to a device, and at which of its calls, counted through forward and backward.
  struct Device {
    std::string name;
    Fault fault = kNone;
    int64_t moment = 0;
    std::vector<CallId> ids;
    // By layer, two probes each.
    std::vector<Calls::Ticket> probes;
  };

  struct Turn {
    int64_t call;
    LayerPtr layer;
    Direction direction;
  };
  // Backward calls come in the opposite order.
  Turn turn(int64_t i) const {
    const bool is_forward = i < calls_;
    const int64_t call = is_forward ? i : 2 * calls_ - 1 - i;
    return {call, rendezvous_.find(call % layers_),
            is_forward ? Direction::kForward : Direction::kBackward};
  }

  // Makes a call.
  void call(Device* device, size_t rank, int64_t i) {
    const auto [call, layer, direction] = turn(i);
    CallId& id = device->ids[static_cast<size_t>(call)];
    const bool is_now = device->moment == i;
    try {
      if (direction == Direction::kForward) id = rendezvous_.next_call(layer, device->name);
      if (is_now && device->fault == kFails) {
        const std::string text = "it fails on " + device->name;
        rendezvous_.fail(layer, text);
        throw Error(text);
      }
      const size_t channels = is_now && device->fault == kDoesNotFit ? 3 + rank : 2;
      const PassSums all = rendezvous_.reduce(layer, id, direction, device->name, "float32",
                                              on_host(contribution(rank, i, channels), 1));
      wrong_ += !same_bits(all.on_host, added_in_rank_order(names_.size(), i, 2));
      if (direction == Direction::kBackward) rendezvous_.drop(layer, id, device->name);
    } catch (const Error&) {
      ++ended_;
    }
  }

  // All calls of a device, on its thread.
  void calls_of(Device* device, size_t rank) {
    int64_t i = 0;
    for (; i < 2 * calls_ && i != stop_of(*device); ++i) call(device, rank, i);
    if (device->fault == kGone) {
      for (int64_t j = i; j < 2 * calls_; ++j) {
        const auto [call, layer, direction] = turn(j);
        rendezvous_.drop(layer, device->ids[static_cast<size_t>(call)], device->name);
      }
    }
    for (int64_t layer = 0; layer < layers_; ++layer) {
      bool is_skipped = false;
      for (int64_t j = i; j < 2 * calls_ && device->fault == kSkipped; ++j) {
        is_skipped = is_skipped || turn(j).call % layers_ == layer;
      }
      const auto probe = static_cast<size_t>(2 * layer);
      for (const size_t one : {probe, probe + 1})
        rendezvous_.answer(device->probes[one], is_skipped);
    }
    if (device->fault != kLeftOut || gives_up_) return;
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [&] { return has_settled_; });
    lock.unlock();
    for (; i < 2 * calls_; ++i) call(device, rank, i);
  }

  // At which call it stops; -1: at none.
  static int64_t stop_of(const Device& device) {
    const bool stops =
        device.fault == kSkipped || device.fault == kLeftOut || device.fault == kGone;
    return stops ? device.moment : -1;
  }

  void run(int64_t faults) {
    calls_ = pick(1, 3) * layers_;
    wrong_ = ended_ = 0;
    has_settled_ = false;
    std::vector<Device> devices(names_.size());
    const Calls::Ticket from = rendezvous_.next_ticket();
    for (size_t i = 0; i < devices.size(); ++i) {
      devices[i].name = names_[i];
      devices[i].ids.resize(static_cast<size_t>(calls_));
      for (int64_t layer = 0; layer < layers_; ++layer) {
        for (const Calls::Of what : {Calls::Of::kAll, Calls::Of::kGradients}) {
          devices[i].probes.push_back(rendezvous_.ask(layer, names_[i], what));
        }
      }
    }
    for (; faults > 0; --faults) {
      const auto i = static_cast<size_t>(pick(0, static_cast<int64_t>(devices.size()) - 1));
      devices[i].fault = static_cast<Fault>(pick(kNone + 1, kFaults - 1));
      devices[i].moment = pick(devices[i].fault == kGone ? calls_ : 0, 2 * calls_ - 1);
    }
    gives_up_ = pick(0, 1) == 1;
    const std::string why = gives_up_ ? "it was given up" : "";
    const Clock::time_point start = Clock::now();
    std::vector<std::thread> threads;
    for (size_t i = 0; i < devices.size(); ++i) {
      threads.emplace_back([&, i] { calls_of(&devices[i], i); });
    }
    std::set<int64_t> layers;
    for (int64_t layer = 0; layer < layers_; ++layer) layers.insert(layer);
    rendezvous_.settle(layers, from, why);
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      has_settled_ = true;
    }
    changed_.notify_all();
    for (std::thread& thread : threads) thread.join();
    check(devices, seconds_since(start));
  }

  void check(const std::vector<Device>& devices, double seconds) {
    const std::string text = rendezvous_.failure();
    const auto say = [&](const std::string& what) {
      return "seed " + std::to_string(seed_) + ": " + what + ": " + text;
    };
    CHECK_SAY(seconds < kSoon, say("late"));
    CHECK_SAY(wrong_ == 0, say("wrong sums"));
    CHECK_SAY(rendezvous_.waiting() == 0, say("calls wait"));
    const auto has = [&](Fault fault) {
      return std::any_of(devices.begin(), devices.end(),
                         [&](const Device& device) { return device.fault == fault; });
    };
    // If all devices end at the same call, none waits.
    std::set<int64_t> ends;
    for (const Device& device : devices) {
      const bool goes_on = device.fault == kLeftOut && !gives_up_;
      ends.insert(goes_on ? -1 : stop_of(device));
    }
    const bool has_failed = has(kFails) || has(kDoesNotFit) || has(kSkipped) || ends.size() > 1;
    CHECK_SAY(has_failed == !text.empty(), say("whether the step has failed"));
    if (!has_failed) {
      CHECK_SAY(ended_ == 0, say("a call has ended"));
      return;
    }
    const bool fits = (has(kSkipped) && contains(text, "An earlier operation on ")) ||
                      (has(kLeftOut) && gives_up_ && contains(text, "it was given up")) ||
                      (has(kGone) && contains(text, "cannot go backward")) ||
                      (has(kFails) && contains(text, "it fails on ")) ||
                      (has(kDoesNotFit) && contains(text, " channels"));
    CHECK_SAY(fits, say("the reason"));
  }

  const uint64_t seed_;
  Random random_;
  const int64_t layers_;
  const std::vector<std::string> names_;
  Rendezvous rendezvous_;
  int64_t calls_ = 0;
  bool gives_up_ = false;
  // How many calls have got wrong sums, and have ended without.
  std::atomic<int> wrong_{0}, ended_{0};
  std::mutex mutex_;
  std::condition_variable changed_;
  bool has_settled_ = false;
};

// Several at a time, as they sleep for much of it.
TEST(random_steps) {
  const char* const count = std::getenv("CASES");
  const uint64_t cases = count ? std::strtoull(count, nullptr, 10) : 1000;
  std::atomic<uint64_t> seed{0};
  in_threads(4, [&](int) {
    for (uint64_t next = seed++; next < cases; next = seed++) RandomSteps steps(next);
  });
}

}  // namespace
}  // namespace gluon_syncbn

int main() { return check::run_all("random_steps", 600); }
