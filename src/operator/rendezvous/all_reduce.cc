#include "rendezvous/all_reduce.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "exchange/fixed_point.h"
#include "mxnet/interrupts.h"
#include "rendezvous/state.h"

namespace gluon_syncbn {
namespace {

// What each device contributes to reduce().
struct SumsContribution : Contribution {
  std::vector<ChannelSums>* sums;
  double* count;
};

// Replaces the messages of a round by those of this backward call, and waits for them.
void reorder(State* state, Layer* layer, const CallId& id, size_t processes,
             std::vector<double>* round) {
  if (ReorderBuffer::is_of_one_call(*round, processes)) return;
  const auto sequence = static_cast<double>(id.sequence);
  State::Lock lock(state->mutex);
  const auto check_epoch = [&] {
    if (!state->closed.empty()) throw Error(state->closed);
    if (id.epoch != layer->epoch) throw layer->failed_before();
  };
  check_epoch();
  layer->received[id.node].put(*round, processes);
  layer->message_received.notify_all();
  const Patience patience(layer->config.timeout_seconds);
  const unsigned interrupts_before = interrupts;
  bool warned = false;
  while (!layer->received[id.node].take(sequence, processes, round)) {
    layer->message_received.wait_for(lock, std::min(kSlice, patience.slice(kSlice)));
    check_epoch();
    const bool interrupted = interrupts != interrupts_before;
    if (!interrupted && (warned || !patience.is_long()) && !patience.is_over()) continue;
    std::vector<std::string> came;
    for (const size_t rank : layer->received[id.node].ranks(sequence)) {
      came.push_back(std::to_string(rank));
    }
    const std::string message =
        layer->title({Direction::kBackward, id.node, id.sequence, 0}) + ": waited " +
        seconds_text(patience.waited()) + " for all of " + std::to_string(processes) +
        " processes to go backward through this call. Came: ranks " + comma_separated(came) +
        "; the others went through other calls of the layer. ";
    if (interrupted) throw Error(message + "Interrupted.");
    if (patience.is_over()) {
      throw Error(message + "Call backward for the same calls, in the same order, in all of them.");
    }
    warned = true;
    if (const auto warn = state->observer.warn) {
      lock.unlock();
      warn(message + "After " + seconds_text(patience.timeout()) + " this is an error.");
      lock.lock();
    }
  }
}

// Replaces the sums and the count of this process by those of all. Throws Error.
void exchange(State* state, Layer* layer, const CallId& id, Direction direction,
              std::vector<ChannelSums>* sums, double* count) {
  State::Lock lock(state->mutex);
  const LayerConfig config = layer->config;
  if (!config.exchanges()) return;
  const bool joined = state->joined;
  const auto send = state->observer.exchange;
  const size_t size = kCallSize + kSumsSize * sums->size();
  Message message{layer->id,
                  std::to_string(layer->id) +
                      (direction == Direction::kForward ? " forward " : " backward ") +
                      std::to_string(id.node),
                  layer->title({direction, id.node, id.sequence, 0}),
                  static_cast<int64_t>(sums->size()),
                  config.timeout_seconds,
                  std::vector<double>(size)};
  lock.unlock();
  message.values[0] = static_cast<double>(id.sequence);
  if (!joined) {
    message.values[1] = *count;
    std::memcpy(&message.values[kCallSize], sums->data(), sums->size() * sizeof(ChannelSums));
  }
  std::vector<double> all(size * config.processes);
  const std::string error = send(message, &all);
  if (!error.empty()) throw Error(error);
  if (all.size() == size) {
    *count = all[1];
    std::memcpy(static_cast<void*>(sums->data()), &all[kCallSize],
                sums->size() * sizeof(ChannelSums));
    return;
  }
  // Forward calls need no reordering: all write the running statistics, so they come in one order.
  if (direction == Direction::kBackward) reorder(state, layer, id, config.processes, &all);

  std::fill(sums->begin(), sums->end(), ChannelSums());
  *count = 0;
  for (size_t rank = config.first_rank; rank < config.end_rank; ++rank) {
    const double* const values = &all[size * rank];
    if (values[0] != message.values[0]) {
      throw Error(message.title + ": the process of rank " + std::to_string(rank) +
                  " is at its call " + std::to_string(static_cast<int64_t>(values[0])) +
                  " there. Every process must call the net equally often: see "
                  "gluon_syncbn.distributed.join for uneven numbers of batches.");
    }
    *count += values[1];
    for (size_t c = 0; c < sums->size(); ++c) {
      ChannelSums part;
      std::memcpy(static_cast<void*>(&part), values + kCallSize + kSumsSize * c, sizeof(part));
      (*sums)[c].add(part);
    }
  }
}

}  // namespace

AllReduce::AllReduce() : state_(new State) {}
AllReduce::~AllReduce() = default;

void AllReduce::observe(Observer observer) {
  const State::Lock lock(state_->mutex);
  state_->observer = std::move(observer);
}

void AllReduce::configure(int64_t id, LayerConfig config) {
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
    // Other processes go on counting.
    if (config.exchanges()) layer->first_calls = std::move(calls);
  }
  layer->config = std::move(config);
}

void AllReduce::forget(int64_t id) {
  const State::Lock lock(state_->mutex);
  state_->registered.erase(id);
  for (auto entry = state_->layers.begin(); entry != state_->layers.end();) {
    entry = entry->second.expired() ? state_->layers.erase(entry) : std::next(entry);
  }
}

LayerPtr AllReduce::find(int64_t id) const {
  const State::Lock lock(state_->mutex);
  return state_->find(id);
}

std::string AllReduce::name(const LayerPtr& layer) const {
  const State::Lock lock(state_->mutex);
  return layer->config.name;
}

bool AllReduce::shares_memory(const LayerPtr& layer) const {
  const State::Lock lock(state_->mutex);
  state_->check_open(layer);
  return !layer->config.exchanges() && !layer->config.has_gpus && !layer->config.devices.empty();
}

size_t AllReduce::participants(const LayerPtr& layer) const {
  const State::Lock lock(state_->mutex);
  state_->check_open(layer);
  return layer->config.participants();
}

int AllReduce::waiting() const {
  const State::Lock lock(state_->mutex);
  size_t calls = 0;
  for (const LayerPtr& layer : state_->all()) {
    for (const auto& entry : layer->open) calls += entry.second->arrivals.size();
  }
  return static_cast<int>(calls);
}

double AllReduce::stuck_seconds() const {
  if (waiting() == 0) return 0;
  const State::Lock lock(state_->mutex);
  return Seconds(Clock::now() - state_->last_arrival).count();
}

CallId AllReduce::next_call(const LayerPtr& layer, const std::string& device, int64_t node) {
  State::Lock lock(state_->mutex);
  state_->check_open(layer);
  const LayerConfig& config = layer->config;
  // An error of one device reaches all at once, so that no other waits for it.
  const auto fail = [&](const std::string& text) { state_->fail(&lock, layer.get(), text); };
  if (!state_->unreported.empty()) {
    const std::string text = std::exchange(state_->unreported, "");
    fail("An earlier step had failed, which was found before a fork. " + text);
  }
  if (!config.config_error.empty()) fail(config.config_error);
  const bool is_known = !config.devices.empty();
  const auto devices = [&] {
    return std::to_string(config.devices.size()) + " (" + comma_separated(config.devices) + ")";
  };
  if (is_known && config.participants() > config.devices.size()) {
    fail("SyncBatchNorm '" + config.name + "' was made with num_devices=" +
         std::to_string(config.num_devices) + ", but the devices of its parameters are " +
         devices() + ". Leave num_devices out, or initialize the net on all devices.");
  }
  if (is_known && !contains(config.devices, device)) {
    fail("SyncBatchNorm '" + config.name + "' was called on " + device + ", but its devices are " +
         devices() +
         ". Initialize the net on every device in use, or name them all in its SyncGroup.");
  }
  if (const auto& flush = layer->flushes[Direction::kForward]; flush.passed.count(device)) {
    throw Error("SyncBatchNorm '" + config.name + "' was called on " + device +
                " after an error of MXNet, and operations of the step that failed are still under "
                "way on " +
                flush.pending.begin()->first + ": call mx.nd.waitall() first.");
  }
  if (const auto late = layer->late.find(node); late != layer->late.end()) {
    if (late->second.erase(device)) throw layer->failed_before();
    if (!layer->draining.count(device)) layer->late.erase(late);
  }
  if (layer->draining.count(device)) throw layer->failed_before();
  const ActiveDevices active = layer->active_here(state_->active);
  if (active && !contains(*active, device)) {
    fail("SyncBatchNorm '" + config.name + "' was called on " + device +
         ", but the active devices of this step are " + comma_separated(*active) +
         ": name it in gluon_syncbn.participants.");
  }
  const size_t most = is_known ? config.num_devices : config.participants();
  if (most && layer->forward_calls.size() == most && !layer->forward_calls.count(device)) {
    if (!config.num_devices) {
      fail("SyncBatchNorm '" + config.name + "' was called on " +
           layer->forward_calls.begin()->first + " and on " + device +
           " by a graph that has parameters of its own, so the number of devices is unknown. Call "
           "gluon_syncbn.convert_sync_batchnorm(net), which lets the graph of a SymbolBlock "
           "synchronize on the graph's parameters, or make the layer with num_devices or with a "
           "SyncGroup that names the devices.");
    }
    fail("SyncBatchNorm '" + config.name + "' was made with num_devices=" +
         std::to_string(config.num_devices) + ", and after as many others " + device +
         " came too. Leave num_devices out, or name the devices that take part in a SyncGroup.");
  }
  auto& calls = layer->forward_calls[device];
  const int64_t sequence = calls.insert({node, layer->first_calls[node]}).first->second++;
  const CallId id{layer->epoch, node, sequence, active};
  if (!config.notice.empty() && !std::exchange(state_->has_noticed, true)) {
    const auto warn = state_->observer.warn;
    const std::string notice = config.notice;
    lock.unlock();
    if (warn) warn(notice);
  }
  return id;
}

Participants AllReduce::participants_of(const LayerPtr& layer, const CallId& id,
                                        const std::string& device) const {
  const State::Lock lock(state_->mutex);
  state_->check_open(layer);
  if (id.epoch != layer->epoch) throw layer->failed_before();
  std::vector<std::string> devices = layer->group_of(device, id.active);
  const size_t count = id.active ? devices.size() : layer->config.participants();
  return {count, std::move(devices), layer->config.exchanges()};
}

void AllReduce::rendezvous(const LayerPtr& layer, const CallId& id, Direction direction,
                           const std::string& device, Contribution* contribution,
                           const Combine& combine) {
  State::Lock lock(state_->mutex);
  state_->check_open(layer);
  if (id.epoch != layer->epoch) throw layer->failed_before();
  const Layer::Key key(direction, id.node, id.sequence, layer->config.group_of(device));
  std::shared_ptr<Rendezvous>& open = layer->open[key];
  if (!open) {
    open = std::make_shared<Rendezvous>();
    open->active = id.active;
  }
  const std::shared_ptr<Rendezvous> rendezvous = open;
  if (rendezvous->has(device)) {
    state_->fail(&lock, layer.get(),
                 layer->title(key) + ": " + device +
                     " came a second time before the others had come once. " +
                     layer->arrivals_text(*rendezvous) +
                     " Call backward for all devices before any of them goes through the same "
                     "call again.");
  }
  if (!rendezvous->arrivals.empty()) {
    const Rendezvous::Arrival& first = rendezvous->arrivals[0];
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
  rendezvous->arrivals.push_back({device, contribution});
  state_->last_arrival = Clock::now();
  if (rendezvous->arrivals.size() < layer->expected(*rendezvous)) {
    if (!state_->given_up.empty()) {
      state_->fail(&lock, layer.get(), layer->title(key) + ": " + state_->given_up);
    }
    layer->give_up_on(layer->flushes[direction].passed, direction);
    state_->wait(&lock, layer.get(), key, rendezvous.get(), device, id);
    if (!rendezvous->error.empty()) throw Error(rendezvous->error);
    return;
  }

  rendezvous->combining = true;
  layer->open.erase(key);
  const std::vector<Contribution*> all = rendezvous->contributions(layer->config.devices);
  // Now, as the layer may be configured again without the lock.
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
  rendezvous->end(error);
  if (!error.empty()) state_->fail(&lock, layer.get(), error);
}

void AllReduce::reduce(const LayerPtr& layer, const CallId& id, Direction direction,
                       const std::string& device, const char* dtype, std::vector<ChannelSums>* sums,
                       double* count) {
  SumsContribution mine{{static_cast<int64_t>(sums->size()), dtype}, sums, count};
  rendezvous(layer, id, direction, device, &mine, [&](const std::vector<Contribution*>& each) {
    std::vector<ChannelSums> all(sums->size());
    double all_count = 0;
    for (const Contribution* contribution : each) {
      const auto& device_sums = static_cast<const SumsContribution&>(*contribution);
      for (size_t c = 0; c < all.size(); ++c) all[c].add((*device_sums.sums)[c]);
      all_count += *device_sums.count;
    }
    exchange(state_.get(), layer.get(), id, direction, &all, &all_count);
    for (Contribution* contribution : each) {
      *static_cast<SumsContribution*>(contribution)->sums = all;
      *static_cast<SumsContribution*>(contribution)->count = all_count;
    }
  });
}

void AllReduce::set_active_devices(const std::vector<std::string>& devices) {
  const State::Lock lock(state_->mutex);
  state_->active =
      devices.empty() ? nullptr : std::make_shared<const std::vector<std::string>>(devices);
  for (const LayerPtr& layer : state_->all()) layer->align_calls();
}

void AllReduce::set_joined(bool joined) {
  const State::Lock lock(state_->mutex);
  state_->joined = joined;
}

void AllReduce::give_up(const std::string& reason) {
  State::Lock lock(state_->mutex);
  state_->given_up = reason;
  if (reason.empty() || !state_->closed.empty()) return;
  std::vector<std::pair<LayerPtr, std::string>> waiting;
  for (const LayerPtr& layer : state_->all()) {
    if (layer->open.empty()) continue;
    waiting.emplace_back(layer, layer->title(layer->open.begin()->first) + ": " + reason);
  }
  for (const auto& [layer, text] : waiting) {
    state_->end_step(&lock, layer.get(), text);
    lock.lock();
  }
}

bool AllReduce::has_data(const LayerPtr& layer) const {
  const State::Lock lock(state_->mutex);
  return !state_->joined || (layer && layer->config.exchanges());
}

void AllReduce::fail(const LayerPtr& layer, const std::string& text, const std::string& device,
                     const CallId* forward) {
  State::Lock lock(state_->mutex);
  if (layer && state_->closed.empty()) {
    state_->end_step(&lock, layer.get(), text, device, forward);
  }
}

void AllReduce::unreachable(int64_t id, int64_t epoch, Direction direction,
                            const std::string& device) {
  const State::Lock lock(state_->mutex);
  const LayerPtr layer = state_->find(id);
  if (layer && layer->epoch == epoch) layer->give_up_on({device}, direction);
}

void AllReduce::begin_flush(int64_t id, Direction direction,
                            const std::vector<std::string>& devices) {
  const State::Lock lock(state_->mutex);
  const LayerPtr layer = state_->find(id);
  if (!layer) return;
  Layer::Flush& flush = layer->flushes[direction];
  for (const std::string& device : devices) {
    ++flush.pending[device];
    flush.passed.erase(device);
  }
}

void AllReduce::end_flush(int64_t id, Direction direction, const std::string& device) {
  const State::Lock lock(state_->mutex);
  const LayerPtr layer = state_->find(id);
  if (!layer) return;
  Layer::Flush& flush = layer->flushes[direction];
  if (flush.pending.count(device) && --flush.pending[device] > 0) return;
  flush.pending.erase(device);
  flush.passed.insert(device);
  layer->give_up_on(flush.passed, direction);
  if (flush.pending.empty()) flush.passed.clear();
}

int AllReduce::flushing() const {
  const State::Lock lock(state_->mutex);
  size_t devices = 0;
  for (const LayerPtr& layer : state_->all()) {
    for (const auto& entry : layer->flushes) devices += entry.second.pending.size();
  }
  return static_cast<int>(devices);
}

void AllReduce::drain(int64_t id, int64_t epoch, const std::string& device) {
  const State::Lock lock(state_->mutex);
  const LayerPtr layer = state_->find(id);
  if (layer && layer->epoch == epoch) layer->draining.erase(device);
}

void AllReduce::report_next(const std::string& text) {
  const State::Lock lock(state_->mutex);
  state_->unreported = text;
}

void AllReduce::after_fork() {
  const State::Lock lock(state_->mutex);
  for (const LayerPtr& layer : state_->all()) {
    layer->start_epoch("It began before this process was forked.");
    layer->draining.clear();
    layer->flushes.clear();
  }
}

void AllReduce::close(const std::string& reason) {
  const State::Lock lock(state_->mutex);
  state_->closed = reason;
  for (const LayerPtr& layer : state_->all()) {
    if (layer->open.empty()) continue;
    const auto& [key, rendezvous] = *layer->open.begin();
    state_->closed = "The process ended before " + layer->title(key) + " was complete. " +
                     layer->arrivals_text(*rendezvous);
    layer->fail(state_->closed);
  }
}

}  // namespace gluon_syncbn
