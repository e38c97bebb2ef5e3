#include "rendezvous/rendezvous.h"

#include <cstring>
#include <utility>

#include "rendezvous/state.h"

namespace gluon_syncbn {
namespace {

// What each device contributes to reduce().
struct SumsContribution : Contribution {
  std::vector<ChannelSums>* sums;
  double* count;
};

// Replaces the sums and the count of this process with those of all, if there are other processes.
// Throws.
void add_other_processes(State* state, Layer* layer, const CallId& id, Direction direction,
                         std::vector<ChannelSums>* sums, double* count) {
  State::Lock lock(state->mutex);
  const LayerConfig& config = layer->config;
  if (!config.exchanges()) return;
  const ExchangedCall call{layer->id,
                           id.epoch,
                           id.node,
                           id.sequence,
                           direction == Direction::kBackward,
                           layer->title({direction, id.node, id.sequence, 0}),
                           config.timeout_seconds,
                           config.processes,
                           config.first_rank,
                           config.end_rank,
                           state->joined};
  const auto observed_warn = state->observer.warn;
  const auto observed_send = state->observer.send;
  lock.unlock();
  const auto send = [&](const Message& message, std::vector<double>* all) {
    const std::string error = observed_send(message, all);
    if (!error.empty()) throw Error(error);
  };
  const auto warn = [&](const std::string& text) {
    if (observed_warn) observed_warn(text);
  };
  layer->messages.all_reduce(call, send, warn, sums, count);
}

}  // namespace

Rendezvous::Rendezvous() : state_(new State) {}

Rendezvous::~Rendezvous() = default;

void Rendezvous::observe(Observer observer) {
  const State::Lock lock(state_->mutex);
  state_->observer = std::move(observer);
}

void Rendezvous::configure(int64_t id, LayerConfig config) {
  const State::Lock lock(state_->mutex);
  LayerPtr& layer = state_->registered[id];
  if (!layer) {
    layer = std::make_shared<Layer>();
    layer->id = id;
    state_->layers[id] = layer;
  } else if (layer->config.devices != config.devices ||
             layer->config.num_devices != config.num_devices ||
             layer->config.group_size != config.group_size) {
    layer->align_calls();
    auto calls = layer->first_calls;
    layer->start_epoch("The devices of SyncBatchNorm '" + config.name + "' were changed from " +
                       comma_separated(layer->config.devices) + " to " +
                       comma_separated(config.devices) + ".");
    layer->draining.clear();
    // Other processes continue counting.
    if (config.exchanges()) layer->first_calls = std::move(calls);
  }
  layer->config = std::move(config);
}

void Rendezvous::forget(int64_t id) {
  const State::Lock lock(state_->mutex);
  state_->registered.erase(id);
  for (auto entry = state_->layers.begin(); entry != state_->layers.end();) {
    entry = entry->second.expired() ? state_->layers.erase(entry) : std::next(entry);
  }
}

LayerPtr Rendezvous::find(int64_t id) const {
  const State::Lock lock(state_->mutex);
  return state_->find(id);
}

std::string Rendezvous::name(const LayerPtr& layer) const {
  const State::Lock lock(state_->mutex);
  return layer->config.name;
}

bool Rendezvous::shares_memory(const LayerPtr& layer) const {
  const State::Lock lock(state_->mutex);
  state_->check_open(layer);
  return !layer->config.exchanges() && !layer->config.has_gpus && !layer->config.devices.empty();
}

size_t Rendezvous::meeting_size(const LayerPtr& layer) const {
  const State::Lock lock(state_->mutex);
  state_->check_open(layer);
  return layer->config.meeting_size();
}

int Rendezvous::waiting() const {
  const State::Lock lock(state_->mutex);
  size_t calls = 0;
  for (const LayerPtr& layer : state_->all()) {
    for (const auto& entry : layer->open) calls += entry.second->arrivals.size();
  }
  return static_cast<int>(calls);
}

double Rendezvous::stuck_seconds() const {
  if (waiting() == 0) return 0;
  const State::Lock lock(state_->mutex);
  return Seconds(Clock::now() - state_->last_arrival).count();
}

void Rendezvous::meet(const LayerPtr& layer, const CallId& id, Direction direction,
                      const std::string& device, Contribution* contribution,
                      const Combine& combine) {
  State::Lock lock(state_->mutex);
  state_->check_open(layer);
  if (id.epoch != layer->epoch) throw layer->failed_before();
  const Layer::Key key(direction, id.node, id.sequence, layer->config.group_of(device));
  std::shared_ptr<Meeting>& open = layer->open[key];
  if (!open) {
    open = std::make_shared<Meeting>();
    open->active = id.active;
  }
  const std::shared_ptr<Meeting> meeting = open;
  if (meeting->has(device)) {
    state_->fail(&lock, layer.get(),
                 layer->title(key) + ": " + device +
                     " came a second time before the others had come once. " +
                     layer->arrivals_text(*meeting) +
                     " Call backward for all devices before any of them goes through the same "
                     "call again.");
  }
  if (!meeting->arrivals.empty()) {
    const Meeting::Arrival& first = meeting->arrivals[0];
    const Contribution& other = *first.contribution;
    const auto refuse = [&](const std::string& theirs, const std::string& ours,
                            const std::string& remedy) {
      state_->fail(&lock, layer.get(),
                   layer->title(key) + ": " + first.device + " has " + theirs + ", " + device +
                       " has " + ours + ". " + remedy,
                   device, direction == Direction::kForward ? &id : nullptr);
    };
    if (other.channels != contribution->channels) {
      refuse(std::to_string(other.channels) + " channels",
             std::to_string(contribution->channels) + " channels",
             "Give every device data of the same number of channels.");
    }
    if (std::strcmp(other.dtype, contribution->dtype) != 0) {
      refuse(std::string(other.dtype) + " data", std::string(contribution->dtype) + " data",
             "Cast the data of all devices to one dtype.");
    }
  }
  meeting->arrivals.push_back({device, contribution});
  state_->last_arrival = Clock::now();
  if (meeting->arrivals.size() < layer->expected(*meeting)) {
    if (!state_->given_up.empty()) {
      state_->fail(&lock, layer.get(), layer->title(key) + ": " + state_->given_up);
    }
    layer->give_up_on(layer->flushes[direction].passed, direction);
    state_->wait(&lock, layer.get(), key, meeting.get(), device, id);
    if (!meeting->error.empty()) throw Error(meeting->error);
    return;
  }

  meeting->combining = true;
  layer->open.erase(key);
  const std::vector<Contribution*> all = meeting->contributions(layer->config.devices);
  // Made now, as the layer may be reconfigured once the lock is released.
  const std::string title = layer->title(key);
  lock.unlock();
  std::string error;
  try {
    combine(all);
  } catch (const Error& failure) {
    error = failure.what();
  } catch (const std::exception& failure) {
    error = title + ": " + failure.what();
  }
  lock.lock();
  meeting->end(error);
  if (!error.empty()) state_->fail(&lock, layer.get(), error);
}

void Rendezvous::reduce(const LayerPtr& layer, const CallId& id, Direction direction,
                        const std::string& device, const char* dtype,
                        std::vector<ChannelSums>* sums, double* count) {
  SumsContribution mine{{static_cast<int64_t>(sums->size()), dtype}, sums, count};
  meet(layer, id, direction, device, &mine, [&](const std::vector<Contribution*>& each) {
    std::vector<ChannelSums> all(sums->size());
    double all_count = 0;
    for (const Contribution* contribution : each) {
      const auto& device_sums = static_cast<const SumsContribution&>(*contribution);
      for (size_t c = 0; c < all.size(); ++c) all[c].add((*device_sums.sums)[c]);
      all_count += *device_sums.count;
    }
    add_other_processes(state_.get(), layer.get(), id, direction, &all, &all_count);
    for (Contribution* contribution : each) {
      *static_cast<SumsContribution*>(contribution)->sums = all;
      *static_cast<SumsContribution*>(contribution)->count = all_count;
    }
  });
}

}  // namespace gluon_syncbn
