// Who belongs to a meeting and who is missing, and what may meet.
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

std::string Layer::lacks(const Meeting& meeting, const std::set<std::string>& absent) const {
  size_t possible = meeting.arrivals.size();
  std::string lost;
  for (const std::string& device : missing(meeting)) {
    if (absent.count(device)) {
      lost = device;
    } else {
      ++possible;
    }
  }
  return possible < expected(meeting) ? lost : "";
}

void Layer::end_meetings(const std::string& why) {
  for (auto& entry : meetings) entry.second->end(why);
  meetings.clear();
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

std::shared_ptr<Meeting> State::arrive(Layer* layer, const Layer::Key& key,
                                       const ActiveDevices& active,
                                       const Meeting::Arrival& arrival) {
  std::shared_ptr<Meeting>& place = layer->meetings[key];
  if (!place) {
    place = std::make_shared<Meeting>();
    place->active = active;
    place->opened = calls.next();
  }
  const std::shared_ptr<Meeting> meeting = place;
  if (meeting->has(arrival.device)) {
    fail(layer->title(key) + ": " + arrival.device +
         " arrived a second time before the others had arrived. " + layer->arrivals_text(*meeting) +
         " Call backward for all devices before any of them goes through the same call "
         "again.");
  }
  if (!meeting->arrivals.empty()) check_match(*layer, key, meeting->arrivals[0], arrival);
  meeting->arrivals.push_back(arrival);
  last_arrival = Clock::now();
  note_event();
  if (key.direction == Direction::kBackward) end_without_backward(*layer);
  return meeting;
}

void State::check_match(const Layer& layer, const Layer::Key& key, const Meeting::Arrival& first,
                        const Meeting::Arrival& arrival) {
  const auto refuse = [&](const std::string& theirs, const std::string& ours,
                          const std::string& remedy) {
    fail(layer.title(key) + ": " + first.device + " has " + theirs + ", " + arrival.device +
         " has " + ours + ". " + remedy);
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
