#include "rendezvous/state.h"

#include <algorithm>
#include <utility>

#include "cpu/thread_pool.h"
#include "mxnet/interrupts.h"

namespace gluon_syncbn {
namespace {

constexpr Seconds kGraceAfterInterrupt{0.5};
// The longest time between two probes for devices that cannot arrive.
constexpr Seconds kLongestProbe{1};
// The latest time of the first notice of a wait. Later ones, which are short, come each time the
// wait is kBetweenNotices times as long as at the one before.
constexpr Seconds kLongestSilence{5};
constexpr int kBetweenNotices = 4;
// Devices arrive shortly after each other, and waking a sleeping thread often takes as long as the
// work of a layer. So a call first stays awake this long, unless another thread wants the core, and
// helps the last device with the work for all.
constexpr Seconds kAwake{0.0003};

}  // namespace

bool is_cpu(const std::string& device) { return device.compare(0, 3, "cpu") == 0; }

bool contains(const std::vector<std::string>& names, const std::string& name) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

bool Meeting::has(const std::string& device) const {
  return std::any_of(arrivals.begin(), arrivals.end(),
                     [&](const Arrival& a) { return a.device == device; });
}

void Meeting::end(const std::string& why) {
  error = why;
  over = true;
  changed.notify_all();
}

std::vector<Contribution*> Meeting::contributions(const std::vector<std::string>& ranks) {
  const auto rank = [&](const Arrival& a) {
    return std::find(ranks.begin(), ranks.end(), a.device);
  };
  std::sort(arrivals.begin(), arrivals.end(),
            [&](const Arrival& a, const Arrival& b) { return rank(a) < rank(b); });
  std::vector<Contribution*> contributions;
  for (const Arrival& arrival : arrivals) contributions.push_back(arrival.contribution);
  return contributions;
}

void Layer::align_calls() {
  late.clear();
  for (const auto& device : forward_calls) {
    for (const auto& calls : device.second) {
      int64_t& first = first_calls[calls.first];
      first = std::max(first, calls.second);
    }
  }
  forward_calls.clear();
}

ActiveDevices Layer::active_here(const ActiveDevices& active) const {
  const auto is_active = [&](const std::string& name) { return contains(*active, name); };
  const bool some = active && std::any_of(config.devices.begin(), config.devices.end(), is_active);
  return some ? active : nullptr;
}

std::vector<std::string> Layer::group_of(const std::string& device,
                                         const ActiveDevices& active) const {
  const size_t group = config.group_of(device);
  std::vector<std::string> devices;
  for (const std::string& other : config.devices) {
    if (config.group_of(other) == group && (!active || contains(*active, other))) {
      devices.push_back(other);
    }
  }
  return devices;
}

size_t Layer::expected(const Meeting& meeting) const {
  if (!meeting.active) return config.meeting_size();
  return group_of(meeting.arrivals[0].device, meeting.active).size();
}

void Layer::give_up_on(const std::set<std::string>& devices, Direction direction) const {
  for (const auto& [key, meeting] : open) {
    if (std::get<0>(key) != direction) continue;
    size_t possible = meeting->arrivals.size();
    std::string missing;
    for (const std::string& device : group_of(meeting->arrivals[0].device, meeting->active)) {
      if (meeting->has(device)) continue;
      if (devices.count(device)) {
        missing = device;
      } else {
        ++possible;
      }
    }
    if (possible >= expected(*meeting)) continue;
    meeting->unreachable = missing;
    meeting->changed.notify_all();
  }
}

void Layer::start_epoch(const std::string& why) {
  for (auto& entry : open) entry.second->end(why);
  open.clear();
  forward_calls.clear();
  first_calls.clear();
  late.clear();
  failure = why;
  messages.start_epoch(++epoch, failed_before().what());
}

void Layer::fail(const std::string& why, const std::string& device, const CallId* forward) {
  std::set<std::string> not_called;
  if (forward && forward->epoch == epoch) {
    for (const std::string& other : group_of(device, forward->active)) {
      const auto calls = forward_calls.find(other);
      const bool has_called = calls != forward_calls.end() && calls->second.count(forward->node) &&
                              calls->second.at(forward->node) > forward->sequence;
      if (other != device && !has_called) not_called.insert(other);
    }
  }
  start_epoch(why);
  if (!not_called.empty()) late[forward->node] = std::move(not_called);
  draining.insert(config.devices.begin(), config.devices.end());
}

LayerPtr State::find(int64_t id) const {
  const auto found = layers.find(id);
  return found == layers.end() ? nullptr : found->second.lock();
}

std::vector<LayerPtr> State::all() const {
  std::vector<LayerPtr> found;
  for (const auto& entry : layers) {
    if (LayerPtr layer = entry.second.lock()) found.push_back(std::move(layer));
  }
  return found;
}

void State::check_open(const LayerPtr& layer) const {
  if (!closed.empty()) throw Error(closed);
  if (!layer) {
    throw Error(
        "The SyncBatchNorm of this graph does not exist in this process: the graph was loaded "
        "from a file, or its layer was deleted. To train, call "
        "gluon_syncbn.convert_sync_batchnorm(net), or build the net again and load its "
        "parameters.");
  }
}

void State::end_step(Lock* lock, Layer* layer, const std::string& text, const std::string& device,
                     const CallId* forward) {
  layer->fail(text, device, forward);
  // The arrays of a deleted layer are unknown, so the observer cannot drain it.
  if (!registered.count(layer->id)) layer->draining.clear();
  const int64_t epoch = layer->epoch;
  const auto failed = observer.failed;
  lock->unlock();
  if (failed) failed(layer->id, epoch, text);
}

void State::fail(Lock* lock, Layer* layer, const std::string& text, const std::string& device,
                 const CallId* forward) {
  end_step(lock, layer, text, device, forward);
  throw Error(text);
}

void State::wait(Lock* lock, Layer* layer, const Layer::Key& key, Meeting* meeting,
                 const std::string& device, const CallId& id) {
  Patience patience(layer->config.timeout_seconds);
  const unsigned interrupts_before = interrupts;
  Seconds since_interrupt{0}, next_probe{0};
  const Seconds first_notice = std::min(patience.first(), kLongestSilence);
  meeting->next_notice = std::max(meeting->next_notice, first_notice);
  // The last GPU to arrive has no work for CPU threads.
  if (is_cpu(device)) {
    lock->unlock();
    thread_pool().help([&] { return meeting->over.load(); }, kAwake);
    lock->lock();
  }
  while (!meeting->over) {
    const Seconds slice = std::min(kSlice, patience.slice(kSlice));
    if (meeting->unreachable.empty()) meeting->changed.wait_for(*lock, slice);
    if (meeting->over) return;
    // The last device is at work, which ends by itself or by its own timeout.
    if (meeting->combining) continue;

    const Seconds waited = patience.waited();
    const auto message = [&] {
      return layer->waits_text(key, *meeting, device, waited) +
             where_missing_wait(*layer, *meeting);
    };
    const Direction direction = std::get<0>(key);
    if (!meeting->unreachable.empty()) {
      fail(lock, layer,
           message() + "\nAn earlier operation on " + meeting->unreachable +
               " has failed, and MXNet runs nothing that depends on it. mx.nd.waitall() raises its "
               "error, unless it has been raised before.",
           meeting->unreachable, direction == Direction::kForward ? &id : nullptr);
    }
    if (patience.is_over()) fail(lock, layer, message() + layer->causes(key, *meeting));
    if (observer.waits && waited > next_probe) {
      next_probe = std::min(2 * waited, waited + kLongestProbe);
      const auto waits = observer.waits;
      lock->unlock();
      waits(layer->id, id.epoch, direction);
      lock->lock();
      // Meanwhile the last device may have begun to use this one's contribution.
      if (meeting->over || meeting->combining) continue;
    }

    if (interrupts != interrupts_before) since_interrupt += slice;
    if (since_interrupt > kGraceAfterInterrupt) fail(lock, layer, message() + "\nInterrupted.");

    if (waited > meeting->next_notice) {
      std::string text = message();
      if (meeting->next_notice == first_notice) {
        text += "\nAfter " + seconds_text(patience.timeout()) + " this is an error." +
                layer->causes(key, *meeting);
      }
      meeting->next_notice = kBetweenNotices * waited;
      if (const auto warn = observer.warn) {
        lock->unlock();
        warn(text);
        lock->lock();
      }
    }
  }
}

}  // namespace gluon_syncbn
