// A message is the sequence number of the call, the count of values of a channel, and the sums. If
// the messages of all processes come back, each process adds them in rank order, so all get the
// same bits.
#include "processes/layer_messages.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "processes/fixed_point.h"
#include "processes/text.h"
#include "threads/patience.h"
#include "threads/waits.h"

namespace gluon_syncbn {
namespace {

// Adds the messages of the ranks that share statistics, in rank order, to the first of them.
const double* add_ranks(const ProcessCall& call, size_t size, std::vector<double>* all) {
  double* const total = &(*all)[size * call.first_rank];
  for (size_t rank = call.first_rank; rank < call.end_rank; ++rank) {
    const double* const values = &(*all)[size * rank];
    if (values[0] != static_cast<double>(call.sequence)) {
      throw std::runtime_error(call.title + ": the process of rank " + std::to_string(rank) +
                               " is at its call " +
                               std::to_string(static_cast<int64_t>(values[0])) +
                               " there. Every process must call the net equally often: see "
                               "gluon_syncbn.distributed.join for uneven numbers of batches.");
    }
    if (values != total) add_message(values, static_cast<int64_t>(size), total);
  }
  return total;
}

}  // namespace

void LayerMessages::all_reduce(const ProcessCall& call, const Open& open, const Warn& warn,
                               std::vector<ChannelSums>* sums, double* count) {
  const size_t size = kCallSize + kSumsSize * sums->size();
  const auto* const own = reinterpret_cast<const double*>(sums->data());
  std::vector<double> message{static_cast<double>(call.sequence), call.is_absent ? 0 : *count};
  message.reserve(size);
  if (call.is_absent) {
    message.resize(size);
  } else {
    message.insert(message.end(), own, own + size - kCallSize);
  }
  const auto channels = static_cast<int64_t>(sums->size());
  // Forward calls need no reordering: all write the running statistics, so MXNet runs them in
  // order.
  if (call.is_backward) {
    send_backward(call, open, warn, channels, &message);
  } else {
    send(call, open, channels, &message);
  }
  const double* total = message.data();
  if (message.size() > size) total = add_ranks(call, size, &message);
  *count = total[1];
  std::memcpy(static_cast<void*>(sums->data()), total + kCallSize,
              sums->size() * sizeof(ChannelSums));
}

void LayerMessages::forget_routes() {
  const std::lock_guard<std::mutex> lock(mutex_);
  routes_.clear();
}

std::shared_ptr<LayerMessages::Opening> LayerMessages::opening(const ProcessCall& call) {
  const std::lock_guard<std::mutex> lock(mutex_);
  auto& found = routes_[{call.is_backward, call.node}];
  if (!found) found = std::make_shared<Opening>();
  return found;
}

void LayerMessages::send(const ProcessCall& call, const Open& open, int64_t channels,
                         std::vector<double>* message) {
  const std::shared_ptr<Opening> key = opening(call);
  {
    const std::lock_guard<std::mutex> lock(key->mutex);
    if (!key->route) {
      key->route = open(call, channels, static_cast<int64_t>(message->size()));
    }
  }
  Route& route = *key->route;
  if (static_cast<size_t>(route.ranks()) < call.end_rank) {
    throw std::runtime_error(call.title + ": the group of the layer was changed during this call.");
  }
  route.exchange(call.title, call.timeout_seconds, message);
}

void LayerMessages::end_waits(const std::string& error) {
  const std::lock_guard<std::mutex> lock(mutex_);
  ended_ = error;
  rounds_.clear();
  received_.notify_all();
}

void LayerMessages::resume() {
  const std::lock_guard<std::mutex> lock(mutex_);
  ended_.clear();
}

void LayerMessages::send_backward(const ProcessCall& call, const Open& open, const Warn& warn,
                                  int64_t channels, std::vector<double>* message) {
  const size_t size = message->size();
  std::unique_lock<std::mutex> lock(mutex_);
  send_round(&lock, call, open, channels, message);
  const size_t processes = message->size() / size;
  if (ReorderBuffer::is_of_one_call(*message, processes)) return;
  Patience patience(call.timeout_seconds);
  const Interruption interruption;
  const auto is_complete = [&] {
    return !ended_.empty() ||
           rounds_[call.node].take(static_cast<double>(call.sequence), processes, message);
  };
  bool warned = false;
  while (!is_complete()) {
    const Waited waited =
        wait_until(&lock, &received_, patience.slice(kSlice).count(), interruption, is_complete);
    if (waited == Waited::kDone) break;
    // Decided under the lock, so that no round with what is missing is under way.
    if (sending_[call.node] == 0) {
      std::vector<double> nothing = ReorderBuffer::nothing(size);
      send_round(&lock, call, open, channels, &nothing);
    }
    const bool interrupted = waited == Waited::kInterrupted;
    if (!interrupted && (warned || !patience.is_long()) && !patience.is_over()) continue;
    const std::string text = call.title + ": waited " + seconds_text(patience.waited()) +
                             " for all of " + std::to_string(processes) +
                             " processes to go backward through this call. Arrived: ranks " +
                             arrived(call) + "; the others went through other calls of the layer. ";
    if (interrupted) throw std::runtime_error(text + "Interrupted.");
    if (patience.is_over()) {
      throw std::runtime_error(text +
                               "Call backward for the same calls, in the same order, in all of "
                               "them.");
    }
    warned = true;
    lock.unlock();
    warn(text + "After " + seconds_text(patience.timeout()) + " this is an error.");
    lock.lock();
  }
  check_step(call);
}

void LayerMessages::send_round(std::unique_lock<std::mutex>* lock, const ProcessCall& call,
                               const Open& open, int64_t channels, std::vector<double>* message) {
  const size_t size = message->size();
  ++sending_[call.node];
  lock->unlock();
  try {
    send(call, open, channels, message);
  } catch (...) {
    lock->lock();
    --sending_[call.node];
    throw;
  }
  lock->lock();
  --sending_[call.node];
  const size_t processes = message->size() / size;
  if (ReorderBuffer::is_of_one_call(*message, processes)) return;
  check_step(call);
  rounds_[call.node].put(*message, processes);
  received_.notify_all();
}

void LayerMessages::check_step(const ProcessCall& call) const {
  if (!ended_.empty()) throw std::runtime_error(call.title + ": " + ended_);
}

std::string LayerMessages::arrived(const ProcessCall& call) const {
  std::vector<std::string> ranks;
  for (const size_t rank : rounds_.at(call.node).ranks(static_cast<double>(call.sequence))) {
    ranks.push_back(std::to_string(rank));
  }
  return comma_separated(ranks);
}

}  // namespace gluon_syncbn
