// Where the devices of a process meet: the sums of all participants of one layer, direction and
// ticket, added.
//
// Nobody waits for ever. A meeting ends when everyone has come, when its time is up, when a
// participant fails, when the process ends, or on Ctrl-C; all but the first is an Error for
// everyone who waits, and says who came and who did not.
#ifndef GLUON_SYNCBN_ALL_REDUCE_H_
#define GLUON_SYNCBN_ALL_REDUCE_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "sums.h"

namespace gluon_syncbn {

class Error : public std::runtime_error {
  using std::runtime_error::runtime_error;
};

enum class Direction { kForward, kBackward };

// What a layer says of itself.
struct LayerConfig {
  std::string name;
  // Who may take part, in rank order, named as MXNet does: "cpu(0)", "gpu(1)".
  std::vector<std::string> devices;
  // How many of them have to come; 0: all.
  size_t num_devices = 0;
  double timeout_seconds = 300;

  size_t participants() const { return num_devices ? num_devices : devices.size(); }
};

// One forward call of a layer on one device, and its backward. Forward calls are counted on each
// device for each place of the layer in a graph, and calls of equal place and count meet. After an
// error the count starts again, in a new generation.
struct Ticket {
  int64_t generation = 0;
  int64_t place = 0;
  int64_t number = 0;
};

// What is told on the thread that noticed it, with no lock held.
struct Observer {
  std::function<void(const std::string& text)> warn;
  // A step has failed at this layer. Somebody has to settle() each of its devices.
  std::function<void(int64_t layer, int64_t generation, const std::string& text)> failed;
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

  size_t participants(const LayerPtr& layer) const;

  // Draws the ticket of the next forward call on this device at this place. Throws Error.
  Ticket next_ticket(const LayerPtr& layer, const std::string& device, int64_t place = 0);

  // Replaces the sums and the count by those of all participants. Throws Error.
  void reduce(const LayerPtr& layer, const Ticket& ticket, Direction direction,
              const std::string& device, std::vector<ChannelSums>* sums, double* count);

  // Something went wrong on one device: everyone who waits at this layer gets to know at once.
  void fail(const LayerPtr& layer, const std::string& text);

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

  // Safe in a signal handler: who still waits half a second from now gets an error.
  static void interrupt();

 private:
  struct Meeting;
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace gluon_syncbn

#endif  // GLUON_SYNCBN_ALL_REDUCE_H_
