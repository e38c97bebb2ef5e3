#include "all_reduce.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <set>
#include <sstream>
#include <thread>
#include <tuple>
#include <utility>

#include "mailbox.h"

namespace gluon_syncbn {
namespace {

using Clock = std::chrono::steady_clock;
using Seconds = std::chrono::duration<double>;

// How often a waiting call looks up from its sleep for Ctrl-C.
constexpr Seconds kSlice{0.1};
constexpr Seconds kGraceAfterInterrupt{0.5};
// Devices come close after each other, and to wake a sleeping thread takes as long as many a layer:
// so a call first looks around for this long, as long as nobody else wants the core.
constexpr Seconds kAwake{0.0003};
// The share of the timeout after which a warning is given.
constexpr double kWarnAfter = 0.1;
// Of ChannelSums, in doubles.
constexpr size_t kSumsSize = 6;

// Counts Ctrl-C. A process has one keyboard, so this is the one thing that all instances share.
std::atomic<unsigned> interrupt_count{0};

std::string join(const std::vector<std::string>& names) {
  std::string text;
  for (const std::string& name : names) text += (text.empty() ? "" : ", ") + name;
  return text.empty() ? "none" : text;
}

std::string number(double value) {
  std::ostringstream text;
  text.precision(3);
  text << value;
  return text.str();
}

bool contains(const std::vector<std::string>& names, const std::string& name) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

bool is_cpu(const std::string& device) { return device.compare(0, 3, "cpu") == 0; }

}  // namespace

size_t LayerConfig::group_of(const std::string& device) const {
  const auto found = std::find(devices.begin(), devices.end(), device);
  if (group_size == 0 || found == devices.end()) return 0;
  return static_cast<size_t>(found - devices.begin()) / group_size;
}

struct AllReduce::Meeting {
  struct Arrival {
    std::string device;
    Part* part;
  };

  std::vector<Arrival> arrivals;
  decltype(Ticket::present) present;
  bool warned = false;
  // All have come, and what they came for is being done: nobody leaves.
  bool joining = false;
  std::string error;
  // To look at without the lock.
  std::atomic<bool> over{false};
  std::condition_variable changed;

  bool has(const std::string& device) const {
    return std::any_of(arrivals.begin(), arrivals.end(),
                       [&](const Arrival& a) { return a.device == device; });
  }

  void end(const std::string& why = "") {
    error = why;
    over = true;
    changed.notify_all();
  }

  // What everyone brought, in rank order whoever came last.
  std::vector<Part*> parts(const std::vector<std::string>& ranks) {
    const auto rank = [&](const Arrival& a) {
      return std::find(ranks.begin(), ranks.end(), a.device);
    };
    std::sort(arrivals.begin(), arrivals.end(),
              [&](const Arrival& a, const Arrival& b) { return rank(a) < rank(b); });
    std::vector<Part*> parts;
    for (const Arrival& arrival : arrivals) parts.push_back(arrival.part);
    return parts;
  }
};

struct AllReduce::Layer {
  // Direction, place, number, group.
  using Key = std::tuple<Direction, int64_t, int64_t, size_t>;

  int64_t number = 0;
  LayerConfig config;
  int64_t generation = 0;
  // Why the last generation ended, and the devices that have not left it yet.
  std::string failure;
  std::set<std::string> unsettled;
  // By device, then by place: the number of the next call.
  std::map<std::string, std::map<int64_t, int64_t>> forward_calls;
  // By place: the number of the first call of a device that has made none yet.
  std::map<int64_t, int64_t> first_calls;
  std::map<Key, std::shared_ptr<Meeting>> meetings;
  // By place: what came of backward calls that this process has not come to, or not all others.
  std::map<int64_t, Mailbox> mail;
  std::condition_variable mail_came;

  std::string title(const Key& key) const {
    return "SyncBatchNorm '" + config.name + "', " +
           (std::get<0>(key) == Direction::kForward ? "forward" : "backward") + " call " +
           std::to_string(std::get<2>(key));
  }

  // Every device goes on from the same number, also one that took no part for a while.
  void line_up() {
    for (const auto& device : forward_calls) {
      for (const auto& calls : device.second) {
        int64_t& first = first_calls[calls.first];
        first = std::max(first, calls.second);
      }
    }
    forward_calls.clear();
  }

  // Null where all take part, or none.
  decltype(Ticket::present) present_of(const decltype(Ticket::present)& present) const {
    const auto takes_part = [&](const std::string& name) { return contains(*present, name); };
    const bool some =
        present && std::any_of(config.devices.begin(), config.devices.end(), takes_part);
    return some ? present : nullptr;
  }

  // The devices of one that may come to a meeting, itself included, in rank order.
  std::vector<std::string> group_of(const std::string& device,
                                    const decltype(Ticket::present)& present) const {
    const size_t group = config.group_of(device);
    std::vector<std::string> devices;
    for (const std::string& other : config.devices) {
      if (config.group_of(other) == group && (!present || contains(*present, other))) {
        devices.push_back(other);
      }
    }
    return devices;
  }

  // How many come to a meeting.
  size_t expected(const Meeting& meeting) const {
    if (!meeting.present) return config.participants();
    return group_of(meeting.arrivals[0].device, meeting.present).size();
  }

  // "Came: cpu(0). Missing: cpu(1)."
  std::string attendance(const Meeting& meeting) const {
    std::vector<std::string> came, absent;
    for (const Meeting::Arrival& arrival : meeting.arrivals) came.push_back(arrival.device);
    for (const std::string& device : group_of(came[0], meeting.present)) {
      if (!meeting.has(device)) absent.push_back(device);
    }
    const size_t missing = expected(meeting) - came.size();
    const std::string share = missing < absent.size() ? std::to_string(missing) + " of " : "";
    return "Came: " + join(came) + ". Missing: " + share + join(absent) + ".";
  }

  std::string causes(Direction direction) const {
    std::string text =
        "Usual causes: the loop over the devices left one out or ended early (a last batch smaller "
        "than the number of devices, an exception between two calls); the result of one device is "
        "waited for before the next is called; ";
    text += direction == Direction::kBackward
                ? "backward is not called for every device."
                : "the layer is called more often on one device than on another; num_devices is "
                  "larger than the number of devices in use.";
    if (std::count_if(config.devices.begin(), config.devices.end(), is_cpu) > 1) {
      const char* slots = std::getenv("MXNET_CPU_TEMP_COPY");
      text +=
          " With several CPU contexts in one process also: MXNet has few workspaces for all of "
          "them together, and a convolution of one device can hold the one that another needs to "
          "get here. Set MXNET_CPU_TEMP_COPY=4096 and MXNET_CPU_PARALLEL_RAND_COPY=64 in the "
          "environment before MXNet starts (now MXNET_CPU_TEMP_COPY is ";
      text += slots ? std::string(slots) + ")." : "not set).";
    }
    return text;
  }

  // Ends all meetings and starts a new generation.
  void start_anew(const std::string& why) {
    for (auto& entry : meetings) {
      entry.second->end(why);
    }
    meetings.clear();
    forward_calls.clear();
    first_calls.clear();
    mail.clear();
    failure = why;
    ++generation;
    mail_came.notify_all();
  }

  void fail(const std::string& why) {
    start_anew(why);
    unsettled.insert(config.devices.begin(), config.devices.end());
  }

  Error failed_before() const {
    return Error("This call is part of a step that failed before. " + failure);
  }
};

struct AllReduce::State {
  using Lock = std::unique_lock<std::mutex>;

  mutable std::mutex mutex;
  std::map<int64_t, LayerPtr> registered;
  std::map<int64_t, std::weak_ptr<Layer>> layers;
  std::string closed;
  std::string untold;
  bool absent = false;
  decltype(Ticket::present) present;
  Observer observer;

  LayerPtr find(int64_t number) const {
    const auto found = layers.find(number);
    return found == layers.end() ? nullptr : found->second.lock();
  }

  void check_open(const LayerPtr& layer) const {
    if (!closed.empty()) throw Error(closed);
    if (!layer) {
      throw Error(
          "The SyncBatchNorm of this graph does not exist in this process: the graph was loaded "
          "from a file, or its layer was deleted. To train, build the net again and load its "
          "parameters.");
    }
  }

  // Ends the step for everyone at this layer, and tells the observer, with the lock open.
  void end_step(Lock* lock, Layer* layer, const std::string& text) {
    layer->fail(text);
    const int64_t generation = layer->generation;
    const auto failed = observer.failed;
    lock->unlock();
    if (failed) failed(layer->number, generation, text);
  }

  [[noreturn]] void fail(Lock* lock, Layer* layer, const std::string& text) {
    end_step(lock, layer, text);
    throw Error(text);
  }

  // Sleeps until the meeting is over. Throws Error when it cannot be waited for any longer.
  void wait(Lock* lock, Layer* layer, const Layer::Key& key, Meeting* meeting,
            const std::string& device) {
    const Seconds timeout(layer->config.timeout_seconds);
    const Clock::time_point start = Clock::now();
    const unsigned interrupts_before = AllReduce::interrupts();
    Seconds since_interrupt{0};
    lock->unlock();
    while (!meeting->over && Clock::now() - start < kAwake) std::this_thread::yield();
    lock->lock();
    while (!meeting->over) {
      const Seconds slice = std::min(kSlice, timeout * kWarnAfter);
      meeting->changed.wait_for(*lock, slice);
      if (meeting->over) return;
      // What is done now ends by itself, and in time.
      if (meeting->joining) continue;

      const Seconds waited = Clock::now() - start;
      const auto story = [&] {
        return layer->title(key) + ": " + device + " has waited " + number(waited.count()) +
               " s for the other devices. " + layer->attendance(*meeting) + " ";
      };
      const Direction direction = std::get<0>(key);
      if (waited > timeout) fail(lock, layer, story() + layer->causes(direction));

      if (AllReduce::interrupts() != interrupts_before) since_interrupt += slice;
      if (since_interrupt > kGraceAfterInterrupt) fail(lock, layer, story() + "Interrupted.");

      if (!meeting->warned && waited > timeout * kWarnAfter) {
        meeting->warned = true;
        if (const auto warn = observer.warn) {
          const std::string text = story() + "After " + number(timeout.count()) +
                                   " s this is an error. " + layer->causes(direction);
          lock->unlock();
          warn(text);
          lock->lock();
        }
      }
    }
  }
};

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
    layer->start_anew("The devices of SyncBatchNorm '" + config.name + "' were changed from " +
                      join(layer->config.devices) + " to " + join(config.devices) + ".");
    layer->unsettled.clear();
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
  return !layer->config.exchanges() && !layer->config.has_gpus;
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
  const auto devices = [&] {
    return std::to_string(config.devices.size()) + " (" + join(config.devices) + ")";
  };
  if (config.participants() > config.devices.size()) {
    fail("SyncBatchNorm '" + config.name + "' was made with num_devices=" +
         std::to_string(config.num_devices) + ", but the devices of its parameters are " +
         devices() + ". Leave num_devices out, or initialize the net on all devices.");
  }
  if (!contains(config.devices, device)) {
    fail("SyncBatchNorm '" + config.name + "' was called on " + device + ", but its devices are " +
         devices() +
         ". Initialize the net on every device in use, or name them all in its SyncGroup.");
  }
  if (layer->unsettled.count(device)) throw layer->failed_before();
  const auto present = layer->present_of(state_->present);
  if (present && !contains(*present, device)) {
    fail("SyncBatchNorm '" + config.name + "' was called on " + device +
         ", and those who take part in this step are " + join(*present) +
         ": name it in gluon_syncbn.participants.");
  }
  if (config.num_devices && layer->forward_calls.size() == config.num_devices &&
      !layer->forward_calls.count(device)) {
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
                     layer->attendance(*meeting) + " Call the net once for each device and step.");
  }
  if (!meeting->arrivals.empty()) {
    const Meeting::Arrival& first = meeting->arrivals[0];
    const auto refuse = [&](const std::string& theirs, const std::string& ours,
                            const std::string& remedy) {
      state_->fail(&lock, layer.get(),
                   layer->title(key) + ": " + first.device + " has " + theirs + ", " + device +
                       " has " + ours + ". " + remedy);
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
  if (meeting->arrivals.size() < layer->expected(*meeting)) {
    state_->wait(&lock, layer.get(), key, meeting.get(), device);
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
    error = layer->title(key) + ": " + failure.what();
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

void AllReduce::exchange(Layer* layer, const Ticket& ticket, Direction direction,
                         std::vector<ChannelSums>* sums, double* count) {
  static_assert(sizeof(ChannelSums) == kSumsSize * sizeof(double), "sums travel as they are");
  Message message;
  LayerConfig config;
  bool absent;
  const decltype(Observer::exchange)* send;
  {
    const State::Lock lock(state_->mutex);
    config = layer->config;
    if (!config.exchanges()) return;
    absent = state_->absent;
    send = &state_->observer.exchange;
    message.title = layer->title({direction, ticket.place, ticket.number, 0});
  }
  const std::string way = direction == Direction::kForward ? " forward " : " backward ";
  message.layer = layer->number;
  message.key = std::to_string(layer->number) + way + std::to_string(ticket.place);
  message.channels = static_cast<int64_t>(sums->size());
  message.timeout_seconds = config.timeout_seconds;
  // The call's number, the count, the sums.
  const size_t size = 2 + kSumsSize * sums->size();
  message.values.resize(size);
  message.values[0] = static_cast<double>(ticket.number);
  if (!absent) {
    message.values[1] = *count;
    std::memcpy(&message.values[2], sums->data(), (size - 2) * sizeof(double));
  }
  std::vector<double> all(size * config.processes);
  const std::string error = (*send)(message, &all);
  if (!error.empty()) throw Error(error);
  // Forward calls come in one order, as all of them write the running statistics.
  if (direction == Direction::kBackward) sort_out(layer, ticket, config.processes, &all);

  std::fill(sums->begin(), sums->end(), ChannelSums());
  *count = 0;
  for (size_t rank = config.first_rank; rank < config.end_rank; ++rank) {
    const double* const values = &all[size * rank];
    if (values[0] != message.values[0]) {
      throw Error(message.title + ": the process of rank " + std::to_string(rank) +
                  " is at its call " + number(values[0]) +
                  " there. Every process has to call the net equally often: see "
                  "gluon_syncbn.distributed.join for uneven numbers of batches.");
    }
    *count += values[1];
    for (size_t c = 0; c < sums->size(); ++c) {
      ChannelSums part;
      std::memcpy(static_cast<void*>(&part), values + 2 + kSumsSize * c, sizeof(part));
      (*sums)[c].add(part);
    }
  }
}

void AllReduce::set_present(const std::vector<std::string>& devices) {
  const State::Lock lock(state_->mutex);
  state_->present =
      devices.empty() ? nullptr : std::make_shared<const std::vector<std::string>>(devices);
  for (const auto& entry : state_->layers) {
    if (const LayerPtr layer = entry.second.lock()) layer->line_up();
  }
}

void AllReduce::sort_out(Layer* layer, const Ticket& ticket, size_t processes,
                         std::vector<double>* round) {
  if (Mailbox::is_of_one_call(*round, processes)) return;
  const auto number_of_call = static_cast<double>(ticket.number);
  State::Lock lock(state_->mutex);
  const auto check_going_on = [&] {
    if (!state_->closed.empty()) throw Error(state_->closed);
    if (ticket.generation != layer->generation) throw layer->failed_before();
  };
  check_going_on();
  layer->mail[ticket.place].put(*round, processes);
  layer->mail_came.notify_all();
  const Seconds timeout(layer->config.timeout_seconds);
  const Clock::time_point start = Clock::now();
  const unsigned interrupts_before = AllReduce::interrupts();
  bool warned = false;
  while (!layer->mail[ticket.place].take(number_of_call, processes, round)) {
    layer->mail_came.wait_for(lock, std::min(kSlice, timeout * kWarnAfter));
    check_going_on();
    const Seconds waited = Clock::now() - start;
    const bool interrupted = AllReduce::interrupts() != interrupts_before;
    if (!interrupted && (warned || waited < timeout * kWarnAfter) && waited < timeout) continue;
    std::vector<std::string> came;
    for (const size_t rank : layer->mail[ticket.place].came(number_of_call)) {
      came.push_back(std::to_string(rank));
    }
    const std::string story = layer->title({Direction::kBackward, ticket.place, ticket.number, 0}) +
                              ": waited " + number(waited.count()) + " s for all of " +
                              std::to_string(processes) +
                              " processes to go backward through this call. Came: ranks " +
                              join(came) + "; the others went through other calls of the layer. ";
    if (interrupted) throw Error(story + "Interrupted.");
    if (waited >= timeout) throw Error(story + "Call backward for the same calls in all of them.");
    warned = true;
    if (const auto warn = state_->observer.warn) {
      lock.unlock();
      warn(story + "After " + number(timeout.count()) + " s this is an error.");
      lock.lock();
    }
  }
}

void AllReduce::set_absent(bool absent) {
  const State::Lock lock(state_->mutex);
  state_->absent = absent;
}

void AllReduce::fail(const LayerPtr& layer, const std::string& text) {
  State::Lock lock(state_->mutex);
  if (layer && state_->closed.empty()) state_->end_step(&lock, layer.get(), text);
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
