// An exchange carries sums if the store adds and all of them fit. If not, all processes learn it
// from the same answer, and carry their values instead. Where the wait gets long, a probe asks
// whether to go on.
#include "processes/route.h"

#include <utility>

#include "processes/patience.h"

namespace gluon_syncbn {
namespace {

// Completed exchanges are kept for processes that probe a little later.
constexpr size_t kRemembered = 16;
// The time between two probes of a long wait.
constexpr Patience::Seconds kProbeEvery{1};

double now() { return Patience::Seconds(Patience::Clock::now().time_since_epoch()).count(); }

}  // namespace

InFlightExchanges::Registration::Registration(InFlightExchanges* registry, std::string name)
    : registry_(registry) {
  const std::lock_guard<std::mutex> lock(registry_->mutex_);
  std::list<Entry>& open = registry_->open_;
  entry_ = open.insert(open.end(), {std::move(name), now(), true});
}

InFlightExchanges::Registration::~Registration() {
  const std::lock_guard<std::mutex> lock(registry_->mutex_);
  if (complete_) {
    registry_->complete_.push_back({std::move(entry_->name), now(), false});
    if (registry_->complete_.size() > kRemembered) registry_->complete_.pop_front();
  }
  registry_->open_.erase(entry_);
}

std::vector<InFlightExchanges::Entry> InFlightExchanges::entries() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::vector<Entry> entries(open_.begin(), open_.end());
  entries.insert(entries.end(), complete_.begin(), complete_.end());
  return entries;
}

Route::Route(std::shared_ptr<Connection> connection, std::string key, int64_t size, int64_t ranks,
             Transports transports)
    : connection_(std::move(connection)),
      key_(std::move(key)),
      size_(size),
      ranks_(ranks),
      transports_(std::move(transports)) {}

int64_t Route::calls() const {
  const std::lock_guard<std::mutex> lock(turn_);
  return calls_;
}

void Route::restart() {
  const std::lock_guard<std::mutex> turn(turn_);
  if (transports_.fixed_point) transports_.fixed_point->restart();
  const std::lock_guard<std::mutex> lock(closing_);
  closed_.clear();
}

void Route::close(const std::string& why) {
  const std::lock_guard<std::mutex> lock(closing_);
  if (closed_.empty()) closed_ = why;
}

void Route::check(const std::string& title, int64_t size) const {
  const std::lock_guard<std::mutex> lock(closing_);
  if (!closed_.empty()) throw std::runtime_error(title + ": " + closed_);
  if (size != size_) {
    throw std::runtime_error(title + " gives " + std::to_string(size) + " numbers after " +
                             std::to_string(size_) +
                             " before: give every sum of another size a key of its own.");
  }
}

Answer Route::exchange(const std::string& title, double timeout_seconds,
                       std::vector<double>* values) {
  const std::lock_guard<std::mutex> turn(turn_);
  check(title, static_cast<int64_t>(values->size()));
  InFlightExchanges::Registration registration(
      &connection_->in_flight, title + " (" + key_ + " " + std::to_string(++calls_) + ")");
  const Exchange current{registration.name(), title, timeout_seconds};
  FixedPoint* const fixed_point = transports_.fixed_point.get();
  Answer answer = Answer::kNothing;
  if (fixed_point && fixed_point->ready()) {
    answer = travel(transports_.sums.get(), current, values);
  }
  if (answer == Answer::kNothing) {
    answer = travel(transports_.values.get(), current, values);
    if (fixed_point) fixed_point->follow(values->data());
  }
  registration.complete();
  return answer;
}

Answer Route::travel(Transport* transport, const Exchange& exchange, std::vector<double>* values) {
  try {
    transport->pack(values->data());
    transport->send(&connection_->calls);
    wait(transport, exchange);
  } catch (const StoreError& error) {
    throw std::runtime_error(
        connection_->probe({Waited::kDone, 0, exchange.title.c_str(), exchange.name.c_str(),
                            error.what(), 0, exchange.timeout_seconds}));
  }
  return transport->unpack(values);
}

// The limit is set by who answers the probe: Peers.judge, in Python.
void Route::wait(Transport* transport, const Exchange& exchange) {
  Patience patience(exchange.timeout_seconds);
  for (int probes = 0;;) {
    const Waited waited = transport->wait(patience.slice(kProbeEvery).count());
    if (waited == Waited::kDone) return;
    if (waited == Waited::kTimeIsUp && !patience.is_long()) continue;
    const std::string error =
        connection_->probe({waited, probes++, exchange.title.c_str(), exchange.name.c_str(), "",
                            patience.waited().count(), exchange.timeout_seconds});
    if (!error.empty()) throw std::runtime_error(error);
  }
}

}  // namespace gluon_syncbn
