// Where the devices of a process meet, in each forward and backward call of a layer: each brings
// the sums of its shard, and gets those of all. The last device to arrive adds them, and exchanges
// them with other processes.
//
// No call waits indefinitely. A meeting ends when all have arrived, on a timeout, when a
// participant fails, when the process ends, or on Ctrl-C. In all cases but the first, every waiting
// device gets an Error, which says which devices arrived and which did not, unless a participant
// has failed.
#ifndef GLUON_SYNCBN_RENDEZVOUS_RENDEZVOUS_H_
#define GLUON_SYNCBN_RENDEZVOUS_RENDEZVOUS_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "numerics/passes.h"
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

  std::string name(const LayerPtr& layer) const;
  // How many devices of this process synchronize.
  size_t meeting_size(const LayerPtr& layer) const;

  // From the next forward calls on, only these devices take part; all devices if the list is empty.
  // Layers that have none of the devices are unaffected. No forward call may be in progress.
  void set_active_devices(const std::vector<std::string>& devices);

  // The id of the next forward call of this node on this device. Throws Error.
  CallId next_call(const LayerPtr& layer, const std::string& device, int64_t node = 0);

  // Throws Error, also if the call is part of a step that has failed.
  Members members_of(const LayerPtr& layer, const CallId& id, const std::string& device) const;

  // The sums of all participants, once all have arrived with theirs, of data of this dtype
  // ("float32"). Sums on the host are added in rank order, with those of other processes. Sums on
  // GPUs are listed in rank order; no other processes may take part. If that fails, every
  // participant gets the error. Throws Error.
  PassSums reduce(const LayerPtr& layer, const CallId& id, Direction direction,
                  const std::string& device, const char* dtype, const PassSums& own);

  // Whether this process has run out of data and contributes zeros to exchanges, and whether a
  // forward for which no process has samples fails.
  void set_joined(bool joined, bool must_have_samples = false);
  // Whether this process has data, or exchanges the layer's sums with processes that may have some.
  // Null: a layer that does not synchronize.
  bool has_data(const LayerPtr& layer) const;

  // Abandons the step for this reason. Devices that wait now, and later ones that would have to
  // wait, get an error, until a call with an empty reason.
  void give_up(const std::string& reason);

  // A call has failed on one device: all devices that wait at this layer get the error at once. If
  // it was a forward, so do the devices that have yet to make the same call. A call of an earlier
  // step ends nothing.
  void fail(const LayerPtr& layer, const CallId& id, Direction direction, const std::string& device,
            const std::string& text);

  // MXNet runs no operation whose arrays hold an earlier error, so this device cannot arrive:
  // devices that wait for it in this epoch and direction get an error.
  void unreachable(int64_t layer, int64_t epoch, Direction direction, const std::string& device);

  // Once Python has raised an MXNet error, MXNet no longer knows which operations it skips because
  // of it. So all operations pushed earlier must finish before any others are pushed. They are
  // under way on a device between begin_flush() and its end_flush(). From then until they have
  // finished on all devices, devices that wait for this one get an error.
  void begin_flush(int64_t layer, Direction direction, const std::vector<std::string>& devices);
  void end_flush(int64_t layer, Direction direction, const std::string& device);
  // The longest timeout of the layers with devices between the two; 0 if there are none.
  double flushing() const;

  // Marks a device as drained: all operations pushed before a failure have finished there. Until
  // then, its calls belong to the failed step.
  void drain(int64_t layer, int64_t epoch, const std::string& device);

  // Logs a warning.
  void warn(const std::string& text) const;

  // For an error that could not be raised where it was found: the next forward call of any layer
  // raises it.
  void report_next(const std::string& text);

  // In the child of a fork, where no call is in progress: every layer starts a new epoch.
  void after_fork();

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
