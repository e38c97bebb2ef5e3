#include "rendezvous/calls.h"

#include <algorithm>

namespace gluon_syncbn {

Calls::Ticket Calls::ask(const Place& place, Of what) {
  open_[next_] = {place, what};
  return next_++;
}

std::optional<Calls::Place> Calls::answer(Ticket ticket) {
  const auto found = open_.find(ticket);
  if (found == open_.end()) return std::nullopt;
  const auto [place, what] = found->second;
  open_.erase(found);
  if (what == Of::kAll) {
    Ticket& last = ended_.emplace(place, ticket).first->second;
    last = std::max(last, ticket);
  }
  return place;
}

bool Calls::have_ended(const std::set<int64_t>& layers, Ticket from, Ticket to) const {
  for (auto one = open_.lower_bound(from); one != open_.end() && one->first < to; ++one) {
    if (layers.count(one->second.first.first)) return false;
  }
  return true;
}

Calls::Ticket Calls::open_at(const Place& place) const {
  for (const auto& [ticket, probe] : open_) {
    if (probe == std::pair(place, Of::kAll)) return ticket;
  }
  return next_;
}

Calls::Standing Calls::standing(const Place& place, Ticket since) const {
  if (open_at(place) < looked_) return Standing::kQueued;
  const auto ended = ended_.find(place);
  const bool is_known = ended != ended_.end() && ended->second >= since;
  return is_known ? Standing::kNotMade : Standing::kUnknown;
}

void Calls::begin(const Place& place, int64_t node, int64_t sequence) {
  alive_.insert({place, node, sequence});
}

void Calls::drop(const Place& place, int64_t node, int64_t sequence) {
  alive_.erase({place, node, sequence});
}

bool Calls::may_go_backward(const Place& place, int64_t node, int64_t sequence) const {
  return alive_.count({place, node, sequence}) > 0;
}

}  // namespace gluon_syncbn
