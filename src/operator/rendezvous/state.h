// What Rendezvous knows about its layers, and the open meetings.
#ifndef GLUON_SYNCBN_RENDEZVOUS_STATE_H_
#define GLUON_SYNCBN_RENDEZVOUS_STATE_H_

#include <atomic>
#include <condition_variable>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "numerics/passes.h"
#include "processes/layer_messages.h"
#include "processes/patience.h"
#include "processes/text.h"
#include "rendezvous/types.h"

namespace gluon_syncbn {

using Clock = Patience::Clock;
using Seconds = Patience::Seconds;

bool contains(const std::vector<std::string>& names, const std::string& name);
bool is_cpu(const std::string& device);

struct Meeting {
  struct Arrival {
    std::string device;
    const char* dtype;
    const PassSums* own;
  };

  std::vector<Arrival> arrivals;
  ActiveDevices active;
  // How long the first to arrive has waited when the next notice is due.
  Seconds next_notice{0};
  // All have arrived and the last one is doing the work for all: no call may give up.
  bool combining = false;
  std::string error;
  // A device that cannot arrive.
  std::string unreachable;
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
  // Direction, node, sequence, group.
  using Key = std::tuple<Direction, int64_t, int64_t, size_t>;

  int64_t id = 0;
  LayerConfig config;
  int64_t epoch = 0;
  // Why the last epoch ended, and the devices on which its operations may still run.
  std::string failure;
  std::set<std::string> draining;
  // The sequence of the next forward call, by device and node.
  std::map<std::string, std::map<int64_t, int64_t>> forward_calls;
  // The sequence of the first call of a device that has made none yet, by node.
  std::map<int64_t, int64_t> first_calls;
  std::map<Key, std::shared_ptr<Meeting>> open;
  // By node: the devices that had not yet made the forward call that failed, so that their next
  // call belongs to the failed step. Dropped once another device, drained by then, calls that node.
  std::map<int64_t, std::set<std::string>> late;
  // By direction: the devices on which operations pushed before Python raised the last error are
  // under way, with the number of their unfinished flushes, and the devices on which they have
  // finished.
  struct Flush {
    std::map<std::string, int> pending;
    std::set<std::string> passed;
  };
  std::map<Direction, Flush> flushes;
  LayerMessages messages;

  std::string title(const Key& key) const;
  // Makes every device continue from the same sequence, including those that were idle.
  void align_calls();
  // Null, which means all devices, if `active` is null or names none of this layer's devices.
  ActiveDevices active_here(const ActiveDevices& active) const;
  // The active devices of a device's group, itself included, in rank order.
  std::vector<std::string> group_of(const std::string& device, const ActiveDevices& active) const;
  // The number of devices that must arrive.
  size_t expected(const Meeting& meeting) const;
  // Ends the waits of a direction that need one of these devices, which will not arrive.
  void give_up_on(const std::set<std::string>& devices, Direction direction) const;
  // The devices that have not arrived but may.
  std::vector<std::string> missing(const Meeting& meeting) const;
  // "Arrived: cpu(0). Missing: cpu(1)."
  std::string arrivals_text(const Meeting& meeting) const;
  // Which device has waited for how long, which have arrived, and which are in a later call.
  std::string waits_text(const Key& key, const Meeting& meeting, const std::string& device,
                         Seconds waited) const;
  // Two to four causes that fit what is known, one per line.
  std::string causes(const Key& key, const Meeting& meeting) const;
  // The devices that wait in later calls of the same node and direction.
  std::vector<std::string> ahead(const Key& key) const;
  // Ends every open meeting and starts a new epoch.
  void start_epoch(const std::string& why);
  // The same after an error; `forward` is the call of the device that failed, if it was a forward.
  void fail(const std::string& why, const std::string& device = "",
            const CallId* forward = nullptr);
  Error failed_before() const;
  // Throws if the forward call that a device is about to make is part of a step that has failed.
  void check_step(const std::string& device, int64_t node);
};
using LayerPtr = std::shared_ptr<Layer>;

struct State {
  using Lock = std::unique_lock<std::mutex>;

  mutable std::mutex mutex;
  std::map<int64_t, LayerPtr> registered;
  std::map<int64_t, std::weak_ptr<Layer>> layers;
  std::string closed;
  std::string unreported;
  // Why no call may wait for other devices now; empty if they may.
  std::string given_up;
  bool joined = false;
  bool must_have_samples = false;
  Clock::time_point last_arrival{};
  ActiveDevices active;
  Observer observer;
  // Whether a layer's notice has been logged.
  bool has_noticed = false;

  LayerPtr find(int64_t id) const;
  std::vector<LayerPtr> all() const;
  void check_open(const LayerPtr& layer) const;
  // Ends the step on all devices of the layer, unlocks, and reports to the observer.
  void end_step(Lock* lock, Layer* layer, const std::string& text, const std::string& device = "",
                const CallId* forward = nullptr);
  [[noreturn]] void fail(Lock* lock, Layer* layer, const std::string& text,
                         const std::string& device = "", const CallId* forward = nullptr);
  // Throw if the layer cannot be called on this device: in this process and configuration; in this
  // step.
  void check_configuration(Lock* lock, Layer* layer, const std::string& device);
  void check_participants(Lock* lock, Layer* layer, const std::string& device,
                          const ActiveDevices& active);
  // Adds the arrival to the meeting of this key, which it opens if it is the first. Throws if they
  // do not match.
  std::shared_ptr<Meeting> arrive(Lock* lock, Layer* layer, const Layer::Key& key, const CallId& id,
                                  const Meeting::Arrival& arrival);
  void check_match(Lock* lock, Layer* layer, const Layer::Key& key, const CallId& id,
                   const Meeting::Arrival& first, const Meeting::Arrival& arrival);
  // Where one of the devices that a meeting misses waits itself; empty if none does.
  std::string where_missing_wait(const Layer& layer, const Meeting& meeting) const;
  // Waits until the meeting is over. Throws Error when there is no point in waiting longer.
  void wait(Lock* lock, Layer* layer, const Layer::Key& key, Meeting* meeting,
            const std::string& device, const CallId& id);
};

}  // namespace gluon_syncbn

#endif  // GLUON_SYNCBN_RENDEZVOUS_STATE_H_
