// The configuration of a layer, and what its devices and processes tell each other.
#ifndef GLUON_SYNCBN_RENDEZVOUS_TYPES_H_
#define GLUON_SYNCBN_RENDEZVOUS_TYPES_H_

#include <algorithm>
#include <cstdint>
#include <functional>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "processes/layer_messages.h"

namespace gluon_syncbn {

// Why a call ends without results.
class Error : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

enum class Direction { kForward, kBackward };

struct LayerConfig {
  std::string name;
  // The devices that may take part, in rank order, named as in MXNet: "cpu(0)", "gpu(1)". Empty if
  // unknown, as for a graph with its own parameters. Then any num_devices devices take part, or one
  // if that is 0.
  std::vector<std::string> devices;
  // How many of them must arrive; 0: all.
  size_t num_devices = 0;
  // If not 0, devices synchronize in groups of this size, in rank order.
  size_t group_size = 0;
  double timeout_seconds = 300;
  // Whether other processes share statistics, and the range of ranks whose sums are added.
  bool spans_processes = false;
  size_t first_rank = 0, end_rank = 1;
  // Why the layer cannot train on these devices, or empty.
  std::string config_error;
  // What a process logs at its first call in training, or empty.
  std::string notice;

  // How many devices of this process synchronize.
  size_t meeting_size() const {
    return group_size    ? group_size
           : num_devices ? num_devices
                         : std::max<size_t>(1, devices.size());
  }
  // The group of a device; 0 if it is not one of the layer's.
  size_t group_of(const std::string& device) const {
    const auto found = std::find(devices.begin(), devices.end(), device);
    if (group_size == 0 || found == devices.end()) return 0;
    return static_cast<size_t>(found - devices.begin()) / group_size;
  }
};

// The devices that take part in a step; null: all.
using ActiveDevices = std::shared_ptr<const std::vector<std::string>>;

// One forward call of a layer on one device, and its backward. Each device counts its forward calls
// for each node of the layer in a graph; calls of equal node and sequence belong together.
struct CallId {
  int64_t node = 0;
  int64_t sequence = 0;
  ActiveDevices active;
  // Which of the layer's configurations it belongs to.
  int64_t configuration = 0;
  // Whether others take part. If not, its errors are its own.
  bool meets = false;
};

// Who takes part in a call of a device.
struct Members {
  // How many devices of this process.
  size_t count;
  // Their names, in rank order. More than `count` if any `count` of them take part; none if they
  // are unknown.
  std::vector<std::string> devices;
  // Whether other processes take part too.
  bool spans_processes;
};

// Callbacks, each on the thread that noticed the event, with no lock held.
struct Observer {
  std::function<void(const std::string& text)> warn = [](const std::string&) {};
  // A call of this layer has ended, as the step has failed.
  std::function<void(int64_t layer, const std::string& text)> failed = [](int64_t,
                                                                          const std::string&) {};
  // A call waits for this device. The observer pushes a probe there.
  std::function<void(int64_t layer, const std::string& device)> waits = [](int64_t,
                                                                           const std::string&) {};
  // A call on this device reports an error to MXNet. The observer calls Reports::expect().
  std::function<void(int64_t layer, const std::string& device)> reports = [](int64_t,
                                                                             const std::string&) {};
  // Whether something may run in this process, or for it elsewhere, that no thread here shows.
  std::function<bool()> may_run = [] { return false; };
  // Opens a route to other processes.
  LayerMessages::Open open;
};

}  // namespace gluon_syncbn

#endif  // GLUON_SYNCBN_RENDEZVOUS_TYPES_H_
