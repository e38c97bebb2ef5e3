// Where the devices of a process meet, for one layer, direction and ticket. The last to come does
// what they came for: it runs the passes over all their data, or adds their sums and exchanges them
// with other processes.
//
// Nobody waits for ever. A meeting ends when everyone has come, when its time is up, when a
// participant fails, when the process ends, or on Ctrl-C; all but the first is an Error for
// everyone who waits, and says who came and who did not.
#ifndef GLUON_SYNCBN_RENDEZVOUS_ALL_REDUCE_H_
#define GLUON_SYNCBN_RENDEZVOUS_ALL_REDUCE_H_

#include <algorithm>
#include <cstdint>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "numerics/sums.h"

namespace gluon_syncbn {

class Error : public std::runtime_error {
  using std::runtime_error::runtime_error;
};

enum class Direction { kForward, kBackward };

// What a layer says of itself.
struct LayerConfig {
  std::string name;
  // Who may take part, in rank order, named as MXNet does: "cpu(0)", "gpu(1)". None where that is
  // not known, as for a graph with parameters of its own: then any num_devices devices, or one.
  std::vector<std::string> devices;
  // How many of them have to come; 0: all.
  size_t num_devices = 0;
  // Or in groups of so many, in rank order, each of which meets by itself; 0: in one.
  size_t group_size = 0;
  double timeout_seconds = 300;
  // The processes whose sums are added, by rank, out of so many that exchange them. One process
  // exchanges nothing.
  size_t processes = 1, first_rank = 0, end_rank = 1;

  // Whether not every device can read what lies on the others.
  bool has_gpus = false;
  // Why the layer cannot train on these devices, or nothing.
  std::string misfit;

  bool exchanges() const { return processes > 1; }
  size_t participants() const {
    return group_size    ? group_size
           : num_devices ? num_devices
                         : std::max<size_t>(1, devices.size());
  }
  // The group of a device; 0 for one that is not of the layer.
  size_t group_of(const std::string& device) const;
};

// The devices that take part in a step; null: all.
using Present = std::shared_ptr<const std::vector<std::string>>;

// One forward call of a layer on one device, and its backward. Forward calls are counted on each
// device for each place of the layer in a graph, and calls of equal place and count meet. After an
// error the count starts again, in a new generation.
struct Ticket {
  int64_t generation = 0;
  int64_t place = 0;
  int64_t number = 0;
  Present present;
};

// What a device brings to a meeting: whoever calls the meeting knows what it really is. Channels
// and dtype ("float32") have to be the same on all devices.
struct Part {
  int64_t channels = 0;
  const char* dtype = "";
};

// What one process sends to the others of its layer.
struct Message {
  int64_t layer;
  // The same for all messages that may not be under way at the same time: "12 forward 0".
  std::string key;
  // What is told to the user: "SyncBatchNorm 'batchnorm0', forward call 7".
  std::string title;
  int64_t channels;
  double timeout_seconds;
  std::vector<double> values;
};

// What is told on the thread that noticed it, with no lock held.
struct Observer {
  std::function<void(const std::string& text)> warn;
  // A step has failed at this layer. Somebody has to settle() each of its devices.
  std::function<void(int64_t layer, int64_t generation, const std::string& text)> failed;
  // A device has waited a while for others: somebody should lose() those that cannot come.
  std::function<void(int64_t layer, int64_t generation, Direction)> waits;
  // Writes the values of all processes, one after the other by rank. Returns what went wrong, or
  // nothing.
  std::function<std::string(const Message&, std::vector<double>* all)> exchange;
};

class AllReduce {
 public:
  // Lives as long as somebody holds it: the registration, and every call that was made of it.
  struct Layer;
  using LayerPtr = std::shared_ptr<Layer>;

  AllReduce();
  ~AllReduce();

  void observe(Observer observer);

  // Makes the layer of this number, or changes it.
  void configure(int64_t number, LayerConfig config);
  // Ends the registration; calls that were made already go on.
  void forget(int64_t number);
  // Null where there is none.
  LayerPtr find(int64_t number) const;

  std::string name(const LayerPtr& layer) const;
  // How many devices of this process meet.
  size_t participants(const LayerPtr& layer) const;
  // Whether one device can do the work of all: they are CPU contexts, and exchange nothing.
  bool shares_memory(const LayerPtr& layer) const;

  // From the next forward calls on, only these devices take part, as the others have no data; none:
  // everyone does. Layers that have none of the devices are left alone. At this moment no forward
  // call may be on its way.
  void set_present(const std::vector<std::string>& devices);

  // Draws the ticket of the next forward call on this device at this place. Throws Error.
  Ticket next_ticket(const LayerPtr& layer, const std::string& device, int64_t place = 0);

  // Returns when all participants have come and one of them has run `join` over the parts of all,
  // in rank order. What it throws, everyone gets. Throws Error.
  using Join = std::function<void(const std::vector<Part*>& parts)>;
  void meet(const LayerPtr& layer, const Ticket& ticket, Direction direction,
            const std::string& device, Part* part, const Join& join);

  // A meeting that replaces the sums of data of this dtype, and their count, by those of all
  // participants, also of those in other processes. Throws Error.
  void reduce(const LayerPtr& layer, const Ticket& ticket, Direction direction,
              const std::string& device, const char* dtype, std::vector<ChannelSums>* sums,
              double* count);

  // This process has run out of data: until it is told otherwise it takes part in exchanges with
  // sums of nothing.
  void set_absent(bool absent);
  // Whether this process has data, or exchanges sums of the layer with others, who may have some.
  // Null: a layer that meets nobody.
  bool has_data(const LayerPtr& layer) const;

  // The step is not gone on with, for this reason: who waits for other devices now, or comes before
  // they do, gets an error, until there is no reason any more.
  void give_up(const std::string& reason);

  // Something went wrong on one device: everyone who waits at this layer gets to know at once. In a
  // forward call with a ticket, so does everyone who is still to make the same call.
  void fail(const LayerPtr& layer, const std::string& text, const std::string& device = "",
            const Ticket* forward = nullptr);

  // MXNet runs no operation whose arrays hold an earlier operation's error, so this device does not
  // come any more: whoever waits for it in this generation and direction gets an error.
  void lose(int64_t number, int64_t generation, Direction direction, const std::string& device);

  // After a failure, what a device calls is taken for a part of the failed step until the device is
  // settled, which is when all that was pushed before the failure has gone by.
  void settle(int64_t number, int64_t generation, const std::string& device);

  // An error that was found where nobody could be told: the next forward call of any layer fails
  // with it.
  void tell_next(const std::string& text);

  // In the child of a fork, which begins with no call under way: every layer starts anew.
  void start_over();

  // The process ends: all who wait, and all who come, get an error. Who waited is told, or else the
  // reason.
  void close(const std::string& reason);

  // Calls that wait now.
  int waiting() const;

  // For how long some have waited without another's coming. 0 where none waits.
  double stuck_seconds() const;

  // Safe in a signal handler: who still waits half a second from now gets an error.
  static void interrupt();
  // How often that was called.
  static unsigned interrupts();

 private:
  struct Meeting;
  struct State;

  // Replaces the sums and the count of this process by those of all. Throws Error.
  void exchange(Layer* layer, const Ticket& ticket, Direction direction,
                std::vector<ChannelSums>* sums, double* count);
  // Replaces the messages of a round by those of the ticket's backward call, which it waits for.
  void sort_out(Layer* layer, const Ticket& ticket, size_t processes, std::vector<double>* round);

  std::unique_ptr<State> state_;
};

}  // namespace gluon_syncbn

#endif  // GLUON_SYNCBN_RENDEZVOUS_ALL_REDUCE_H_
