#include "rendezvous/layer.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "processes/text.h"

namespace gluon_syncbn {
namespace {

constexpr char kUsualCauses[] =
    "\nUsual causes (docs/troubleshooting.md#a-device-waits-for-another):";

std::string no_backward_text(const std::string& who) {
  return "autograd.backward was not called for the loss of " + who +
         ", or one device's loss uses an output of the net that another's does not: use each in "
         "all of them, times 0 where it must not count, or hybridize the net";
}

bool contains(const std::vector<std::string>& names, const std::string& name) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

}  // namespace

bool is_cpu(const std::string& device) { return device.compare(0, 3, "cpu") == 0; }

std::string workspaces_text() {
  const char* const set = std::getenv("MXNET_CPU_TEMP_COPY");
  const int workspaces = set ? std::atoi(set) : 4;  // MXNet's default.
  return "an operator of one CPU context holds one of the " + std::to_string(workspaces) +
         " workspaces of this thread, which another needs to get here: call each context in a "
         "thread of its own (docs/guide.md#several-cpu-contexts), or take one process per context. "
         "Or set MXNET_CPU_TEMP_COPY to more before MXNet starts.";
}

std::string gone_text(const std::string& device) {
  return device + " cannot go backward through this call any more." + kUsualCauses + "\n- " +
         no_backward_text(device) + "\n- an earlier operation on " + device +
         " has failed: its error comes before this one, or mx.nd.waitall() raises it.";
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

int64_t Layer::next_sequence(const std::string& device, int64_t node) {
  return forward_calls[device].insert({node, first_calls[node]}).first->second++;
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

void Layer::end_meetings(const std::string& why) {
  for (auto& entry : meetings) entry.second->end(why);
  meetings.clear();
}

std::string Layer::configuration_error(const std::string& device) const {
  if (!config.config_error.empty()) return config.config_error;
  if (config.devices.empty()) return "";
  const std::string devices =
      std::to_string(config.devices.size()) + " (" + comma_separated(config.devices) + ")";
  if (config.meeting_size() > config.devices.size()) {
    return "SyncBatchNorm '" + config.name +
           "' was made with num_devices=" + std::to_string(config.num_devices) +
           ", but the devices of its parameters are " + devices +
           ". Leave num_devices out, or initialize the net on all devices.";
  }
  if (contains(config.devices, device)) return "";
  return "SyncBatchNorm '" + config.name + "' was called on " + device + ", but its devices are " +
         devices +
         ". Initialize the net on every device in use, or name them all in its SyncGroup.";
}

std::string Layer::participation_error(const std::string& device,
                                       const ActiveDevices& active) const {
  if (active && !contains(*active, device)) {
    return "SyncBatchNorm '" + config.name + "' was called on " + device +
           ", but the active devices of this step are " + comma_separated(*active) +
           ": name it in gluon_syncbn.participants.";
  }
  const size_t most = config.devices.empty() ? config.meeting_size() : config.num_devices;
  if (!most || forward_calls.size() != most || forward_calls.count(device)) return "";
  if (!config.num_devices) {
    return "SyncBatchNorm '" + config.name + "' was called on " + forward_calls.begin()->first +
           " and on " + device +
           " by a graph that has parameters of its own, so the number of devices is unknown. "
           "Call gluon_syncbn.convert_sync_batchnorm(net), which lets the graph of a SymbolBlock "
           "synchronize on the graph's parameters, or make the layer with num_devices or with a "
           "SyncGroup that names the devices.";
  }
  return "SyncBatchNorm '" + config.name +
         "' was made with num_devices=" + std::to_string(config.num_devices) + ", and " + device +
         " arrived after as many others. Leave num_devices out, or name the devices that take "
         "part in a SyncGroup.";
}

std::string Layer::arrival_error(const Key& key, const Meeting& meeting,
                                 const Meeting::Arrival& arrival) const {
  if (meeting.arrivals.empty()) return "";
  if (meeting.has(arrival.device)) {
    return title(key) + ": " + arrival.device +
           " arrived a second time before the others had arrived. " + arrivals_text(meeting) +
           " Call backward for all devices before any of them goes through the same call again.";
  }
  const Meeting::Arrival& first = meeting.arrivals[0];
  const auto differ = [&](const std::string& theirs, const std::string& ours,
                          const std::string& remedy) {
    return title(key) + ": " + first.device + " has " + theirs + ", " + arrival.device + " has " +
           ours + ". " + remedy;
  };
  if (first.own->C != arrival.own->C) {
    return differ(std::to_string(first.own->C) + " channels",
                  std::to_string(arrival.own->C) + " channels",
                  "Give every device data of the same number of channels.");
  }
  if (std::strcmp(first.dtype, arrival.dtype) != 0) {
    return differ(std::string(first.dtype) + " data", std::string(arrival.dtype) + " data",
                  "Cast the data of all devices to one dtype.");
  }
  return "";
}

size_t Layer::expected(const Meeting& meeting) const {
  if (!meeting.active) return config.meeting_size();
  return group_of(meeting.arrivals[0].device, meeting.active).size();
}

std::vector<std::string> Layer::missing(const Meeting& meeting) const {
  std::vector<std::string> missing;
  for (const std::string& device : group_of(meeting.arrivals[0].device, meeting.active)) {
    if (!meeting.has(device)) missing.push_back(device);
  }
  return missing;
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

std::string Layer::title(const Key& key) const {
  return "SyncBatchNorm '" + config.name + "', " +
         (key.direction == Direction::kForward ? "forward" : "backward") + " call " +
         std::to_string(key.sequence);
}

std::string Layer::arrivals_text(const Meeting& meeting) const {
  std::vector<std::string> arrived;
  for (const Meeting::Arrival& arrival : meeting.arrivals) arrived.push_back(arrival.device);
  const std::vector<std::string> others = missing(meeting);
  const size_t count = expected(meeting) - arrived.size();
  std::string text = "Arrived: " + comma_separated(arrived) + ". Missing: ";
  if (config.devices.empty()) return text + std::to_string(count) + " more.";
  if (count < others.size()) text += std::to_string(count) + " of ";
  return text + comma_separated(others) + ".";
}

std::string Layer::causes(const Key& key, const Meeting& meeting, const Calls& calls) const {
  const std::vector<std::string> others = missing(meeting);
  const auto is = [&](Calls::Standing standing) {
    return std::any_of(others.begin(), others.end(), [&](const std::string& device) {
      return calls.standing({id, device}, meeting.opened) == standing;
    });
  };
  const bool is_known = !others.empty() && !is(Calls::Standing::kUnknown);
  const std::string who = others.empty() ? "a device" : comma_separated(others);
  std::vector<std::string> causes;
  if (key.direction == Direction::kBackward) {
    causes.push_back(no_backward_text(who));
    causes.push_back(
        "the losses of several devices were added up on one of them, and MXNet fuses what waits "
        "for this device with what another needs: give autograd.backward the list of the losses");
  } else if (is_known && !is(Calls::Standing::kNotMade)) {
    causes.push_back("the call of " + who +
                     " has been made, and operations before it have not ended");
  } else {
    causes.push_back("the loop over the devices left out " + who +
                     ", ended before (a last batch with too few samples: "
                     "gluon_syncbn.participants; an exception), or waited for a result first");
    if (config.num_devices > 0) {
      causes.push_back("num_devices=" + std::to_string(config.num_devices) +
                       " is larger than the number of devices in use");
    } else if (key.sequence == 0) {
      causes.push_back(
          "threads make the first call of a net whose parameters have no values yet (gluoncv's "
          "DataParallelModel: give it sync=False)");
    }
  }
  const bool has_cpus = std::count_if(config.devices.begin(), config.devices.end(), is_cpu) > 1;
  if (has_cpus && !(is_known && is(Calls::Standing::kNotMade))) {
    causes.push_back(workspaces_text());
  }
  std::string text = kUsualCauses;
  for (const std::string& cause : causes) text += "\n- " + cause;
  return text;
}

}  // namespace gluon_syncbn
