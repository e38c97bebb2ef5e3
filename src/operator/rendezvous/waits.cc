// How a device waits for the others of its meeting: awake for a moment, then asleep. It looks up
// now and then, to warn, to probe for devices that cannot arrive, and to give up.
#include "mxnet/waits.h"

#include <algorithm>
#include <thread>

#include "rendezvous/state.h"

namespace gluon_syncbn {
namespace {

constexpr Seconds kGraceAfterInterrupt{0.5};
// The longest time between two probes for devices that cannot arrive.
constexpr Seconds kLongestProbe{1};
// The latest time of the first notice of a wait. Later ones, which are short, come each time the
// wait is kBetweenNotices times as long as at the one before.
constexpr Seconds kLongestSilence{5};
constexpr int kBetweenNotices = 4;
// Devices arrive shortly after each other, and waking a sleeping thread often takes as long as the
// work of a layer. So a call first stays awake this long, unless another thread wants the core.
constexpr Seconds kAwake{0.0003};

// One device's wait. The lock is held, except while an observer is called.
class Wait {
 public:
  Wait(State* state, State::Lock* lock, const Layer& layer, const Layer::Key& key, Meeting* meeting,
       const std::string& device)
      : state_(state),
        lock_(lock),
        layer_(layer),
        key_(key),
        meeting_(meeting),
        device_(device),
        patience_(layer.config.timeout_seconds),
        first_notice_(std::min(patience_.first(), kLongestSilence)) {
    meeting->next_notice = std::max(meeting->next_notice, first_notice_);
  }

  void until_over() {
    // GPUs take longer than that.
    if (is_cpu(device_)) stay_awake();
    const auto is_over = [this] { return meeting_->over.load(); };
    while (!meeting_->over) {
      const double slice = patience_.slice(kSlice).count();
      const Waited waited = wait_until(lock_, &meeting_->changed, slice, interruption_, is_over);
      waited_ = patience_.waited();
      if (waited == Waited::kInterrupted) since_interrupt_ += Seconds(slice);
      if (!may_leave()) continue;
      if (patience_.is_over()) fail(layer_.causes(key_, *meeting_));
      if (state_->observer.waits && waited_ > next_probe_) probe();
      if (!may_leave()) continue;
      if (since_interrupt_ > kGraceAfterInterrupt) fail("\nInterrupted.");
      if (waited_ > meeting_->next_notice) warn();
    }
  }

 private:
  void stay_awake() {
    lock_->unlock();
    for (const auto start = Clock::now(); !meeting_->over && Clock::now() - start < kAwake;) {
      std::this_thread::yield();
    }
    lock_->lock();
  }

  bool may_leave() const { return !meeting_->over && !layer_.is_combining(key_, *meeting_); }

  std::string message() const {
    return layer_.waits_text(key_, *meeting_, device_, waited_) +
           state_->where_missing_wait(layer_, *meeting_);
  }

  [[noreturn]] void fail(const std::string& why) { state_->fail(message() + why); }

  void probe() {
    next_probe_ = std::min(2 * waited_, waited_ + kLongestProbe);
    const auto waits = state_->observer.waits;
    lock_->unlock();
    waits(layer_.id, key_.direction, meeting_->id);
    lock_->lock();
  }

  void warn() {
    std::string text = message();
    if (meeting_->next_notice == first_notice_) {
      text += "\nAfter " + seconds_text(patience_.timeout()) + " this is an error." +
              layer_.causes(key_, *meeting_);
    }
    meeting_->next_notice = kBetweenNotices * waited_;
    if (const auto observed = state_->observer.warn) {
      lock_->unlock();
      observed(text);
      lock_->lock();
    }
  }

  State* const state_;
  State::Lock* const lock_;
  const Layer& layer_;
  const Layer::Key& key_;
  Meeting* const meeting_;
  const std::string& device_;
  Patience patience_;
  const Seconds first_notice_;
  const Interruption interruption_;
  Seconds waited_{0}, since_interrupt_{0}, next_probe_{0};
};

}  // namespace

void State::wait(Lock* lock, const Layer& layer, const Layer::Key& key, Meeting* meeting,
                 const std::string& device) {
  Wait(this, lock, layer, key, meeting, device).until_over();
}

}  // namespace gluon_syncbn
