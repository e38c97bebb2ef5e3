#include "all_reduce.h"

#include <atomic>
#include <cstring>
#include <utility>

#include "meetings.h"

namespace gluon_syncbn {
namespace {

// Counts Ctrl-C. A process has one keyboard, so this is the one thing that all instances share.
std::atomic<unsigned> interrupt_count{0};

}  // namespace

AllReduce::AllReduce() : state_(new State) {}
AllReduce::~AllReduce() = default;

void AllReduce::interrupt() { interrupt_count.fetch_add(1, std::memory_order_relaxed); }

unsigned AllReduce::interrupts() { return interrupt_count.load(std::memory_order_relaxed); }

void AllReduce::observe(Observer observer) {
  const State::Lock lock(state_->mutex);
  state_->observer = std::move(observer);
}

void AllReduce::configure(int64_t number, LayerConfig config) {
  const State::Lock lock(state_->mutex);
  LayerPtr& layer = state_->registered[number];
  if (!layer) {
    layer = std::make_shared<Layer>();
    layer->number = number;
    state_->layers[number] = layer;
  } else if (layer->config.devices != config.devices ||
             layer->config.num_devices != config.num_devices ||
             layer->config.group_size != config.group_size) {
    layer->line_up();
    auto calls = layer->first_calls;
    layer->start_anew("The devices of SyncBatchNorm '" + config.name + "' were changed from " +
                      join(layer->config.devices) + " to " + join(config.devices) + ".");
    layer->unsettled.clear();
    // Other processes count on.
    if (config.exchanges()) layer->first_calls = std::move(calls);
  }
  layer->config = std::move(config);
}

void AllReduce::forget(int64_t number) {
  const State::Lock lock(state_->mutex);
  state_->registered.erase(number);
  for (auto entry = state_->layers.begin(); entry != state_->layers.end();) {
    entry = entry->second.expired() ? state_->layers.erase(entry) : std::next(entry);
  }
}

AllReduce::LayerPtr AllReduce::find(int64_t number) const {
  const State::Lock lock(state_->mutex);
  return state_->find(number);
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
  for (const auto& entry : state_->layers) {
    const LayerPtr layer = entry.second.lock();
    if (!layer) continue;
    for (const auto& meeting : layer->meetings) calls += meeting.second->arrivals.size();
  }
  return static_cast<int>(calls);
}

double AllReduce::stuck_seconds() const {
  if (waiting() == 0) return 0;
  const State::Lock lock(state_->mutex);
  return Seconds(Clock::now() - state_->last_arrival).count();
}

Ticket AllReduce::next_ticket(const LayerPtr& layer, const std::string& device, int64_t place) {
  State::Lock lock(state_->mutex);
  state_->check_open(layer);
  // One device's error is everyone's: nobody has to wait for it in vain.
  const auto fail = [&](const std::string& text) { state_->fail(&lock, layer.get(), text); };
  if (!state_->untold.empty()) {
    const std::string text = std::exchange(state_->untold, "");
    fail("An earlier step had failed, which was found before a fork. " + text);
  }
  const LayerConfig& config = layer->config;
  if (!config.misfit.empty()) fail(config.misfit);
  const auto devices = [&] {
    return std::to_string(config.devices.size()) + " (" + join(config.devices) + ")";
  };
  const bool is_known = !config.devices.empty();
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
  if (const auto owed = layer->owed.find(place); owed != layer->owed.end()) {
    if (owed->second.erase(device)) throw layer->failed_before();
    if (!layer->unsettled.count(device)) layer->owed.erase(owed);
  }
  if (layer->unsettled.count(device)) throw layer->failed_before();
  const auto present = layer->present_of(state_->present);
  if (present && !contains(*present, device)) {
    fail("SyncBatchNorm '" + config.name + "' was called on " + device +
         ", and those who take part in this step are " + join(*present) +
         ": name it in gluon_syncbn.participants.");
  }
  const size_t most = is_known ? config.num_devices : config.participants();
  if (most && layer->forward_calls.size() == most && !layer->forward_calls.count(device)) {
    if (!config.num_devices) {
      fail("SyncBatchNorm '" + config.name + "' was called on " +
           layer->forward_calls.begin()->first + " and on " + device +
           " by a graph that has parameters of its own, so it is not known how many devices take "
           "part. Call gluon_syncbn.convert_sync_batchnorm(net), which lets the graph of a "
           "SymbolBlock synchronize on the graph's parameters, or make the layer with num_devices "
           "or with a SyncGroup that names the devices.");
    }
    fail("SyncBatchNorm '" + config.name + "' was made with num_devices=" +
         std::to_string(config.num_devices) + ", and after as many others " + device +
         " came too. Leave num_devices out, or name the devices that take part in a SyncGroup.");
  }
  auto& calls = layer->forward_calls[device];
  const int64_t call = calls.insert({place, layer->first_calls[place]}).first->second++;
  return {layer->generation, place, call, present};
}

void AllReduce::meet(const LayerPtr& layer, const Ticket& ticket, Direction direction,
                     const std::string& device, Part* part, const Join& join) {
  State::Lock lock(state_->mutex);
  state_->check_open(layer);
  if (ticket.generation != layer->generation) throw layer->failed_before();
  const Layer::Key key(direction, ticket.place, ticket.number, layer->config.group_of(device));
  std::shared_ptr<Meeting>& open = layer->meetings[key];
  if (!open) {
    open = std::make_shared<Meeting>();
    open->present = ticket.present;
  }
  const std::shared_ptr<Meeting> meeting = open;
  if (meeting->has(device)) {
    state_->fail(&lock, layer.get(),
                 layer->title(key) + ": " + device +
                     " came a second time before the others had come once. " +
                     layer->attendance(*meeting) +
                     " Call backward for all devices before any of them goes through the same "
                     "call again.");
  }
  if (!meeting->arrivals.empty()) {
    const Meeting::Arrival& first = meeting->arrivals[0];
    const auto refuse = [&](const std::string& theirs, const std::string& ours,
                            const std::string& remedy) {
      state_->fail(&lock, layer.get(),
                   layer->title(key) + ": " + first.device + " has " + theirs + ", " + device +
                       " has " + ours + ". " + remedy,
                   device, direction == Direction::kForward ? &ticket : nullptr);
    };
    if (first.part->channels != part->channels) {
      refuse(std::to_string(first.part->channels) + " channels",
             std::to_string(part->channels) + " channels",
             "Give every device data of the same number of channels.");
    }
    if (std::strcmp(first.part->dtype, part->dtype) != 0) {
      refuse(std::string(first.part->dtype) + " data", std::string(part->dtype) + " data",
             "Cast the data of all devices to one dtype.");
    }
  }
  meeting->arrivals.push_back({device, part});
  state_->last_arrival = Clock::now();
  if (meeting->arrivals.size() < layer->expected(*meeting)) {
    if (!state_->given_up.empty()) {
      state_->fail(&lock, layer.get(), layer->title(key) + ": " + state_->given_up);
    }
    state_->wait(&lock, layer.get(), key, meeting.get(), device, ticket);
    if (!meeting->error.empty()) throw Error(meeting->error);
    return;
  }

  meeting->joining = true;
  layer->meetings.erase(key);
  const std::vector<Part*> parts = meeting->parts(layer->config.devices);
  lock.unlock();
  std::string error;
  try {
    join(parts);
  } catch (const Error& failure) {
    error = failure.what();
  } catch (const std::exception& failure) {
    // The title is configured.
    lock.lock();
    error = layer->title(key) + ": " + failure.what();
    lock.unlock();
  }
  lock.lock();
  meeting->end(error);
  if (!error.empty()) state_->fail(&lock, layer.get(), error);
}

namespace {

struct SumsPart : Part {
  std::vector<ChannelSums>* sums;
  double* count;
};

}  // namespace

void AllReduce::reduce(const LayerPtr& layer, const Ticket& ticket, Direction direction,
                       const std::string& device, const char* dtype, std::vector<ChannelSums>* sums,
                       double* count) {
  SumsPart mine;
  mine.channels = static_cast<int64_t>(sums->size());
  mine.dtype = dtype;
  mine.sums = sums;
  mine.count = count;
  meet(layer, ticket, direction, device, &mine, [&](const std::vector<Part*>& parts) {
    std::vector<ChannelSums> all(sums->size());
    double all_count = 0;
    for (const Part* part : parts) {
      const auto* const p = static_cast<const SumsPart*>(part);
      for (size_t c = 0; c < all.size(); ++c) all[c].add((*p->sums)[c]);
      all_count += *p->count;
    }
    exchange(layer.get(), ticket, direction, &all, &all_count);
    for (Part* part : parts) {
      *static_cast<SumsPart*>(part)->sums = all;
      *static_cast<SumsPart*>(part)->count = all_count;
    }
  });
}

void AllReduce::set_present(const std::vector<std::string>& devices) {
  const State::Lock lock(state_->mutex);
  state_->present =
      devices.empty() ? nullptr : std::make_shared<const std::vector<std::string>>(devices);
  for (const auto& entry : state_->layers) {
    if (const LayerPtr layer = entry.second.lock()) layer->line_up();
  }
}

void AllReduce::set_absent(bool absent) {
  const State::Lock lock(state_->mutex);
  state_->absent = absent;
}

void AllReduce::give_up(const std::string& reason) {
  State::Lock lock(state_->mutex);
  state_->given_up = reason;
  if (reason.empty() || !state_->closed.empty()) return;
  std::vector<std::pair<LayerPtr, std::string>> waiting;
  for (const auto& entry : state_->layers) {
    const LayerPtr layer = entry.second.lock();
    if (layer && !layer->meetings.empty()) {
      waiting.emplace_back(layer, layer->title(layer->meetings.begin()->first) + ": " + reason);
    }
  }
  for (const auto& [layer, text] : waiting) {
    state_->end_step(&lock, layer.get(), text);
    lock.lock();
  }
}

bool AllReduce::has_data(const LayerPtr& layer) const {
  const State::Lock lock(state_->mutex);
  return !state_->absent || (layer && layer->config.exchanges());
}

void AllReduce::fail(const LayerPtr& layer, const std::string& text, const std::string& device,
                     const Ticket* forward) {
  State::Lock lock(state_->mutex);
  if (layer && state_->closed.empty()) {
    state_->end_step(&lock, layer.get(), text, device, forward);
  }
}

void AllReduce::lose(int64_t number, int64_t generation, Direction direction,
                     const std::string& device) {
  const State::Lock lock(state_->mutex);
  const LayerPtr layer = state_->find(number);
  if (!layer || layer->generation != generation) return;
  for (const auto& [key, meeting] : layer->meetings) {
    const auto group = layer->group_of(meeting->arrivals[0].device, meeting->present);
    if (std::get<0>(key) != direction || meeting->has(device) || !contains(group, device)) continue;
    meeting->lost = device;
    meeting->changed.notify_all();
  }
}

void AllReduce::settle(int64_t number, int64_t generation, const std::string& device) {
  const State::Lock lock(state_->mutex);
  const LayerPtr layer = state_->find(number);
  if (layer && layer->generation == generation) layer->unsettled.erase(device);
}

void AllReduce::tell_next(const std::string& text) {
  const State::Lock lock(state_->mutex);
  state_->untold = text;
}

void AllReduce::start_over() {
  const State::Lock lock(state_->mutex);
  for (auto& entry : state_->layers) {
    const LayerPtr layer = entry.second.lock();
    if (!layer) continue;
    layer->start_anew("It began before this process was forked.");
    layer->unsettled.clear();
  }
}

void AllReduce::close(const std::string& reason) {
  const State::Lock lock(state_->mutex);
  state_->closed = reason;
  for (auto& entry : state_->layers) {
    const LayerPtr layer = entry.second.lock();
    if (!layer || layer->meetings.empty()) continue;
    const auto& first = *layer->meetings.begin();
    state_->closed = "The process ended before " + layer->title(first.first) + " was complete. " +
                     layer->attendance(*first.second);
    layer->fail(state_->closed);
  }
}

}  // namespace gluon_syncbn
