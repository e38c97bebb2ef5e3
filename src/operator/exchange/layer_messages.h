// Exchanges a layer's messages with other processes, to replace this process's sums with those of
// all.
#ifndef GLUON_SYNCBN_EXCHANGE_LAYER_MESSAGES_H_
#define GLUON_SYNCBN_EXCHANGE_LAYER_MESSAGES_H_

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "exchange/reorder_buffer.h"
#include "numerics/sums.h"

namespace gluon_syncbn {

// What a process sends to the others of its layer.
struct Message {
  int64_t layer;
  // Shared by messages that are never in flight at the same time: "12 forward 0".
  std::string key;
  // For the user: "SyncBatchNorm 'batchnorm0', forward call 7".
  std::string title;
  int64_t channels;
  double timeout_seconds;
  std::vector<double> values;
};

// One call of all devices of this process, in one direction.
struct ExchangedCall {
  int64_t layer, epoch, node, sequence;
  bool is_backward;
  std::string title;
  double timeout_seconds;
  // How many processes there are, and the range of ranks whose sums are added.
  size_t processes, first_rank, end_rank;
  // Whether this process has run out of data and contributes zeros.
  bool joined;
};

class LayerMessages {
 public:
  // Writes the values of all processes, by rank, or, if all are at this call, only their sums.
  using Send = std::function<void(const Message&, std::vector<double>* all)>;
  using Warn = std::function<void(const std::string& text)>;

  // Replaces the sums and the count of this process with those of all. Throws what `send` throws,
  // and std::runtime_error.
  void all_reduce(const ExchangedCall& call, const Send& send, const Warn& warn,
                  std::vector<ChannelSums>* sums, double* count);
  // Calls of earlier epochs get this error. kClosed is the last epoch, and no call's.
  static constexpr int64_t kClosed = -1;
  void start_epoch(int64_t epoch, const std::string& error);

 private:
  // Waits for the messages of this backward call, and replaces those of the round with them.
  void reorder(const ExchangedCall& call, const Warn& warn, std::vector<double>* round);
  // The ranks whose messages of the call have arrived.
  std::string came(const ExchangedCall& call) const;

  std::mutex mutex_;
  std::condition_variable received_;
  int64_t epoch_ = 0;
  std::string ended_;
  // By node.
  std::map<int64_t, ReorderBuffer> rounds_;
};

}  // namespace gluon_syncbn

#endif  // GLUON_SYNCBN_EXCHANGE_LAYER_MESSAGES_H_
