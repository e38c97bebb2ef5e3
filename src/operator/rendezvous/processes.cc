// The part of a meeting that other processes have: their sums.

#include <algorithm>
#include <cstring>

#include "rendezvous/state.h"

namespace gluon_syncbn {
namespace {

// Of ChannelSums, in doubles.
constexpr size_t kSumsSize = 6;

}  // namespace

void AllReduce::exchange(Layer* layer, const Ticket& ticket, Direction direction,
                         std::vector<ChannelSums>* sums, double* count) {
  static_assert(sizeof(ChannelSums) == kSumsSize * sizeof(double), "sums travel as they are");
  Message message;
  LayerConfig config;
  bool absent;
  const decltype(Observer::exchange)* send;
  {
    const State::Lock lock(state_->mutex);
    config = layer->config;
    if (!config.exchanges()) return;
    absent = state_->absent;
    send = &state_->observer.exchange;
    message.title = layer->title({direction, ticket.place, ticket.number, 0});
  }
  const std::string way = direction == Direction::kForward ? " forward " : " backward ";
  message.layer = layer->number;
  message.key = std::to_string(layer->number) + way + std::to_string(ticket.place);
  message.channels = static_cast<int64_t>(sums->size());
  message.timeout_seconds = config.timeout_seconds;
  // The call's number, the count, the sums.
  const size_t size = 2 + kSumsSize * sums->size();
  message.values.resize(size);
  message.values[0] = static_cast<double>(ticket.number);
  if (!absent) {
    message.values[1] = *count;
    std::memcpy(&message.values[2], sums->data(), (size - 2) * sizeof(double));
  }
  std::vector<double> all(size * config.processes);
  const std::string error = (*send)(message, &all);
  if (!error.empty()) throw Error(error);
  // Forward calls come in one order, as all of them write the running statistics.
  if (direction == Direction::kBackward) sort_out(layer, ticket, config.processes, &all);

  std::fill(sums->begin(), sums->end(), ChannelSums());
  *count = 0;
  for (size_t rank = config.first_rank; rank < config.end_rank; ++rank) {
    const double* const values = &all[size * rank];
    if (values[0] != message.values[0]) {
      throw Error(message.title + ": the process of rank " + std::to_string(rank) +
                  " is at its call " + number(values[0]) +
                  " there. Every process has to call the net equally often: see "
                  "gluon_syncbn.distributed.join for uneven numbers of batches.");
    }
    *count += values[1];
    for (size_t c = 0; c < sums->size(); ++c) {
      ChannelSums part;
      std::memcpy(static_cast<void*>(&part), values + 2 + kSumsSize * c, sizeof(part));
      (*sums)[c].add(part);
    }
  }
}

void AllReduce::sort_out(Layer* layer, const Ticket& ticket, size_t processes,
                         std::vector<double>* round) {
  if (Mailbox::is_of_one_call(*round, processes)) return;
  const auto number_of_call = static_cast<double>(ticket.number);
  State::Lock lock(state_->mutex);
  const auto check_going_on = [&] {
    if (!state_->closed.empty()) throw Error(state_->closed);
    if (ticket.generation != layer->generation) throw layer->failed_before();
  };
  check_going_on();
  layer->mail[ticket.place].put(*round, processes);
  layer->mail_came.notify_all();
  const Seconds timeout(layer->config.timeout_seconds);
  const Clock::time_point start = Clock::now();
  const unsigned interrupts_before = AllReduce::interrupts();
  bool warned = false;
  while (!layer->mail[ticket.place].take(number_of_call, processes, round)) {
    layer->mail_came.wait_for(lock, std::min(kSlice, timeout * kWarnAfter));
    check_going_on();
    const Seconds waited = Clock::now() - start;
    const bool interrupted = AllReduce::interrupts() != interrupts_before;
    if (!interrupted && (warned || waited < timeout * kWarnAfter) && waited < timeout) continue;
    std::vector<std::string> came;
    for (const size_t rank : layer->mail[ticket.place].came(number_of_call)) {
      came.push_back(std::to_string(rank));
    }
    const std::string story = layer->title({Direction::kBackward, ticket.place, ticket.number, 0}) +
                              ": waited " + number(waited.count()) + " s for all of " +
                              std::to_string(processes) +
                              " processes to go backward through this call. Came: ranks " +
                              join(came) + "; the others went through other calls of the layer. ";
    if (interrupted) throw Error(story + "Interrupted.");
    if (waited >= timeout)
      throw Error(story + "Call backward for the same calls, in the same order, in all of them.");
    warned = true;
    if (const auto warn = state_->observer.warn) {
      lock.unlock();
      warn(story + "After " + number(timeout.count()) + " s this is an error.");
      lock.lock();
    }
  }
}

}  // namespace gluon_syncbn
