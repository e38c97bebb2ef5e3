// The layers and their devices' meetings. A device arrives (state.cc); it waits (waits.cc), or is
// the last and adds the sums of all, here; and all leave with these. One lock guards everything,
// and no sums are added and no observers called under it.
#include "rendezvous/rendezvous.h"

#include <utility>

#include "rendezvous/state.h"

namespace gluon_syncbn {
namespace {

// Replaces the sums of this process with those of all, if there are other processes. An absent one
// has no samples in this call. Throws.
void add_other_processes(State* state, Layer* layer, const Layer::Key& key, bool is_absent,
                         PassSums* all) {
  State::Lock lock(state->mutex);
  const LayerConfig& config = layer->config;
  const bool spans_processes = config.spans_processes;
  if (!spans_processes && all->count > 0) return;
  // A process that has joined is allowed to be one of several without any.
  const bool must_have_samples =
      key.direction == Direction::kForward && (is_absent || !state->joined);
  const ProcessCall call{layer->id,
                         key.node,
                         key.sequence,
                         key.direction == Direction::kBackward,
                         layer->title(key),
                         config.timeout_seconds,
                         config.first_rank,
                         config.end_rank,
                         is_absent || state->joined};
  lock.unlock();
  if (spans_processes) {
    state->record.note(call);
    try {
      layer->messages.all_reduce(call, state->observer.open, &all->on_host, &all->count);
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

// The work of the last device for all. If it fails, all get the error.
void combine(State* state, State::Lock* lock, Layer* layer, const Layer::Key& key,
             Meeting* meeting) {
  layer->meetings.erase(key);
  meeting->is_combining = true;
  const std::vector<const PassSums*> each = meeting->in_rank_order(layer->config.devices);
  // Made now, as the layer may be reconfigured once the lock is released.
  const std::string title = layer->title(key);
  lock->unlock();
  std::string error;
  try {
    meeting->all = together(each);
    add_other_processes(state, layer, key, false, &meeting->all);
  } catch (const Error& failure) {
    error = failure.what();
  } catch (const std::exception& failure) {
    error = title + ": " + failure.what();
  }
  lock->lock();
  meeting->end(error);
  if (!error.empty()) state->fail(error);
}

}  // namespace

Rendezvous::Rendezvous() : state_(new State) {}

Rendezvous::~Rendezvous() = default;

void Rendezvous::observe(Observer observer) { state_->observer = std::move(observer); }

void Rendezvous::warn(const std::string& text) const { state_->observer.warn(text); }

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
    ++layer->configuration;
    layer->align_calls();
    if (!layer->meetings.empty()) {
      state_->stop("The devices of SyncBatchNorm '" + config.name + "' were changed from " +
                   comma_separated(layer->config.devices) + " to " +
                   comma_separated(config.devices) + " while a call waited for others.");
    }
    // Other processes continue counting.
    if (!config.spans_processes) layer->first_calls.clear();
  }
  layer->config = std::move(config);
  layer->messages.forget_routes();
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

LayerConfig Rendezvous::config(const LayerPtr& layer) const {
  const State::Lock lock(state_->mutex);
  return layer->config;
}

int Rendezvous::waiting() const {
  const State::Lock lock(state_->mutex);
  size_t calls = 0;
  for (const LayerPtr& layer : state_->all()) {
    for (const auto& entry : layer->meetings) calls += entry.second->arrivals.size();
  }
  return static_cast<int>(calls);
}

double Rendezvous::stuck_seconds() const {
  if (waiting() == 0) return 0;
  const State::Lock lock(state_->mutex);
  return Seconds(Clock::now() - state_->last_arrival).count();
}

PassSums Rendezvous::reduce(const LayerPtr& layer, const CallId& id, Direction direction,
                            const std::string& device, const char* dtype, const PassSums& own) {
  try {
    State::Lock lock(state_->mutex);
    state_->check_call(*layer, id);
    const Layer::Key key{direction, id.node, id.sequence, layer->config.group_of(device)};
    const std::shared_ptr<Meeting> meeting =
        state_->arrive(layer.get(), key, id.active, {device, dtype, &own});
    if (meeting->arrivals.size() < layer->expected(*meeting)) {
      state_->wait(&lock, *layer, key, meeting.get(), device);
      if (!meeting->error.empty()) throw Error(meeting->error);
    } else {
      combine(state_.get(), &lock, layer.get(), key, meeting.get());
    }
    lock.unlock();
    return meeting->arrivals.size() > 1 ? meeting->all : std::move(meeting->all);
  } catch (const Error& error) {
    state_->observer.failed(layer->id, error.what());
    throw;
  }
}

PassSums Rendezvous::take_part(const LayerPtr& layer, Direction direction, int64_t node,
                               int64_t ago, int64_t channels) {
  PassSums all{channels, 0, std::vector<ChannelSums>(static_cast<size_t>(channels)), {}};
  try {
    State::Lock lock(state_->mutex);
    const LayerConfig& config = layer->config;
    if (!state_->step.runs()) throw Error(state_->step.why());
    if (!config.devices.empty()) state_->check_configuration(*layer, config.devices.front());
    layer->align_calls();
    int64_t& calls = layer->first_calls[node];
    const int64_t sequence = direction == Direction::kForward ? calls++ : calls - ago;
    lock.unlock();
    add_other_processes(state_.get(), layer.get(), {direction, node, sequence, 0}, true, &all);
  } catch (const std::exception& error) {
    fail(layer, error.what());
    throw;
  }
  return all;
}

StepRecord& Rendezvous::record() { return state_->record; }

}  // namespace gluon_syncbn
