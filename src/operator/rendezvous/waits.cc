// How a device waits for the others of its meeting: awake for a moment, then asleep. It looks up
// now and then, to warn, to probe for devices that cannot arrive, and to give up.
#include "mxnet/waits.h"

#include <algorithm>
#include <utility>

#include "rendezvous/state.h"

namespace gluon_syncbn {
namespace {

constexpr Seconds kGraceAfterInterrupt{0.5};
// The longest time between two probes for devices that cannot arrive.
constexpr Seconds kLongestProbe{1};
// The latest time of the warning of a wait.
constexpr Seconds kLongestSilence{5};
// Devices arrive shortly after each other, and waking a sleeping thread often takes as long as the
// work of a layer. So a call first stays awake this long, unless another thread wants the core.
constexpr Seconds kAwake{0.0003};

}  // namespace

// The lock is held, except while an observer is called.
void State::wait(Lock* lock, const Layer& layer, const Layer::Key& key, Meeting* meeting,
                 const std::string& device) {
  Patience patience(layer.config.timeout_seconds);
  const Interruption interruption;
  const Seconds silence = std::min(patience.first(), kLongestSilence);
  Seconds waited{0}, since_interrupt{0}, next_probe{0};
  const auto may_leave = [&] { return !meeting->over && !meeting->is_combining; };
  const auto message = [&] {
    return layer.waits_text(key, *meeting, device, waited) + where_missing_wait(layer, *meeting);
  };
  const auto is_over = [&] { return meeting->over.load(); };
  // GPUs take longer than that.
  if (is_cpu(device)) {
    lock->unlock();
    spin_until(is_over, kAwake);
    lock->lock();
  }
  while (!meeting->over) {
    const double slice = patience.slice(kSlice).count();
    const Waited ended = wait_until(lock, &meeting->changed, slice, interruption, is_over);
    waited = patience.waited();
    if (ended == Waited::kInterrupted) since_interrupt += Seconds(slice);
    if (!may_leave()) continue;
    if (patience.is_over()) fail(message() + layer.causes(key, *meeting));
    if (waited > next_probe) {
      next_probe = std::min(2 * waited, waited + kLongestProbe);
      lock->unlock();
      observer.waits(layer.id, key.direction, meeting->id);
      lock->lock();
    }
    if (!may_leave()) continue;
    if (since_interrupt > kGraceAfterInterrupt) fail(message() + "\nInterrupted.");
    if (waited > silence && !std::exchange(meeting->has_warned, true)) {
      const std::string text = message() + "\nAfter " + seconds_text(patience.timeout()) +
                               " this is an error." + layer.causes(key, *meeting);
      lock->unlock();
      observer.warn(text);
      lock->lock();
    }
  }
}

}  // namespace gluon_syncbn
