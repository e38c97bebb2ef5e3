#include "exchange/channel.h"

#include "exchange/patience.h"

namespace gluon_syncbn {
namespace {

// Completed exchanges are kept for processes that probe a little later.
constexpr size_t kRemembered = 16;
// The time between two probes of a long wait.
constexpr Patience::Seconds kProbeEvery{1};

double now() { return Patience::Seconds(Patience::Clock::now().time_since_epoch()).count(); }

}  // namespace

InFlightExchanges::Registration::Registration(InFlightExchanges* registry, std::string exchange)
    : registry_(registry) {
  const std::lock_guard<std::mutex> lock(registry_->mutex_);
  std::list<Entry>& open = registry_->open_;
  entry_ = open.insert(open.end(), {std::move(exchange), now(), true});
}

InFlightExchanges::Registration::~Registration() {
  const std::lock_guard<std::mutex> lock(registry_->mutex_);
  if (complete_) {
    registry_->complete_.push_back({std::move(entry_->exchange), now(), false});
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

Channel::Channel(std::shared_ptr<Connection> connection, std::string key, int64_t size,
                 int64_t ranks, Transports transports)
    : connection_(std::move(connection)),
      key_(std::move(key)),
      size_(size),
      ranks_(ranks),
      transports_(std::move(transports)) {}

int64_t Channel::calls() const {
  const std::lock_guard<std::mutex> lock(turn_);
  return calls_;
}

void Channel::restart() {
  const std::lock_guard<std::mutex> lock(turn_);
  if (transports_.fixed_point) transports_.fixed_point->restart();
}

Answer Channel::exchange(const std::string& title, double timeout_seconds, const double* mine,
                         double* everyone) {
  const std::lock_guard<std::mutex> turn(turn_);
  InFlightExchanges::Registration registration(
      &connection_->in_flight, title + " (" + key_ + " " + std::to_string(++calls_) + ")");
  const Wait wait{registration.exchange(), title, timeout_seconds};
  FixedPoint* const fixed_point = transports_.fixed_point.get();
  Answer answer = Answer::kNothing;
  if (fixed_point && fixed_point->ready()) {
    answer = travel(transports_.sums.get(), wait, mine, everyone);
  }
  if (answer == Answer::kNothing) {
    answer = travel(transports_.values.get(), wait, mine, everyone);
    if (fixed_point) fixed_point->follow(everyone);
  }
  registration.complete();
  return answer;
}

Answer Channel::travel(Transport* transport, const Wait& exchange, const double* mine,
                       double* values) {
  try {
    transport->pack(mine);
    transport->send(&connection_->calls);
    wait(transport, exchange);
  } catch (const StoreError& error) {
    throw std::runtime_error(
        connection_->probe({Waited::kWritten, 0, exchange.title.c_str(), exchange.exchange.c_str(),
                            error.what(), 0, exchange.timeout_seconds}));
  }
  return transport->unpack(values);
}

void Channel::wait(Transport* transport, const Wait& exchange) {
  Patience patience(exchange.timeout_seconds);
  for (int probes = 0;;) {
    const Waited waited = transport->wait(patience.slice(kProbeEvery).count());
    if (waited == Waited::kWritten) return;
    if (waited == Waited::kTimeIsUp && !patience.is_long()) continue;
    const std::string error =
        connection_->probe({waited, probes++, exchange.title.c_str(), exchange.exchange.c_str(), "",
                            patience.waited().count(), exchange.timeout_seconds});
    if (!error.empty()) throw std::runtime_error(error);
  }
}

void Channels::set(int64_t layer, const std::string& key, ChannelPtr channel) {
  const std::lock_guard<std::mutex> lock(mutex_);
  channels_[{layer, key}] = std::move(channel);
}

ChannelPtr Channels::find(int64_t layer, const std::string& key) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = channels_.find({layer, key});
  return found == channels_.end() ? nullptr : found->second;
}

void Channels::forget(int64_t layer) {
  const std::lock_guard<std::mutex> lock(mutex_);
  channels_.erase(channels_.lower_bound({layer, ""}), channels_.lower_bound({layer + 1, ""}));
}

void Channels::clear() {
  const std::lock_guard<std::mutex> lock(mutex_);
  channels_.clear();
}

Channels& channels() {
  // Never destroyed: calls may still arrive while the process ends.
  static Channels* const channels = new Channels;
  return *channels;
}

}  // namespace gluon_syncbn
