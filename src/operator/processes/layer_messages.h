// The messages of a layer: fills them with the sums of this process, sends them on the route of
// their key, puts those of backward calls in order, and adds what all processes have sent, in rank
// order.
#ifndef GLUON_SYNCBN_PROCESSES_LAYER_MESSAGES_H_
#define GLUON_SYNCBN_PROCESSES_LAYER_MESSAGES_H_

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "numerics/sums.h"
#include "processes/reorder_buffer.h"
#include "processes/route.h"

namespace gluon_syncbn {

// One call of all devices of this process, in one direction.
struct ProcessCall {
  int64_t layer, node, sequence;
  bool is_backward;
  // For the user: "SyncBatchNorm 'batchnorm0', forward call 7".
  std::string title;
  double timeout_seconds;
  // The range of ranks whose sums are added.
  size_t first_rank, end_rank;
  // Whether this process contributes zeros.
  bool is_absent;
};

class LayerMessages {
 public:
  // Opens the route of the layer's calls of one direction and node, for messages of `size` values
  // on `channels` channels. Throws.
  using Open = std::function<RoutePtr(const ProcessCall&, int64_t channels, int64_t size)>;
  using Warn = std::function<void(const std::string& text)>;

  // Replaces the sums and the count of this process with those of all. Throws std::runtime_error
  // with a text for the user.
  void all_reduce(const ProcessCall& call, const Open& open, const Warn& warn,
                  std::vector<ChannelSums>* sums, double* count);
  // The layer may use another store from now on: calls that begin later open new routes.
  void forget_routes();
  // The step has failed: calls that wait get this error. Until resume(), those that come too.
  void end_waits(const std::string& error);
  void resume();

 private:
  // The route of a direction and node. Its first call opens it while later ones wait.
  struct Opening {
    std::mutex mutex;
    RoutePtr route;
  };
  std::shared_ptr<Opening> opening(const ProcessCall& call);
  // Sends this process's message, and replaces it with those of all processes, by rank, or only
  // their sum.
  void send(const ProcessCall& call, const Open& open, int64_t channels,
            std::vector<double>* message);
  // `send` for a backward call, which gets the messages of this call. Where one waits for them and
  // no other call of this process sends a message, it sends nothing in the next round.
  void send_backward(const ProcessCall& call, const Open& open, const Warn& warn, int64_t channels,
                     std::vector<double>* message);
  // `send` without the lock; keeps the messages if they are not of one call.
  void send_round(std::unique_lock<std::mutex>* lock, const ProcessCall& call, const Open& open,
                  int64_t channels, std::vector<double>* message);
  // Throws if the step has failed.
  void check_step(const ProcessCall& call) const;
  // The ranks whose messages of the call have arrived.
  std::string arrived(const ProcessCall& call) const;

  std::mutex mutex_;
  std::condition_variable received_;
  std::string ended_;
  // By node: the rounds, and how many calls send a message.
  std::map<int64_t, ReorderBuffer> rounds_;
  std::map<int64_t, int> sending_;
  // By direction and node.
  std::map<std::pair<bool, int64_t>, std::shared_ptr<Opening>> routes_;
};

}  // namespace gluon_syncbn

#endif  // GLUON_SYNCBN_PROCESSES_LAYER_MESSAGES_H_
