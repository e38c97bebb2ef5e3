#include "meetings.h"

#include <algorithm>
#include <cstdlib>
#include <sstream>
#include <utility>

#include "thread_pool.h"

namespace gluon_syncbn {
namespace {

constexpr Seconds kGraceAfterInterrupt{0.5};
// How long at most before a waiting call looks again for devices that cannot come.
constexpr Seconds kLongestLook{1};
// Devices come close after each other, and to wake a sleeping thread takes as long as many a layer:
// so a call first looks around for this long, unless somebody else wants the core, and lends a hand
// with what the last to come does for all.
constexpr Seconds kAwake{0.0003};

bool is_cpu(const std::string& device) { return device.compare(0, 3, "cpu") == 0; }

}  // namespace

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

size_t LayerConfig::group_of(const std::string& device) const {
  const auto found = std::find(devices.begin(), devices.end(), device);
  if (group_size == 0 || found == devices.end()) return 0;
  return static_cast<size_t>(found - devices.begin()) / group_size;
}

bool AllReduce::Meeting::has(const std::string& device) const {
  return std::any_of(arrivals.begin(), arrivals.end(),
                     [&](const Arrival& a) { return a.device == device; });
}

void AllReduce::Meeting::end(const std::string& why) {
  error = why;
  over = true;
  changed.notify_all();
}

std::vector<Part*> AllReduce::Meeting::parts(const std::vector<std::string>& ranks) {
  const auto rank = [&](const Arrival& a) {
    return std::find(ranks.begin(), ranks.end(), a.device);
  };
  std::sort(arrivals.begin(), arrivals.end(),
            [&](const Arrival& a, const Arrival& b) { return rank(a) < rank(b); });
  std::vector<Part*> parts;
  for (const Arrival& arrival : arrivals) parts.push_back(arrival.part);
  return parts;
}

std::string AllReduce::Layer::title(const Key& key) const {
  return "SyncBatchNorm '" + config.name + "', " +
         (std::get<0>(key) == Direction::kForward ? "forward" : "backward") + " call " +
         std::to_string(std::get<2>(key));
}

void AllReduce::Layer::line_up() {
  owed.clear();
  for (const auto& device : forward_calls) {
    for (const auto& calls : device.second) {
      int64_t& first = first_calls[calls.first];
      first = std::max(first, calls.second);
    }
  }
  forward_calls.clear();
}

Present AllReduce::Layer::present_of(const Present& present) const {
  const auto takes_part = [&](const std::string& name) { return contains(*present, name); };
  const bool some =
      present && std::any_of(config.devices.begin(), config.devices.end(), takes_part);
  return some ? present : nullptr;
}

std::vector<std::string> AllReduce::Layer::group_of(const std::string& device,
                                                    const Present& present) const {
  const size_t group = config.group_of(device);
  std::vector<std::string> devices;
  for (const std::string& other : config.devices) {
    if (config.group_of(other) == group && (!present || contains(*present, other))) {
      devices.push_back(other);
    }
  }
  return devices;
}

size_t AllReduce::Layer::expected(const Meeting& meeting) const {
  if (!meeting.present) return config.participants();
  return group_of(meeting.arrivals[0].device, meeting.present).size();
}

std::string AllReduce::Layer::attendance(const Meeting& meeting) const {
  std::vector<std::string> came, absent;
  for (const Meeting::Arrival& arrival : meeting.arrivals) came.push_back(arrival.device);
  for (const std::string& device : group_of(came[0], meeting.present)) {
    if (!meeting.has(device)) absent.push_back(device);
  }
  const size_t missing = expected(meeting) - came.size();
  if (config.devices.empty()) {
    return "Came: " + join(came) + ". Missing: " + std::to_string(missing) + " more.";
  }
  const std::string share = missing < absent.size() ? std::to_string(missing) + " of " : "";
  return "Came: " + join(came) + ". Missing: " + share + join(absent) + ".";
}

std::string AllReduce::Layer::causes(Direction direction) const {
  std::string text =
      "Usual causes: the loop over the devices left one out or ended early (a last batch smaller "
      "than the number of devices, an exception between two calls); the result of one device is "
      "waited for before the next is called; ";
  text +=
      direction == Direction::kBackward
          ? "backward is not called for every device; the losses of several devices were added up "
            "on one of them, and MXNet makes one operation of what waits for this device and of "
            "what leads to another: give autograd.backward the list of the losses."
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

void AllReduce::Layer::start_anew(const std::string& why) {
  for (auto& entry : meetings) {
    entry.second->end(why);
  }
  meetings.clear();
  forward_calls.clear();
  first_calls.clear();
  owed.clear();
  mail.clear();
  failure = why;
  ++generation;
  mail_came.notify_all();
}

void AllReduce::Layer::fail(const std::string& why, const std::string& device,
                            const Ticket* forward) {
  std::set<std::string> late;
  if (forward && forward->generation == generation) {
    for (const std::string& other : group_of(device, forward->present)) {
      const auto calls = forward_calls.find(other);
      const bool has_called = calls != forward_calls.end() && calls->second.count(forward->place) &&
                              calls->second.at(forward->place) > forward->number;
      if (other != device && !has_called) late.insert(other);
    }
  }
  start_anew(why);
  if (!late.empty()) owed[forward->place] = std::move(late);
  unsettled.insert(config.devices.begin(), config.devices.end());
}

Error AllReduce::Layer::failed_before() const {
  return Error("This call is part of a step that failed before. " + failure);
}

AllReduce::LayerPtr AllReduce::State::find(int64_t number) const {
  const auto found = layers.find(number);
  return found == layers.end() ? nullptr : found->second.lock();
}

void AllReduce::State::check_open(const LayerPtr& layer) const {
  if (!closed.empty()) throw Error(closed);
  if (!layer) {
    throw Error(
        "The SyncBatchNorm of this graph does not exist in this process: the graph was loaded "
        "from a file, or its layer was deleted. To train, call "
        "gluon_syncbn.convert_sync_batchnorm(net), or build the net again and load its "
        "parameters.");
  }
}

void AllReduce::State::end_step(Lock* lock, Layer* layer, const std::string& text,
                                const std::string& device, const Ticket* forward) {
  layer->fail(text, device, forward);
  // Nobody knows the arrays of a layer that is gone.
  if (!registered.count(layer->number)) layer->unsettled.clear();
  const int64_t generation = layer->generation;
  const auto failed = observer.failed;
  lock->unlock();
  if (failed) failed(layer->number, generation, text);
}

void AllReduce::State::fail(Lock* lock, Layer* layer, const std::string& text,
                            const std::string& device, const Ticket* forward) {
  end_step(lock, layer, text, device, forward);
  throw Error(text);
}

void AllReduce::State::wait(Lock* lock, Layer* layer, const Layer::Key& key, Meeting* meeting,
                            const std::string& device, const Ticket& ticket) {
  const Seconds timeout(layer->config.timeout_seconds);
  const Clock::time_point start = Clock::now();
  const unsigned interrupts_before = AllReduce::interrupts();
  Seconds since_interrupt{0}, next_look{0};
  lock->unlock();
  thread_pool().help([&] { return meeting->over.load(); }, kAwake);
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
    if (!meeting->lost.empty()) {
      fail(lock, layer,
           story() + "An earlier operation on " + meeting->lost +
               " has failed, and MXNet runs nothing that depends on it: mx.nd.waitall() raises its "
               "error.",
           meeting->lost, direction == Direction::kForward ? &ticket : nullptr);
    }
    if (waited > timeout) fail(lock, layer, story() + layer->causes(direction));
    if (observer.waits && waited > next_look) {
      next_look = std::min(2 * waited, waited + kLongestLook);
      const auto waits = observer.waits;
      lock->unlock();
      waits(layer->number, ticket.generation, direction);
      lock->lock();
      if (meeting->over) return;
    }

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

}  // namespace gluon_syncbn
