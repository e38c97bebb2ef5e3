// Of the calls that devices wait for, which have been made, and which can still be made. No lock,
// no clock: events in, answers out. failures.cc tells it what MXNet and Python say.
#ifndef GLUON_SYNCBN_RENDEZVOUS_CALLS_H_
#define GLUON_SYNCBN_RENDEZVOUS_CALLS_H_

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <tuple>
#include <utility>

namespace gluon_syncbn {

// Whether the calls of a layer on a device have been made.
//
// MXNet's engine knows: each forward call writes the running mean of its device, and each backward
// call reads it. So an operation that writes it, a *probe*, ends once all calls that were made
// before have ended. If MXNet skips the probe, it has skipped a call: the running mean holds an
// error. A second kind of probe reads what backward calls write.
class Calls {
 public:
  using Ticket = int64_t;
  using Place = std::pair<int64_t, std::string>;  // A layer and a device.
  enum class Of { kAll, kGradients };
  enum class Standing {
    kUnknown,
    kNotMade,  // A probe has ended without a call.
    kQueued,   // A probe has not ended by the next look.
  };

  // A probe is pushed. Tickets count up.
  Ticket ask(const Place& place, Of what);
  // It has ended. Returns its place; nothing if it was forgotten.
  std::optional<Place> answer(Ticket ticket);
  // What probes say from now on is about calls of a step that has gone.
  void forget() { open_.clear(); }
  // The next ticket.
  Ticket next() const { return next_; }
  bool has_open(const Place& place) const { return open_at(place) < next_; }
  // Some time has passed, in which MXNet would have run a probe that nothing is before.
  void look() { looked_ = next_; }
  // Whether all probes of these layers from this ticket on, and before that, have ended.
  bool have_ended(const std::set<int64_t>& layers, Ticket from, Ticket to) const;
  // By probes from this ticket on.
  Standing standing(const Place& place, Ticket since) const;

  // A forward call has its number. It lives until the last array that depends on it has gone or
  // gone backward, or its graph goes forward again: then there can be no backward of it any more.
  void begin(const Place& place, int64_t node, int64_t sequence);
  void drop(const Place& place, int64_t node, int64_t sequence);
  bool may_go_backward(const Place& place, int64_t node, int64_t sequence) const;

 private:
  // The first open probe of a place; or next().
  Ticket open_at(const Place& place) const;

  Ticket next_ = 0, looked_ = 0;
  std::map<Ticket, std::pair<Place, Of>> open_;
  // The last probe of a place that has ended.
  std::map<Place, Ticket> ended_;
  std::set<std::tuple<Place, int64_t, int64_t>> alive_;
};

}  // namespace gluon_syncbn

#endif  // GLUON_SYNCBN_RENDEZVOUS_CALLS_H_
