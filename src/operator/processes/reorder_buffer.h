// Puts backward messages in order, as each process may go backward through its calls in a different
// order.
//
// In each exchange every process sends its values of one call, and all receive this round of
// values. It sends each call once, so it ends up with all values of every call, though not always
// in the round in which it sent its own. A process that begins no call before another is complete
// may have nothing to send in a round: a message with a sequence below zero.
#ifndef GLUON_SYNCBN_PROCESSES_REORDER_BUFFER_H_
#define GLUON_SYNCBN_PROCESSES_REORDER_BUFFER_H_

#include <cstddef>
#include <map>
#include <vector>

namespace gluon_syncbn {

class ReorderBuffer {
 public:
  // A round: equally many values of each process, by rank, of which the first is the call's
  // sequence.
  static bool is_of_one_call(const std::vector<double>& round, size_t processes) {
    const size_t size = round.size() / processes;
    for (size_t rank = 0; rank < processes; ++rank) {
      if (round[size * rank] != round[0] || is_nothing(&round[size * rank])) return false;
    }
    return true;
  }

  // A message of this many values that brings no call.
  static std::vector<double> nothing(size_t size) {
    std::vector<double> message(size);
    message[0] = -1;
    return message;
  }

  void put(const std::vector<double>& round, size_t processes) {
    const size_t size = round.size() / processes;
    for (size_t rank = 0; rank < processes; ++rank) {
      const double* const values = &round[size * rank];
      if (!is_nothing(values)) calls_[values[0]][rank].assign(values, values + size);
    }
  }

  // The ranks whose values of the call are here.
  std::vector<size_t> ranks(double call) const {
    std::vector<size_t> ranks;
    const auto found = calls_.find(call);
    if (found == calls_.end()) return ranks;
    for (const auto& entry : found->second) ranks.push_back(entry.first);
    return ranks;
  }

  // If the call is complete, removes it, writes it to *round as a round of its own, and returns
  // true.
  bool take(double call, size_t processes, std::vector<double>* round) {
    const auto found = calls_.find(call);
    if (found == calls_.end() || found->second.size() < processes) return false;
    round->clear();
    for (const auto& entry : found->second) {
      round->insert(round->end(), entry.second.begin(), entry.second.end());
    }
    calls_.erase(found);
    return true;
  }

 private:
  static bool is_nothing(const double* message) { return message[0] < 0; }

  // By sequence, then by rank.
  std::map<double, std::map<size_t, std::vector<double>>> calls_;
};

}  // namespace gluon_syncbn

#endif  // GLUON_SYNCBN_PROCESSES_REORDER_BUFFER_H_
