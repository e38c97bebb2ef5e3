#include "exchange/channel.h"

#include <algorithm>
#include <stdexcept>

namespace gluon_syncbn {
namespace {

// As many as answer those who ask a little later.
constexpr size_t kRemembered = 16;
// The share of the timeout after which somebody looks what is the matter, and the seconds between
// two looks.
constexpr double kLookAfter = 0.1;
constexpr double kLookEvery = 1;

double now() {
  using Seconds = std::chrono::duration<double>;
  return Seconds(std::chrono::steady_clock::now().time_since_epoch()).count();
}

}  // namespace

Attendance::Stay::Stay(Attendance* attendance, std::string meeting) : attendance_(attendance) {
  const std::lock_guard<std::mutex> lock(attendance_->mutex_);
  std::list<Entry>& open = attendance_->open_;
  entry_ = open.insert(open.end(), {std::move(meeting), now(), true});
}

Attendance::Stay::~Stay() {
  const std::lock_guard<std::mutex> lock(attendance_->mutex_);
  if (success_) {
    attendance_->ended_.push_back({std::move(entry_->meeting), now(), false});
    if (attendance_->ended_.size() > kRemembered) attendance_->ended_.pop_front();
  }
  attendance_->open_.erase(entry_);
}

std::vector<Attendance::Entry> Attendance::entries() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  std::vector<Entry> entries(open_.begin(), open_.end());
  entries.insert(entries.end(), ended_.begin(), ended_.end());
  return entries;
}

Line::Line(std::shared_ptr<Connection> connection, std::string key, int64_t size,
           std::unique_ptr<Carrier> carrier)
    : connection_(std::move(connection)),
      key_(std::move(key)),
      size_(size),
      carrier_(std::move(carrier)) {}

int64_t Line::calls() const {
  const std::lock_guard<std::mutex> lock(turn_);
  return calls_;
}

void Line::exchange(const std::string& title, double timeout_seconds, const double* mine,
                    double* everyone) {
  const std::lock_guard<std::mutex> turn(turn_);
  const std::string call = std::to_string(++calls_);
  Attendance::Stay stay(&connection_->attendance, title + " (" + key_ + " " + call + ")");
  carrier_->pack(mine);
  int status;
  {
    const std::lock_guard<std::mutex> lock(connection_->calls);
    status = carrier_->send();
  }
  if (status == 0) {
    wait(stay, title, timeout_seconds);
    status = mxnet.ndarray_wait_to_read(carrier_->answer());
  }
  if (status != 0) {
    throw std::runtime_error(connection_->look(
        {Waited::kWritten, title, stay.meeting(), mxnet.last_error(), 0, timeout_seconds, 0}));
  }
  carrier_->unpack(everyone);
  stay.success();
}

void Line::wait(const Attendance::Stay& stay, const std::string& title, double timeout_seconds) {
  const double start = now(), first = timeout_seconds * kLookAfter;
  Watch watch(carrier_->answer());
  double slice = first;
  for (int looks = 0;; ++looks) {
    const Waited waited = watch.wait(slice);
    if (waited == Waited::kWritten) return;
    const std::string error = connection_->look(
        {waited, title, stay.meeting(), "", now() - start, timeout_seconds, looks});
    if (!error.empty()) throw std::runtime_error(error);
    slice = std::min(kLookEvery, first);
  }
}

void Lines::set(int64_t layer, const std::string& key, LinePtr line) {
  const std::lock_guard<std::mutex> lock(mutex_);
  lines_[{layer, key}] = std::move(line);
}

LinePtr Lines::find(int64_t layer, const std::string& key) const {
  const std::lock_guard<std::mutex> lock(mutex_);
  const auto found = lines_.find({layer, key});
  return found == lines_.end() ? nullptr : found->second;
}

void Lines::forget(int64_t layer) {
  const std::lock_guard<std::mutex> lock(mutex_);
  lines_.erase(lines_.lower_bound({layer, ""}), lines_.lower_bound({layer + 1, ""}));
}

void Lines::clear() {
  const std::lock_guard<std::mutex> lock(mutex_);
  lines_.clear();
}

}  // namespace gluon_syncbn
