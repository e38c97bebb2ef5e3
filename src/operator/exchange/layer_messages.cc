#include "exchange/layer_messages.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "exchange/fixed_point.h"
#include "exchange/patience.h"
#include "exchange/text.h"
#include "mxnet/interrupts.h"

namespace gluon_syncbn {

void LayerMessages::all_reduce(const ExchangedCall& call, const Send& send, const Warn& warn,
                               std::vector<ChannelSums>* sums, double* count) {
  const size_t size = kCallSize + kSumsSize * sums->size();
  Message message{call.layer,
                  std::to_string(call.layer) + (call.is_backward ? " backward " : " forward ") +
                      std::to_string(call.node),
                  call.title,
                  static_cast<int64_t>(sums->size()),
                  call.timeout_seconds,
                  std::vector<double>(size)};
  message.values[0] = static_cast<double>(call.sequence);
  if (!call.joined) {
    message.values[1] = *count;
    std::memcpy(&message.values[kCallSize], sums->data(), sums->size() * sizeof(ChannelSums));
  }
  std::vector<double> all(size * call.processes);
  send(message, &all);
  double* total = all.data();
  if (all.size() > size) {
    // Forward calls need no reordering: all write the running statistics, so MXNet runs them in
    // order.
    if (call.is_backward) reorder(call, warn, &all);
    total = &all[size * call.first_rank];
    for (size_t rank = call.first_rank; rank < call.end_rank; ++rank) {
      const double* const values = &all[size * rank];
      if (values[0] != message.values[0]) {
        throw std::runtime_error("the process of rank " + std::to_string(rank) +
                                 " is at its call " +
                                 std::to_string(static_cast<int64_t>(values[0])) +
                                 " there. Every process must call the net equally often: see "
                                 "gluon_syncbn.distributed.join for uneven numbers of batches.");
      }
      if (values != total) add_message(values, static_cast<int64_t>(size), total);
    }
  }
  *count = total[1];
  std::memcpy(static_cast<void*>(sums->data()), total + kCallSize,
              sums->size() * sizeof(ChannelSums));
}

void LayerMessages::start_epoch(int64_t epoch, const std::string& error) {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (epoch_ == kClosed) return;
  epoch_ = epoch;
  ended_ = error;
  rounds_.clear();
  received_.notify_all();
}

void LayerMessages::reorder(const ExchangedCall& call, const Warn& warn,
                            std::vector<double>* round) {
  if (ReorderBuffer::is_of_one_call(*round, call.processes)) return;
  std::unique_lock<std::mutex> lock(mutex_);
  const auto check_epoch = [&] {
    if (call.epoch != epoch_) throw std::runtime_error(ended_);
  };
  check_epoch();
  rounds_[call.node].put(*round, call.processes);
  received_.notify_all();
  Patience patience(call.timeout_seconds);
  const unsigned interrupts_before = interrupts;
  bool warned = false;
  while (!rounds_[call.node].take(static_cast<double>(call.sequence), call.processes, round)) {
    received_.wait_for(lock, std::min(kSlice, patience.slice(kSlice)));
    check_epoch();
    const bool interrupted = interrupts != interrupts_before;
    if (!interrupted && (warned || !patience.is_long()) && !patience.is_over()) continue;
    const std::string message = "waited " + seconds_text(patience.waited()) + " for all of " +
                                std::to_string(call.processes) +
                                " processes to go backward through this call. Came: ranks " +
                                came(call) + "; the others went through other calls of the layer. ";
    if (interrupted) throw std::runtime_error(message + "Interrupted.");
    if (patience.is_over()) {
      throw std::runtime_error(message +
                               "Call backward for the same calls, in the same order, in all of "
                               "them.");
    }
    warned = true;
    lock.unlock();
    warn(call.title + ": " + message + "After " + seconds_text(patience.timeout()) +
         " this is an error.");
    lock.lock();
    check_epoch();
  }
}

std::string LayerMessages::came(const ExchangedCall& call) const {
  std::vector<std::string> ranks;
  for (const size_t rank : rounds_.at(call.node).ranks(static_cast<double>(call.sequence))) {
    ranks.push_back(std::to_string(rank));
  }
  return comma_separated(ranks);
}

}  // namespace gluon_syncbn
