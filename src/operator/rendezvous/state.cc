// Who belongs to a meeting and who is missing, what may meet, and how a step ends for all devices:
// a new epoch, so that calls of the failed step meet no later ones.
#include "rendezvous/state.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace gluon_syncbn {

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

std::vector<const PassSums*> Meeting::in_rank_order(const std::vector<std::string>& ranks) {
  const auto rank = [&](const Arrival& a) {
    return std::find(ranks.begin(), ranks.end(), a.device);
  };
  std::sort(arrivals.begin(), arrivals.end(),
            [&](const Arrival& a, const Arrival& b) { return rank(a) < rank(b); });
  std::vector<const PassSums*> each;
  for (const Arrival& arrival : arrivals) each.push_back(arrival.own);
  return each;
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
        "from a file, or its layer was deleted. To train a net, call "
        "gluon_syncbn.convert_sync_batchnorm(net), or build it again and load its parameters. To "
        "train a symbol, bind an mx.mod.Module, not an executor.");
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

std::shared_ptr<Meeting> State::arrive(Lock* lock, Layer* layer, const Layer::Key& key,
                                       const CallId& id, const Meeting::Arrival& arrival) {
  std::shared_ptr<Meeting>& open = layer->open[key];
  if (!open) {
    open = std::make_shared<Meeting>();
    open->active = id.active;
  }
  const std::shared_ptr<Meeting> meeting = open;
  if (meeting->has(arrival.device)) {
    fail(lock, layer,
         layer->title(key) + ": " + arrival.device +
             " arrived a second time before the others had arrived. " +
             layer->arrivals_text(*meeting) +
             " Call backward for all devices before any of them goes through the same call again.");
  }
  if (!meeting->arrivals.empty()) check_match(lock, layer, key, id, meeting->arrivals[0], arrival);
  meeting->arrivals.push_back(arrival);
  if (meeting->unreachable == arrival.device) meeting->unreachable.clear();
  last_arrival = Clock::now();
  return meeting;
}

void State::check_match(Lock* lock, Layer* layer, const Layer::Key& key, const CallId& id,
                        const Meeting::Arrival& first, const Meeting::Arrival& arrival) {
  const auto refuse = [&](const std::string& theirs, const std::string& ours,
                          const std::string& remedy) {
    fail(lock, layer,
         layer->title(key) + ": " + first.device + " has " + theirs + ", " + arrival.device +
             " has " + ours + ". " + remedy,
         arrival.device, std::get<0>(key) == Direction::kForward ? &id : nullptr);
  };
  if (first.own->C != arrival.own->C) {
    refuse(std::to_string(first.own->C) + " channels", std::to_string(arrival.own->C) + " channels",
           "Give every device data of the same number of channels.");
  }
  if (std::strcmp(first.dtype, arrival.dtype) != 0) {
    refuse(std::string(first.dtype) + " data", std::string(arrival.dtype) + " data",
           "Cast the data of all devices to one dtype.");
  }
}

}  // namespace gluon_syncbn
