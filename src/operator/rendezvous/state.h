// What Rendezvous knows about its layers, the open meetings, and the step.
#ifndef GLUON_SYNCBN_RENDEZVOUS_STATE_H_
#define GLUON_SYNCBN_RENDEZVOUS_STATE_H_

#include <atomic>
#include <condition_variable>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "numerics/pass.h"
#include "processes/layer_messages.h"
#include "processes/step_record.h"
#include "processes/text.h"
#include "rendezvous/step.h"
#include "rendezvous/types.h"
#include "threads/patience.h"

namespace gluon_syncbn {

using Clock = Patience::Clock;
using Seconds = Patience::Seconds;

bool contains(const std::vector<std::string>& names, const std::string& name);
bool is_cpu(const std::string& device);
// How many workspaces the CPU contexts have, and what to set.
std::string workspaces_text();
// Why a device has no backward.
std::string gone_text(const std::string& device);

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

  std::string title(const Key& key) const;
  // Makes every device continue from the same sequence, including those that were idle. No number
  // is used twice, so calls of a failed step meet none of a later one.
  void align_calls();
  // Null, which means all devices, if `active` is null or names none of this layer's devices.
  ActiveDevices active_here(const ActiveDevices& active) const;
  // The active devices of a device's group, itself included, in rank order.
  std::vector<std::string> group_of(const std::string& device, const ActiveDevices& active) const;
  // The number of devices that must arrive.
  size_t expected(const Meeting& meeting) const;
  // A device without which the meeting cannot take place, if these do not arrive; or "".
  std::string lacks(const Meeting& meeting, const std::set<std::string>& absent) const;
  // The devices that have not arrived but may.
  std::vector<std::string> missing(const Meeting& meeting) const;
  // "Arrived: cpu(0). Missing: cpu(1)."
  std::string arrivals_text(const Meeting& meeting) const;
  // Which device has waited for how long, which have arrived, and which are in a later call.
  std::string waits_text(const Key& key, const Meeting& meeting, const std::string& device,
                         Seconds waited) const;
  // One to four causes that fit what is known, one per line.
  std::string causes(const Key& key, const Meeting& meeting, const Calls& calls) const;
  // The devices that wait in later calls of the same node and direction.
  std::vector<std::string> ahead(const Key& key) const;
  // Ends all meetings.
  void end_meetings(const std::string& why);
};
using LayerPtr = std::shared_ptr<Layer>;

struct State {
  using Lock = std::unique_lock<std::mutex>;

  mutable std::mutex mutex;
  std::map<int64_t, LayerPtr> registered;
  std::map<int64_t, std::weak_ptr<Layer>> layers;
  Step step;
  Calls calls;
  // Whether the step has failed, for Python to read without the lock.
  std::atomic<int> has_failed{0};
  Clock::time_point last_arrival{};
  // How often a device has arrived, a probe has ended, or the step has failed.
  int64_t events = 0;
  std::condition_variable changed;
  // How often since then, and when, a waiting thread has found that no other thread runs; and the
  // threads that wait.
  int quiet_looks = 0;
  Clock::time_point last_look{};
  std::multiset<int> threads;
  bool joined = false;
  StepRecord record;
  ActiveDevices active;
  Observer observer;
  // Whether a layer's notice has been logged.
  bool has_noticed = false;

  LayerPtr find(int64_t id) const;
  std::vector<LayerPtr> all() const;

  // The step fails, and all waits for other devices end.
  void stop(const std::string& text);
  // A call has found a failure: the step fails, and the call ends.
  [[noreturn]] void fail(const std::string& text);
  // A meeting cannot take place.
  void fail_without(const Layer& layer, const Layer::Key& key, const Meeting& meeting,
                    const std::string& why);
  // Fails if a backward call of the layer waits for a device whose forward has gone.
  void end_without_backward(const Layer& layer);
  // A meeting of these layers that cannot take place without the devices for which
  // is_absent(layer, device) is true.
  struct Waiting {
    LayerPtr layer;
    Layer::Key key;
    std::shared_ptr<Meeting> meeting;
  };
  template <typename IsAbsent>
  std::optional<Waiting> waits_for(const std::set<int64_t>& layers,
                                   const IsAbsent& is_absent) const;
  // Why no call that others wait for can run, in a process of which no thread runs; empty if one
  // has not been made, or nobody knows.
  std::string stuck() const;
  // Looks, at most once a second, for threads that run.
  void look_around(Lock* lock);
  void note_event();

  // Throw if the layer cannot be called on this device: in this process and configuration; in this
  // step.
  void check_configuration(const Layer& layer, const std::string& device);
  void check_participants(const Layer& layer, const std::string& device,
                          const ActiveDevices& active);
  // Throws if the step has failed, or the layer's devices have changed since the forward call.
  void check_call(const Layer& layer, const CallId& id);
  // Adds the arrival to the meeting of this key, which it opens if it is the first. Throws if they
  // do not match.
  std::shared_ptr<Meeting> arrive(Layer* layer, const Layer::Key& key, const ActiveDevices& active,
                                  const Meeting::Arrival& arrival);
  void check_match(const Layer& layer, const Layer::Key& key, const Meeting::Arrival& first,
                   const Meeting::Arrival& arrival);
  // Where one of the devices that a meeting misses waits itself; empty if none does.
  std::string where_missing_wait(const Layer& layer, const Meeting& meeting) const;
  // Waits until the meeting is over. Throws Error when there is no point in waiting longer.
  void wait(Lock* lock, const Layer& layer, const Layer::Key& key, Meeting* meeting,
            const std::string& device);
};

}  // namespace gluon_syncbn

#endif  // GLUON_SYNCBN_RENDEZVOUS_STATE_H_
