// Where the devices of a process meet, in each forward and backward call of a layer: each brings
// the sums of its shard, and gets those of all. The last device to arrive adds them, and exchanges
// them with other processes.
//
// No call waits indefinitely, and a step fails as a whole: see failures.cc.
#ifndef GLUON_SYNCBN_RENDEZVOUS_RENDEZVOUS_H_
#define GLUON_SYNCBN_RENDEZVOUS_RENDEZVOUS_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "numerics/pass.h"
#include "processes/step_record.h"
#include "rendezvous/step.h"
#include "rendezvous/types.h"

namespace gluon_syncbn {

// Lives as long as it is registered or a call uses it.
struct Layer;
using LayerPtr = std::shared_ptr<Layer>;
struct State;

class Rendezvous {
 public:
  Rendezvous();
  ~Rendezvous();

  void observe(Observer observer);

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

  // The id of the next forward call of this node on this device. Throws Error.
  CallId next_call(const LayerPtr& layer, const std::string& device, int64_t node = 0);

  // Throws Error.
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
  StepRecord& record();

  // Whether this process has run out of data and contributes zeros to exchanges.
  void set_joined(bool joined);
  // Whether this process has data, or exchanges the layer's sums with processes that may have some.
  // Null: a layer that does not synchronize.
  bool has_data(const LayerPtr& layer) const;

  // Logs a warning.
  void warn(const std::string& text) const;

  // The events after which a step has failed, or runs again: step.h. docs/design.md has a table.
  //
  // A call of the layer has failed; or, with null, something else.
  void fail(const LayerPtr& layer, const std::string& text);
  // A call reports an error to MXNet.
  void reported(const LayerPtr& layer, const std::string& device) const;
  // Throws Error if the step has failed.
  void check_step() const;
  // Nothing of the step is left.
  void recover();
  // In the child of a fork, where no call is in progress.
  void after_fork();
  // The text of the first failure; empty while the step runs.
  std::string failure() const;
  const std::atomic<int>& has_failed() const;

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

  // The number of calls that wait now.
  int waiting() const;

  // The seconds since the last arrival; 0 if no call waits.
  double stuck_seconds() const;

 private:
  const std::unique_ptr<State> state_;
};

}  // namespace gluon_syncbn

#endif  // GLUON_SYNCBN_RENDEZVOUS_RENDEZVOUS_H_
