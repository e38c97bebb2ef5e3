// The texts that users read: who has arrived at a meeting and who has not, for how long, and the
// usual causes.
#include <algorithm>
#include <cstdlib>

#include "rendezvous/state.h"

namespace gluon_syncbn {
namespace {

constexpr char kUsualCauses[] =
    "\nUsual causes (docs/troubleshooting.md#a-device-waits-for-another):";

std::string no_backward_text(const std::string& who) {
  return "autograd.backward was not called for the loss of " + who +
         ", or one device's loss uses an output of the net that another's does not: use each in "
         "all of them, times 0 where it must not count, or hybridize the net";
}

}  // namespace

std::string Layer::title(const Key& key) const {
  return "SyncBatchNorm '" + config.name + "', " +
         (key.direction == Direction::kForward ? "forward" : "backward") + " call " +
         std::to_string(key.sequence);
}

std::vector<std::string> Layer::missing(const Meeting& meeting) const {
  std::vector<std::string> missing;
  for (const std::string& device : group_of(meeting.arrivals[0].device, meeting.active)) {
    if (!meeting.has(device)) missing.push_back(device);
  }
  return missing;
}

std::vector<std::string> Layer::ahead(const Key& key) const {
  std::vector<std::string> devices;
  for (const auto& [other, meeting] : meetings) {
    if (other.direction != key.direction || other.node != key.node ||
        other.sequence <= key.sequence) {
      continue;
    }
    for (const Meeting::Arrival& arrival : meeting->arrivals) {
      if (!contains(devices, arrival.device)) devices.push_back(arrival.device);
    }
  }
  return devices;
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

std::string Layer::waits_text(const Key& key, const Meeting& meeting, const std::string& device,
                              Seconds waited) const {
  const std::vector<std::string> further = ahead(key);
  return title(key) + ": " + device + " has waited " + seconds_text(waited) +
         " for the other devices.\n" + arrivals_text(meeting) +
         (further.empty() ? "" : " Already in a later call: " + comma_separated(further) + ".");
}

std::string gone_text(const std::string& device) {
  return device + " cannot go backward through this call any more." + kUsualCauses + "\n- " +
         no_backward_text(device) + "\n- an earlier operation on " + device +
         " has failed: its error comes before this one, or mx.nd.waitall() raises it.";
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
  } else if (!ahead(key).empty()) {
    causes.push_back("the net is called more often on one device than on another");
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

std::string workspaces_text() {
  const char* const set = std::getenv("MXNET_CPU_TEMP_COPY");
  const int workspaces = set ? std::atoi(set) : 4;  // MXNet's default.
  return "an operator of one CPU context holds one of the " + std::to_string(workspaces) +
         " workspaces of this thread, which another needs to get here: call each context in a "
         "thread of its own (docs/guide.md#several-cpu-contexts), or take one process per context. "
         "Or set MXNET_CPU_TEMP_COPY to more before MXNet starts.";
}

std::string State::where_missing_wait(const Layer& layer, const Meeting& meeting) const {
  const std::vector<std::string> missing = layer.missing(meeting);
  for (const LayerPtr& other : all()) {
    for (const auto& [key, waiting] : other->meetings) {
      const std::vector<std::string> awaited = other->missing(*waiting);
      if (waiting.get() == &meeting || awaited.empty()) continue;
      for (const Meeting::Arrival& arrival : waiting->arrivals) {
        if (!contains(missing, arrival.device)) continue;
        return " " + arrival.device + " waits for " + comma_separated(awaited) + " in " +
               other->title(key) + ".";
      }
    }
  }
  return "";
}

}  // namespace gluon_syncbn
