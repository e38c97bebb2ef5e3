// Where the devices of a process meet, in each forward and backward call of a layer: each brings
// the sums of its shard, and gets those of all. The last device to arrive adds them, and exchanges
// them with other processes.
//
// No call waits indefinitely, and a step fails as a whole. One lock guards everything; no sums are
// added and no observers called under it.
#ifndef GLUON_SYNCBN_RENDEZVOUS_RENDEZVOUS_H_
#define GLUON_SYNCBN_RENDEZVOUS_RENDEZVOUS_H_

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "numerics/pass.h"
#include "processes/step_record.h"
#include "rendezvous/calls.h"
#include "rendezvous/layer.h"
#include "rendezvous/step.h"
#include "rendezvous/types.h"
#include "threads/patience.h"

namespace gluon_syncbn {

class Rendezvous {
 public:
  // rendezvous.cc: layers, and their calls.

  void observe(Observer observer) { observer_ = std::move(observer); }
  void warn(const std::string& text) const { observer_.warn(text); }

  // Makes the layer with this id, or reconfigures it.
  void configure(int64_t id, LayerConfig config);
  // Ends the registration. Calls that have begun continue.
  void forget(int64_t id);
  // Null if there is none.
  LayerPtr find(int64_t id) const;
  LayerConfig config(const LayerPtr& layer) const;

  // From the next forward calls on, only these devices take part; all devices if the list is empty.
  // Layers that have none of the devices are unaffected. No forward call may be in progress.
  void set_active_devices(const std::vector<std::string>& devices);
  // Whether this process has run out of data and contributes zeros to exchanges.
  void set_joined(bool joined);
  // Whether a call moves running statistics. A process that has joined repeats its last batch: only
  // those of layers move that share them with processes that may have data. Null: a layer that does
  // not synchronize.
  bool moves_running_statistics(const LayerPtr& layer) const;

  // The id of the next forward call of this node on this device. Throws Error.
  CallId next_call(const LayerPtr& layer, const std::string& device, int64_t node = 0);
  Members members_of(const LayerPtr& layer, const CallId& id, const std::string& device) const;
  // The sums of all participants, once all have arrived with theirs, of data of this dtype
  // ("float32"). Sums on the host are added in rank order, with those of other processes. Sums on
  // GPUs are listed in rank order; no other processes may take part. If that fails, every
  // participant gets the error. Throws Error.
  PassSums reduce(const LayerPtr& layer, const CallId& id, Direction direction,
                  const std::string& device, const char* dtype, const PassSums& own);
  // Makes the exchange of a call without samples, on behalf of all devices of this process: of the
  // next forward call, or of the backward of the call that went forward so many forward calls ago.
  // Returns the sums of all. No forward call of the layer may be in progress. Throws Error.
  PassSums take_part(const LayerPtr& layer, Direction direction, int64_t node, int64_t ago,
                     int64_t channels);
  // The exchanges so far.
  StepRecord& record() { return record_; }

  // The number of calls that wait now.
  int waiting() const;
  // The seconds since the last arrival; 0 if no call waits.
  double stuck_seconds() const;

  // failures.cc: the events after which a step has failed, or runs again. docs/design.md has a
  // table.

  // A call of the layer has failed; or, with null, something else.
  void fail(const LayerPtr& layer, const std::string& text);
  // A call reports an error to MXNet.
  void reported(const LayerPtr& layer, const std::string& device) const {
    observer_.reports(layer->id, device);
  }
  // Throws Error if the step has failed.
  void check_step() const;
  // Nothing of the step is left; or this is the child of a fork, where no call is in progress.
  void recover();
  // The text of the first failure; empty while the step runs.
  std::string failure() const;
  // Whether the step has failed, for Python to read without the lock.
  const std::atomic<int>& has_failed() const { return has_failed_; }

  // A probe is pushed: see Calls.
  Calls::Ticket ask(int64_t layer, const std::string& device, Calls::Of what);
  // It has ended. The step fails if MXNet has skipped it, and with it a call that meets others.
  void answer(Calls::Ticket ticket, bool is_skipped);
  Calls::Ticket next_ticket() const;
  // Waits until the probes of these layers from a ticket on have ended, or wait for a call that was
  // not made before them. The step fails in the latter case, if it says why.
  void settle(const std::set<int64_t>& layers, Calls::Ticket from, const std::string& why);
  // There is no backward any more of this forward call.
  void drop(const LayerPtr& layer, const CallId& id, const std::string& device);
  // Call this when the process ends: all waiting and later calls get an error, which names a call
  // that was waiting or, if there was none, gives the reason.
  void close(const std::string& reason);

 private:
  using Lock = std::unique_lock<std::mutex>;
  using Clock = Patience::Clock;
  // A meeting that cannot take place without this device.
  struct Waiting {
    LayerPtr layer;
    Layer::Key key;
    std::shared_ptr<Meeting> meeting;
    std::string lacks;
  };
  using IsAbsent =
      std::function<bool(const Layer&, const Layer::Key& key, const std::string& device)>;

  // rendezvous.cc

  // `find`, with the lock held.
  LayerPtr find_locked(int64_t id) const;
  // All layers that are registered or have calls.
  std::vector<LayerPtr> all() const;
  // Throws if the step has failed, or the layer's devices have changed since the forward call.
  void check_call(const Layer& layer, const CallId& id);
  // Adds the arrival to the meeting of this key, which it opens if it is the first. Throws if they
  // do not match.
  std::shared_ptr<Meeting> arrive(Layer* layer, const Layer::Key& key, const ActiveDevices& active,
                                  const Meeting::Arrival& arrival);
  // The work of the last device for all. If it fails, all get the error.
  void combine(Lock* lock, Layer* layer, const Layer::Key& key, Meeting* meeting);
  // Replaces the sums of this process with those of all, if there are other processes. An absent
  // one has no samples in this call. Throws.
  void add_other_processes(Layer* layer, const Layer::Key& key, bool is_absent, PassSums* all);

  // waits.cc

  // Waits until the meeting is over. Throws Error when there is no point in waiting longer.
  void wait(Lock* lock, const Layer& layer, const Layer::Key& key, Meeting* meeting,
            const std::string& device);
  // Looks, at most once a second, for threads that run.
  void look_around(Lock* lock);
  // Why no call that others wait for can run, in a process of which no thread runs; empty if one
  // has not been made, or nobody knows.
  std::string stuck() const;

  // failures.cc

  // The step fails, and all waits for other devices end.
  void stop(const std::string& text);
  // A call has found a failure: the step fails, and the call ends.
  [[noreturn]] void stop_and_throw(const std::string& text);
  // The step fails, as this meeting cannot take place.
  void stop_without(const Waiting& waiting, const std::string& why);
  // Whoever waits for something to happen looks again.
  void note_event();
  // A meeting of these layers that cannot take place without the devices that are absent.
  std::optional<Waiting> waits_for(const std::set<int64_t>& layers,
                                   const IsAbsent& is_absent) const;
  // The step fails if a backward call of the layer waits for a device whose forward has gone.
  void stop_without_backward(const Layer& layer);
  // Where one of the devices that a meeting misses waits itself; empty if none does.
  std::string where_missing_wait(const Layer& layer, const Meeting& meeting) const;

  mutable std::mutex mutex_;
  Observer observer_;
  std::map<int64_t, LayerPtr> registered_;
  std::map<int64_t, std::weak_ptr<Layer>> layers_;
  Step step_;
  Calls calls_;
  std::atomic<int> has_failed_{0};
  Clock::time_point last_arrival_{};
  // How often a device has arrived, a probe has ended, or the step has failed.
  int64_t events_ = 0;
  std::condition_variable changed_;
  // How often since then, and when, a waiting thread has found that no other thread runs; and the
  // threads that wait.
  int quiet_looks_ = 0;
  Clock::time_point last_look_{};
  std::multiset<int> threads_;
  bool joined_ = false;
  StepRecord record_;
  ActiveDevices active_;
  // Whether a layer's notice has been logged.
  bool has_noticed_ = false;
};

}  // namespace gluon_syncbn

#endif  // GLUON_SYNCBN_RENDEZVOUS_RENDEZVOUS_H_
