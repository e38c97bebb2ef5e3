// What other processes sent of calls that each process may come to in an order of its own.
//
// In each round of an exchange every process sends what it has of one call. A process sends each
// call once and receives all rounds, so that in the end it has all of every call, though maybe not
// in the round in which it sent its own part.
#ifndef GLUON_SYNCBN_RENDEZVOUS_REORDER_BUFFER_H_
#define GLUON_SYNCBN_RENDEZVOUS_REORDER_BUFFER_H_

#include <cstddef>
#include <map>
#include <utility>
#include <vector>

namespace gluon_syncbn {

class Mailbox {
 public:
  // A round: equally many values of each process, by rank, the first of them the call's number.
  static bool is_of_one_call(const std::vector<double>& round, size_t processes) {
    const size_t size = round.size() / processes;
    for (size_t rank = 1; rank < processes; ++rank) {
      if (round[size * rank] != round[0]) return false;
    }
    return true;
  }

  void put(const std::vector<double>& round, size_t processes) {
    const size_t size = round.size() / processes;
    for (size_t rank = 0; rank < processes; ++rank) {
      const double* const values = &round[size * rank];
      calls_[values[0]][rank].assign(values, values + size);
    }
  }

  // Of which processes something is there for the call, by rank.
  std::vector<size_t> came(double call) const {
    std::vector<size_t> ranks;
    const auto found = calls_.find(call);
    if (found == calls_.end()) return ranks;
    for (const auto& entry : found->second) ranks.push_back(entry.first);
    return ranks;
  }

  // Takes out the call where it is complete, as a round of its own.
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

  bool empty() const { return calls_.empty(); }

 private:
  // By number, then by rank.
  std::map<double, std::map<size_t, std::vector<double>>> calls_;
};

}  // namespace gluon_syncbn

#endif  // GLUON_SYNCBN_RENDEZVOUS_REORDER_BUFFER_H_
