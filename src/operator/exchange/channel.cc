#include "exchange/channel.h"

#include <algorithm>
#include <chrono>
#include <stdexcept>

namespace gluon_syncbn {
namespace {

// Completed exchanges are kept for processes that probe a little later.
constexpr size_t kRemembered = 16;
// The share of the timeout after which a wait is probed, and the seconds between two probes.
constexpr double kProbeAfter = 0.1;
constexpr double kProbeEvery = 1;

double now() {
  using Seconds = std::chrono::duration<double>;
  return Seconds(std::chrono::steady_clock::now().time_since_epoch()).count();
}

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
                 std::unique_ptr<Transport> transport)
    : connection_(std::move(connection)),
      key_(std::move(key)),
      size_(size),
      transport_(std::move(transport)) {}

int64_t Channel::calls() const {
  const std::lock_guard<std::mutex> lock(turn_);
  return calls_;
}

void Channel::exchange(const std::string& title, double timeout_seconds, const double* mine,
                       double* everyone) {
  const std::lock_guard<std::mutex> turn(turn_);
  InFlightExchanges::Registration registration(
      &connection_->in_flight, title + " (" + key_ + " " + std::to_string(++calls_) + ")");
  transport_->pack(mine);
  int status;
  {
    const std::lock_guard<std::mutex> lock(connection_->calls);
    status = transport_->send();
  }
  if (status == 0) {
    wait(registration.exchange(), title, timeout_seconds);
    status = mxnet.ndarray_wait_to_read(transport_->answer());
  }
  if (status != 0) {
    const std::string error = mxnet.last_error();
    throw std::runtime_error(
        connection_->probe({Waited::kWritten, 0, title.c_str(), registration.exchange().c_str(),
                            error.c_str(), 0, timeout_seconds}));
  }
  transport_->unpack(everyone);
  registration.complete();
}

void Channel::wait(const std::string& exchange, const std::string& title, double timeout_seconds) {
  const double start = now(), first = timeout_seconds * kProbeAfter;
  Watch watch(transport_->answer());
  double slice = first;
  for (int probes = 0;; ++probes) {
    const Waited waited = watch.wait(slice);
    if (waited == Waited::kWritten) return;
    const std::string error = connection_->probe(
        {waited, probes, title.c_str(), exchange.c_str(), "", now() - start, timeout_seconds});
    if (!error.empty()) throw std::runtime_error(error);
    slice = std::min(kProbeEvery, first);
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

}  // namespace gluon_syncbn
