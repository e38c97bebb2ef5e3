// An exchange carries sums if the store adds and all of them fit. If not, all processes learn it
// from the same answer, and carry their values instead.
#include "processes/route.h"

#include <chrono>
#include <utility>

namespace gluon_syncbn {
namespace {

// Completed exchanges are kept, as other processes may still wait in them.
constexpr size_t kRemembered = 16;

double now() {
  const auto since_boot = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration<double>(since_boot).count();
}

}  // namespace

InFlightExchanges::Registration::Registration(InFlightExchanges* registry, Entry entry)
    : registry_(registry) {
  const std::lock_guard<std::mutex> lock(registry_->mutex_);
  std::list<Entry>& open = registry_->open_;
  entry_ = open.insert(open.end(), std::move(entry));
  entry_->since = now();
  entry_->open = true;
}

InFlightExchanges::Registration::~Registration() {
  const std::lock_guard<std::mutex> lock(registry_->mutex_);
  if (complete_) {
    entry_->since = now();
    entry_->open = false;
    registry_->complete_.push_back(std::move(*entry_));
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

void Route::close(const std::string& why) {
  const std::lock_guard<std::mutex> lock(closing_);
  if (closed_.empty()) closed_ = why;
  closes_.notify_all();
}

void Route::check_open(const std::string& title) const {
  const std::lock_guard<std::mutex> lock(closing_);
  if (closed_.empty()) return;
  const bool has_title = closed_.compare(0, title.size(), title) == 0;
  throw std::runtime_error(has_title ? closed_ : title + ": " + closed_);
}

Answer Route::exchange(const std::string& title, double timeout_seconds,
                       std::vector<double>* values) {
  const std::lock_guard<std::mutex> turn(turn_);
  check_open(title);
  if (static_cast<int64_t>(values->size()) != size_) {
    throw std::runtime_error(title + " gives " + std::to_string(values->size()) +
                             " numbers after " + std::to_string(size_) +
                             " before: give every sum of another size a key of its own.");
  }
  InFlightExchanges::Registration registration(&connection_->in_flight,
                                               {title, key_, ++calls_, timeout_seconds, 0, true});
  FixedPoint* const fixed_point = transports_.fixed_point.get();
  Answer answer = Answer::kNothing;
  if (fixed_point && fixed_point->ready()) {
    answer = travel(transports_.sums.get(), title, values);
  }
  if (answer == Answer::kNothing) {
    answer = travel(transports_.values.get(), title, values);
    if (fixed_point) fixed_point->follow(values->data());
  }
  registration.complete();
  return answer;
}

Answer Route::travel(Transport* transport, const std::string& title, std::vector<double>* values) {
  try {
    transport->pack(values->data());
    transport->send(&connection_->calls);
    wait(transport, title);
  } catch (const StoreError& error) {
    wait_for_explanation();
    check_open(title);
    throw std::runtime_error(title + ": " + error.what());
  }
  return transport->unpack(values);
}

void Route::wait(Transport* transport, const std::string& title) {
  for (;;) {
    const Waited waited = transport->wait(kSlice.count());
    if (waited == Waited::kDone) return;
    check_open(title);
    if (waited == Waited::kTimeIsUp) continue;
    // The store still waits.
    abandoned = true;
    throw std::runtime_error(
        title + ": " + (waited == Waited::kInterrupted ? "Interrupted." : "The process ends."));
  }
}

void Route::wait_for_explanation() {
  std::unique_lock<std::mutex> lock(closing_);
  wait_until(&lock, &closes_, connection_->explained_within, Interruption(),
             [&] { return !closed_.empty(); });
}

}  // namespace gluon_syncbn
