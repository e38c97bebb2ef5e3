// Synchronizes the devices of a process in each forward and backward call of a layer. The last to
// arrive works for all: it runs the kernels over all their data, or adds their sums and exchanges
// them with other processes.
//
// No call waits indefinitely. A meeting ends when all have arrived, on a timeout, when a
// participant fails, when the process ends, or on Ctrl-C. All but the first are an Error on every
// waiting device, which says who arrived and who did not.
#ifndef GLUON_SYNCBN_RENDEZVOUS_RENDEZVOUS_H_
#define GLUON_SYNCBN_RENDEZVOUS_RENDEZVOUS_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "numerics/sums.h"
#include "rendezvous/types.h"

namespace gluon_syncbn {

// Lives as long as it is registered, or a call made of it.
struct Layer;
using LayerPtr = std::shared_ptr<Layer>;
struct State;

class Rendezvous {
 public:
  Rendezvous();
  ~Rendezvous();

  void observe(Observer observer);

  // Makes the layer of this id, or changes it.
  void configure(int64_t id, LayerConfig config);
  // Ends the registration; calls that were made already go on.
  void forget(int64_t id);
  // Null if there is none.
  LayerPtr find(int64_t id) const;

  std::string name(const LayerPtr& layer) const;
  // How many devices of this process synchronize.
  size_t participants(const LayerPtr& layer) const;
  // Whether one device can work for all: they are CPU contexts and exchange nothing.
  bool shares_memory(const LayerPtr& layer) const;

  // From the next forward calls on, only these devices take part; none: all. Layers that have none
  // of the devices are unaffected. No forward call may be in progress.
  void set_active_devices(const std::vector<std::string>& devices);

  // The id of the next forward call of this node on this device. Throws Error.
  CallId next_call(const LayerPtr& layer, const std::string& device, int64_t node = 0);

  // Throws Error, also if the call is part of a step that has failed.
  Participants participants_of(const LayerPtr& layer, const CallId& id,
                               const std::string& device) const;

  // Returns when all participants have arrived and one has run `combine` over the contributions of
  // all, in rank order. If that throws, every participant gets the error. Throws Error.
  using Combine = std::function<void(const std::vector<Contribution*>& contributions)>;
  void meet(const LayerPtr& layer, const CallId& id, Direction direction, const std::string& device,
            Contribution* contribution, const Combine& combine);

  // A meeting that replaces the sums of data of this dtype, and their count, by those of all
  // participants, including other processes. Throws Error.
  void reduce(const LayerPtr& layer, const CallId& id, Direction direction,
              const std::string& device, const char* dtype, std::vector<ChannelSums>* sums,
              double* count);

  // Whether this process has run out of data and contributes zeros to exchanges.
  void set_joined(bool joined);
  // Whether this process has data, or exchanges the layer's sums with processes that may have some.
  // Null: a layer that does not synchronize.
  bool has_data(const LayerPtr& layer) const;

  // The step is abandoned for this reason: devices that wait now, or arrive before the others, get
  // an error until the reason is empty.
  void give_up(const std::string& reason);

  // Something failed on one device: all that wait at this layer get the error at once. If it was a
  // forward, so do those that have yet to make the same call.
  void fail(const LayerPtr& layer, const std::string& text, const std::string& device = "",
            const CallId* forward = nullptr);

  // MXNet runs no operation whose arrays hold an earlier error, so this device cannot arrive: those
  // that wait for it in this epoch and direction get an error.
  void unreachable(int64_t layer, int64_t epoch, Direction direction, const std::string& device);

  // Once Python has raised an error of MXNet's, MXNet no longer knows which operations it skips
  // because of it. So all that was pushed before must pass before anything else is pushed: between
  // begin_flush() and its end_flush() it is under way on a device, and from then until it has
  // passed on all devices, those that wait for this one get an error.
  void begin_flush(int64_t layer, Direction direction, const std::vector<std::string>& devices);
  void end_flush(int64_t layer, Direction direction, const std::string& device);
  // How many devices of all layers are between the two.
  int flushing() const;

  // After a failure, calls on a device belong to the failed step until all that was pushed before
  // the failure has passed: until the device is drained.
  void drain(int64_t layer, int64_t epoch, const std::string& device);

  // An error that could not be raised where it was found: the next forward call of any layer raises
  // it.
  void report_next(const std::string& text);

  // In the child of a fork, where no call is in progress: every layer starts a new epoch.
  void after_fork();

  // The process ends: all waiting and later calls get an error, which names a call that waited, or
  // else gives the reason.
  void close(const std::string& reason);

  // The number of calls that wait now.
  int waiting() const;

  // For how long calls have waited without another arrival; 0 if none waits.
  double stuck_seconds() const;

 private:
  const std::unique_ptr<State> state_;
};

}  // namespace gluon_syncbn

#endif  // GLUON_SYNCBN_RENDEZVOUS_RENDEZVOUS_H_
