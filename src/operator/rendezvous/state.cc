#include "rendezvous/state.h"

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <sstream>
#include <utility>

#include "cpu/thread_pool.h"
#include "mxnet/interrupts.h"

namespace gluon_syncbn {
namespace {

constexpr Seconds kGraceAfterInterrupt{0.5};
// The longest time between two probes for devices that cannot arrive.
constexpr Seconds kLongestProbe{1};
// Devices arrive shortly after each other, and waking a sleeping thread takes as long as many a
// layer. So a call first stays awake this long, unless another thread wants the core, and helps the
// last device with its work for all.
constexpr Seconds kAwake{0.0003};

bool is_cpu(const std::string& device) { return device.compare(0, 3, "cpu") == 0; }

}  // namespace

std::string comma_separated(const std::vector<std::string>& names) {
  std::string text;
  for (const std::string& name : names) text += (text.empty() ? "" : ", ") + name;
  return text.empty() ? "none" : text;
}

std::string seconds_text(Seconds seconds) {
  const double digits = seconds.count() < 10 ? 100 : 1;
  std::ostringstream text;
  text.precision(15);
  text << std::round(seconds.count() * digits) / digits << " s";
  return text.str();
}

bool contains(const std::vector<std::string>& names, const std::string& name) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

bool Rendezvous::has(const std::string& device) const {
  return std::any_of(arrivals.begin(), arrivals.end(),
                     [&](const Arrival& a) { return a.device == device; });
}

void Rendezvous::end(const std::string& why) {
  error = why;
  over = true;
  changed.notify_all();
}

std::vector<Contribution*> Rendezvous::contributions(const std::vector<std::string>& ranks) {
  const auto rank = [&](const Arrival& a) {
    return std::find(ranks.begin(), ranks.end(), a.device);
  };
  std::sort(arrivals.begin(), arrivals.end(),
            [&](const Arrival& a, const Arrival& b) { return rank(a) < rank(b); });
  std::vector<Contribution*> contributions;
  for (const Arrival& arrival : arrivals) contributions.push_back(arrival.contribution);
  return contributions;
}

std::string Layer::title(const Key& key) const {
  return "SyncBatchNorm '" + config.name + "', " +
         (std::get<0>(key) == Direction::kForward ? "forward" : "backward") + " call " +
         std::to_string(std::get<2>(key));
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

size_t Layer::expected(const Rendezvous& rendezvous) const {
  if (!rendezvous.active) return config.participants();
  return group_of(rendezvous.arrivals[0].device, rendezvous.active).size();
}

void Layer::give_up_on(const std::set<std::string>& devices, Direction direction) const {
  for (const auto& [key, rendezvous] : open) {
    if (std::get<0>(key) != direction) continue;
    size_t possible = rendezvous->arrivals.size();
    std::string missing;
    for (const std::string& device : group_of(rendezvous->arrivals[0].device, rendezvous->active)) {
      if (rendezvous->has(device)) continue;
      if (devices.count(device)) {
        missing = device;
      } else {
        ++possible;
      }
    }
    if (possible >= expected(*rendezvous)) continue;
    rendezvous->unreachable = missing;
    rendezvous->changed.notify_all();
  }
}

std::string Layer::arrivals_text(const Rendezvous& rendezvous) const {
  std::vector<std::string> came, missing;
  for (const Rendezvous::Arrival& arrival : rendezvous.arrivals) came.push_back(arrival.device);
  for (const std::string& device : group_of(came[0], rendezvous.active)) {
    if (!rendezvous.has(device)) missing.push_back(device);
  }
  const size_t count = expected(rendezvous) - came.size();
  std::string text = "Came: " + comma_separated(came) + ". Missing: ";
  if (config.devices.empty()) return text + std::to_string(count) + " more.";
  if (count < missing.size()) text += std::to_string(count) + " of ";
  return text + comma_separated(missing) + ".";
}

std::string Layer::causes(Direction direction) const {
  std::string text =
      "Usual causes: the loop over the devices left one out or ended early (a last batch smaller "
      "than the number of devices, an exception between two calls); the result of one device is "
      "waited for before the next is called; ";
  text +=
      direction == Direction::kBackward
          ? "backward is not called for every device; the losses of several devices were added up "
            "on one of them, and MXNet fuses operations that wait for this device with operations "
            "that another device needs: give autograd.backward the list of the losses."
          : "the layer is called more often on one device than on another; num_devices is "
            "larger than the number of devices in use; threads make the first call of a net whose "
            "parameters have no values yet (gluoncv's DataParallelModel: give it sync=False).";
  text +=
      " Or an earlier operation on the missing device has failed, and MXNet runs nothing that "
      "depends on it: mx.nd.waitall() raises its error.";
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

void Layer::start_epoch(const std::string& why) {
  for (auto& entry : open) entry.second->end(why);
  open.clear();
  forward_calls.clear();
  first_calls.clear();
  late.clear();
  received.clear();
  failure = why;
  ++epoch;
  message_received.notify_all();
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

Error Layer::failed_before() const {
  return Error("This call is part of a step that failed before. " + failure);
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

void State::wait(Lock* lock, Layer* layer, const Layer::Key& key, Rendezvous* rendezvous,
                 const std::string& device, const CallId& id) {
  const Patience patience(layer->config.timeout_seconds);
  const unsigned interrupts_before = interrupts;
  Seconds since_interrupt{0}, next_probe{0};
  // The last GPU has no work for the threads of a CPU.
  if (is_cpu(device)) {
    lock->unlock();
    thread_pool().help([&] { return rendezvous->over.load(); }, kAwake);
    lock->lock();
  }
  while (!rendezvous->over) {
    const Seconds slice = std::min(kSlice, patience.slice(kSlice));
    if (rendezvous->unreachable.empty()) rendezvous->changed.wait_for(*lock, slice);
    if (rendezvous->over) return;
    // The last device's work ends by itself, and in time.
    if (rendezvous->combining) continue;

    const Seconds waited = patience.waited();
    const auto message = [&] {
      return layer->title(key) + ": " + device + " has waited " + seconds_text(waited) +
             " for the other devices. " + layer->arrivals_text(*rendezvous) + " ";
    };
    const Direction direction = std::get<0>(key);
    if (!rendezvous->unreachable.empty()) {
      fail(lock, layer,
           message() + "An earlier operation on " + rendezvous->unreachable +
               " has failed, and MXNet runs nothing that depends on it. mx.nd.waitall() raises its "
               "error, unless it has been raised before.",
           rendezvous->unreachable, direction == Direction::kForward ? &id : nullptr);
    }
    if (patience.is_over()) fail(lock, layer, message() + layer->causes(direction));
    if (observer.waits && waited > next_probe) {
      next_probe = std::min(2 * waited, waited + kLongestProbe);
      const auto waits = observer.waits;
      lock->unlock();
      waits(layer->id, id.epoch, direction);
      lock->lock();
      // The last device may have begun to work with this one's contribution meanwhile.
      if (rendezvous->over || rendezvous->combining) continue;
    }

    if (interrupts != interrupts_before) since_interrupt += slice;
    if (since_interrupt > kGraceAfterInterrupt) fail(lock, layer, message() + "Interrupted.");

    if (!rendezvous->warned && patience.is_long()) {
      rendezvous->warned = true;
      if (const auto warn = observer.warn) {
        const std::string text = message() + "After " + seconds_text(patience.timeout()) +
                                 " this is an error. " + layer->causes(direction);
        lock->unlock();
        warn(text);
        lock->lock();
      }
    }
  }
}

}  // namespace gluon_syncbn
