// A layer, and the meetings of its devices: who belongs to one, who is missing, who may not come,
// and the texts about them that users read. No lock of its own: that of Rendezvous guards all.
#ifndef GLUON_SYNCBN_RENDEZVOUS_LAYER_H_
#define GLUON_SYNCBN_RENDEZVOUS_LAYER_H_

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "numerics/pass.h"
#include "processes/layer_messages.h"
#include "rendezvous/calls.h"
#include "rendezvous/types.h"
#include "threads/patience.h"

namespace gluon_syncbn {

bool is_cpu(const std::string& device);
// How many workspaces the CPU contexts have, and what to set.
std::string workspaces_text();
// Why a device has no backward.
std::string gone_text(const std::string& device);

// One call of all devices in one direction, of which some have arrived.
struct Meeting {
  struct Arrival {
    std::string device;
    const char* dtype;
    const PassSums* own;
  };

  ActiveDevices active;
  std::vector<Arrival> arrivals;
  // The last device is at work. That ends by itself or by its own timeout, and uses what the others
  // have brought: no call may leave.
  bool is_combining = false;
  bool has_warned = false;
  std::string error;
  // The ticket of the next probe when it was opened.
  Calls::Ticket opened;
  PassSums all;
  // Also read without the lock.
  std::atomic<bool> over{false};
  std::condition_variable changed;

  bool has(const std::string& device) const;
  void end(const std::string& why = "");
  // What each device has brought, in rank order, whatever the order of arrival.
  std::vector<const PassSums*> in_rank_order(const std::vector<std::string>& ranks);
};

// Lives as long as it is registered or a call uses it.
struct Layer {
  struct Key {
    Direction direction;
    int64_t node, sequence;
    size_t group;

    bool operator<(const Key& other) const {
      return std::tie(direction, node, sequence, group) <
             std::tie(other.direction, other.node, other.sequence, other.group);
    }
  };

  int64_t id = 0;
  LayerConfig config;
  // How often its devices have changed.
  int64_t configuration = 0;
  // The sequence of the next forward call, by device and node.
  std::map<std::string, std::map<int64_t, int64_t>> forward_calls;
  // The sequence of the first call of a device that has made none yet, by node.
  std::map<int64_t, int64_t> first_calls;
  // The meetings that wait for devices.
  std::map<Key, std::shared_ptr<Meeting>> meetings;
  LayerMessages messages;

  // Whether a call of it needs other devices or processes.
  bool meets() const { return config.spans_processes || config.meeting_size() > 1; }
  // The sequence of the next forward call.
  int64_t next_sequence(const std::string& device, int64_t node);
  // Makes every device continue from the same sequence, including those that were idle. No number
  // is used twice, so calls of a failed step meet none of a later one.
  void align_calls();
  // Null, which means all devices, if `active` is null or names none of this layer's devices.
  ActiveDevices active_here(const ActiveDevices& active) const;
  // The active devices of a device's group, itself included, in rank order.
  std::vector<std::string> group_of(const std::string& device, const ActiveDevices& active) const;
  // Ends all meetings.
  void end_meetings(const std::string& why);

  // Why it cannot be called on this device in this process and configuration; or "".
  std::string configuration_error(const std::string& device) const;
  // Why the device, which is one of its devices, takes no part in this step; or "".
  std::string participation_error(const std::string& device, const ActiveDevices& active) const;
  // Why this device cannot meet those that have arrived; or "".
  std::string arrival_error(const Key& key, const Meeting& meeting,
                            const Meeting::Arrival& arrival) const;

  // The number of devices that must arrive.
  size_t expected(const Meeting& meeting) const;
  // The devices that have not arrived but may.
  std::vector<std::string> missing(const Meeting& meeting) const;
  // A device without which the meeting cannot take place, if these do not arrive; or "".
  std::string lacks(const Meeting& meeting, const std::set<std::string>& absent) const;

  // "SyncBatchNorm 'batchnorm0', forward call 7"
  std::string title(const Key& key) const;
  // "Arrived: cpu(0). Missing: cpu(1)."
  std::string arrivals_text(const Meeting& meeting) const;
  // One to four causes that fit what is known, one per line.
  std::string causes(const Key& key, const Meeting& meeting, const Calls& calls) const;
};
using LayerPtr = std::shared_ptr<Layer>;

}  // namespace gluon_syncbn

#endif  // GLUON_SYNCBN_RENDEZVOUS_LAYER_H_
