// How a device waits for the others of its meeting: awake for a moment, then asleep. It looks up
// now and then, to warn, to probe for devices that cannot arrive, and to give up.
#include <algorithm>
#include <thread>

#include "mxnet/interrupts.h"
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
  Wait(State* state, State::Lock* lock, Layer* layer, const Layer::Key& key, Meeting* meeting,
       const std::string& device, const CallId& id)
      : state_(state),
        lock_(lock),
        layer_(layer),
        key_(key),
        meeting_(meeting),
        device_(device),
        id_(id),
        patience_(layer->config.timeout_seconds),
        first_notice_(std::min(patience_.first(), kLongestSilence)) {
    meeting->next_notice = std::max(meeting->next_notice, first_notice_);
  }

  void until_over() {
    // GPUs take longer than that.
    if (is_cpu(device_)) stay_awake();
    while (!meeting_->over) {
      const Seconds slice = patience_.slice(kSlice);
      // Where the last device is at work, that ends by itself or by its own timeout.
      meeting_->changed.wait_for(*lock_, slice, [&] {
        return meeting_->over || (!meeting_->unreachable.empty() && !meeting_->combining);
      });
      if (meeting_->over) return;
      if (meeting_->combining) continue;
      waited_ = patience_.waited();
      check_hope();
      if (state_->observer.waits && waited_ > next_probe_) {
        probe();
        // Meanwhile the last device may have begun to use this one's sums.
        if (meeting_->over || meeting_->combining) continue;
      }
      check_interrupt(slice);
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

  std::string message() const {
    return layer_->waits_text(key_, *meeting_, device_, waited_) +
           state_->where_missing_wait(*layer_, *meeting_);
  }

  // Fails if a device cannot arrive, or the time is up.
  void check_hope() {
    if (!meeting_->unreachable.empty()) {
      state_->fail(lock_, layer_,
                   message() + "\nAn earlier operation on " + meeting_->unreachable +
                       " has failed, and MXNet runs nothing that depends on it. mx.nd.waitall() "
                       "raises its error, unless it has been raised before.",
                   meeting_->unreachable,
                   std::get<0>(key_) == Direction::kForward ? &id_ : nullptr);
    }
    if (patience_.is_over()) {
      state_->fail(lock_, layer_, message() + layer_->causes(key_, *meeting_));
    }
  }

  void probe() {
    next_probe_ = std::min(2 * waited_, waited_ + kLongestProbe);
    const auto waits = state_->observer.waits;
    lock_->unlock();
    waits(layer_->id, id_.epoch, std::get<0>(key_));
    lock_->lock();
  }

  void check_interrupt(Seconds slice) {
    if (interrupts != interrupts_before_) since_interrupt_ += slice;
    if (since_interrupt_ > kGraceAfterInterrupt) {
      state_->fail(lock_, layer_, message() + "\nInterrupted.");
    }
  }

  void warn() {
    std::string text = message();
    if (meeting_->next_notice == first_notice_) {
      text += "\nAfter " + seconds_text(patience_.timeout()) + " this is an error." +
              layer_->causes(key_, *meeting_);
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
  Layer* const layer_;
  const Layer::Key& key_;
  Meeting* const meeting_;
  const std::string& device_;
  const CallId& id_;
  Patience patience_;
  const Seconds first_notice_;
  const unsigned interrupts_before_ = interrupts;
  Seconds waited_{0}, since_interrupt_{0}, next_probe_{0};
};

}  // namespace

void State::wait(Lock* lock, Layer* layer, const Layer::Key& key, Meeting* meeting,
                 const std::string& device, const CallId& id) {
  if (!given_up.empty()) fail(lock, layer, layer->title(key) + ": " + given_up);
  const Direction direction = std::get<0>(key);
  layer->give_up_on(layer->flushes[direction].passed, direction);
  Wait(this, lock, layer, key, meeting, device, id).until_over();
}

}  // namespace gluon_syncbn
