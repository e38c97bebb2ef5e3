// The layers and their devices' meetings. A device counts its forward calls, so a call's id needs
// no communication. It arrives; it waits (waits.cc), or is the last and adds the sums of all; and
// all leave with these.
#include "rendezvous/rendezvous.h"

#include <utility>

#include "processes/text.h"

namespace gluon_syncbn {
namespace {

// Adds the sums on the host, and lists those on GPUs.
PassSums together(const std::vector<const PassSums*>& each) {
  if (each.size() == 1) return *each[0];
  PassSums all{each[0]->C, 0, std::vector<ChannelSums>(each[0]->on_host.size()), {}};
  for (const PassSums* one : each) {
    all.count += one->count;
    for (size_t c = 0; c < all.on_host.size(); ++c) all.on_host[c].add(one->on_host[c]);
    all.on_gpus.insert(all.on_gpus.end(), one->on_gpus.begin(), one->on_gpus.end());
  }
  return all;
}

}  // namespace

void Rendezvous::configure(int64_t id, LayerConfig config) {
  const Lock lock(mutex_);
  LayerPtr& layer = registered_[id];
  if (!layer) {
    layer = std::make_shared<Layer>();
    layer->id = id;
    layers_[id] = layer;
  } else if (layer->config.devices != config.devices ||
             layer->config.num_devices != config.num_devices ||
             layer->config.group_size != config.group_size) {
    ++layer->configuration;
    layer->align_calls();
    if (!layer->meetings.empty()) {
      stop("The devices of SyncBatchNorm '" + config.name + "' were changed from " +
           comma_separated(layer->config.devices) + " to " + comma_separated(config.devices) +
           " while a call waited for others.");
    }
    // Other processes continue counting.
    if (!config.spans_processes) layer->first_calls.clear();
  }
  layer->config = std::move(config);
  layer->messages.forget_routes();
}

void Rendezvous::forget(int64_t id) {
  const Lock lock(mutex_);
  registered_.erase(id);
  for (auto entry = layers_.begin(); entry != layers_.end();) {
    entry = entry->second.expired() ? layers_.erase(entry) : std::next(entry);
  }
}

LayerPtr Rendezvous::find(int64_t id) const {
  const Lock lock(mutex_);
  return find_locked(id);
}

LayerPtr Rendezvous::find_locked(int64_t id) const {
  const auto found = layers_.find(id);
  return found == layers_.end() ? nullptr : found->second.lock();
}

std::vector<LayerPtr> Rendezvous::all() const {
  std::vector<LayerPtr> found;
  for (const auto& entry : layers_) {
    if (LayerPtr layer = entry.second.lock()) found.push_back(std::move(layer));
  }
  return found;
}

LayerConfig Rendezvous::config(const LayerPtr& layer) const {
  const Lock lock(mutex_);
  return layer->config;
}

void Rendezvous::set_active_devices(const std::vector<std::string>& devices) {
  const Lock lock(mutex_);
  active_ = devices.empty() ? nullptr : std::make_shared<const std::vector<std::string>>(devices);
  for (const LayerPtr& layer : all()) layer->align_calls();
}

void Rendezvous::set_joined(bool joined) {
  const Lock lock(mutex_);
  joined_ = joined;
}

bool Rendezvous::moves_running_statistics(const LayerPtr& layer) const {
  const Lock lock(mutex_);
  return !joined_ || (layer && layer->config.spans_processes);
}

CallId Rendezvous::next_call(const LayerPtr& layer, const std::string& device, int64_t node) {
  CallId id;
  id.node = node;
  std::string notice;
  try {
    const Lock lock(mutex_);
    id.active = layer->active_here(active_);
    id.configuration = layer->configuration;
    id.meets = layer->meets();
    check_call(*layer, id);
    // An error on one device reaches all at once, so that no other device waits for it.
    std::string error = layer->configuration_error(device);
    if (error.empty()) error = layer->participation_error(device, id.active);
    if (!error.empty()) stop_and_throw(error);
    id.sequence = layer->next_sequence(device, node);
    calls_.begin({layer->id, device}, node, id.sequence);
    if (!layer->config.notice.empty() && !std::exchange(has_noticed_, true)) {
      notice = layer->config.notice;
    }
  } catch (const Error& error) {
    observer_.failed(layer->id, error.what());
    throw;
  }
  if (!notice.empty()) warn(notice);
  return id;
}

void Rendezvous::check_call(const Layer& layer, const CallId& id) {
  if (!step_.runs()) throw Error(step_.why());
  if (id.configuration == layer.configuration) return;
  stop_and_throw("SyncBatchNorm '" + layer.config.name +
                 "' goes backward through a call of a step that has failed, or before its devices "
                 "changed: they are " +
                 comma_separated(layer.config.devices) + ".");
}

Members Rendezvous::members_of(const LayerPtr& layer, const CallId& id,
                               const std::string& device) const {
  const Lock lock(mutex_);
  std::vector<std::string> devices = layer->group_of(device, id.active);
  const size_t count = id.active ? devices.size() : layer->config.meeting_size();
  return {count, std::move(devices), layer->config.spans_processes};
}

PassSums Rendezvous::reduce(const LayerPtr& layer, const CallId& id, Direction direction,
                            const std::string& device, const char* dtype, const PassSums& own) {
  try {
    Lock lock(mutex_);
    check_call(*layer, id);
    const Layer::Key key{direction, id.node, id.sequence, layer->config.group_of(device)};
    const std::shared_ptr<Meeting> meeting =
        arrive(layer.get(), key, id.active, {device, dtype, &own});
    if (meeting->arrivals.size() < layer->expected(*meeting)) {
      wait(&lock, *layer, key, meeting.get(), device);
      if (!meeting->error.empty()) throw Error(meeting->error);
    } else {
      combine(&lock, layer.get(), key, meeting.get());
    }
    lock.unlock();
    return meeting->arrivals.size() > 1 ? meeting->all : std::move(meeting->all);
  } catch (const Error& error) {
    observer_.failed(layer->id, error.what());
    throw;
  }
}

std::shared_ptr<Meeting> Rendezvous::arrive(Layer* layer, const Layer::Key& key,
                                            const ActiveDevices& active,
                                            const Meeting::Arrival& arrival) {
  std::shared_ptr<Meeting>& place = layer->meetings[key];
  if (!place) {
    place = std::make_shared<Meeting>();
    place->active = active;
    place->opened = calls_.next();
  }
  const std::shared_ptr<Meeting> meeting = place;
  const std::string error = layer->arrival_error(key, *meeting, arrival);
  if (!error.empty()) stop_and_throw(error);
  meeting->arrivals.push_back(arrival);
  last_arrival_ = Clock::now();
  note_event();
  if (key.direction == Direction::kBackward) stop_without_backward(*layer);
  return meeting;
}

void Rendezvous::combine(Lock* lock, Layer* layer, const Layer::Key& key, Meeting* meeting) {
  layer->meetings.erase(key);
  meeting->is_combining = true;
  const std::vector<const PassSums*> each = meeting->in_rank_order(layer->config.devices);
  // Made now, as the layer may be reconfigured once the lock is released.
  const std::string title = layer->title(key);
  lock->unlock();
  std::string error;
  try {
    meeting->all = together(each);
    add_other_processes(layer, key, false, &meeting->all);
  } catch (const Error& failure) {
    error = failure.what();
  } catch (const std::exception& failure) {
    error = title + ": " + failure.what();
  }
  lock->lock();
  meeting->end(error);
  if (!error.empty()) stop_and_throw(error);
}

void Rendezvous::add_other_processes(Layer* layer, const Layer::Key& key, bool is_absent,
                                     PassSums* all) {
  Lock lock(mutex_);
  const LayerConfig& config = layer->config;
  const bool spans_processes = config.spans_processes;
  if (!spans_processes && all->count > 0) return;
  // A process that has joined is allowed to be one of several without any.
  const bool must_have_samples = key.direction == Direction::kForward && (is_absent || !joined_);
  const ProcessCall call{layer->id,           key.node,
                         key.sequence,        key.direction == Direction::kBackward,
                         layer->title(key),   config.timeout_seconds,
                         config.first_rank,   config.end_rank,
                         is_absent || joined_};
  lock.unlock();
  if (spans_processes) {
    record_.note(call);
    try {
      layer->messages.all_reduce(call, observer_.open, observer_.warn, &all->on_host, &all->count);
    } catch (const std::exception& failure) {
      throw Error(failure.what());
    }
  }
  if (all->count == 0 && must_have_samples) {
    throw Error(call.title + ": no " + (spans_processes ? "process" : "device") +
                " that shares statistics with this one has samples in this step. Leave the step "
                "out in all of them.");
  }
}

PassSums Rendezvous::take_part(const LayerPtr& layer, Direction direction, int64_t node,
                               int64_t ago, int64_t channels) {
  PassSums all{channels, 0, std::vector<ChannelSums>(static_cast<size_t>(channels)), {}};
  try {
    Lock lock(mutex_);
    const LayerConfig& config = layer->config;
    if (!step_.runs()) throw Error(step_.why());
    if (!config.devices.empty()) {
      const std::string error = layer->configuration_error(config.devices.front());
      if (!error.empty()) throw Error(error);
    }
    layer->align_calls();
    int64_t& calls = layer->first_calls[node];
    const int64_t sequence = direction == Direction::kForward ? calls++ : calls - ago;
    lock.unlock();
    add_other_processes(layer.get(), {direction, node, sequence, 0}, true, &all);
  } catch (const std::exception& error) {
    fail(layer, error.what());
    throw;
  }
  return all;
}

int Rendezvous::waiting() const {
  const Lock lock(mutex_);
  size_t calls = 0;
  for (const LayerPtr& layer : all()) {
    for (const auto& entry : layer->meetings) calls += entry.second->arrivals.size();
  }
  return static_cast<int>(calls);
}

double Rendezvous::stuck_seconds() const {
  if (waiting() == 0) return 0;
  const Lock lock(mutex_);
  return Patience::Seconds(Clock::now() - last_arrival_).count();
}

}  // namespace gluon_syncbn
