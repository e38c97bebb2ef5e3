// How long a wait may take, and when to check on it.
#ifndef GLUON_SYNCBN_THREADS_PATIENCE_H_
#define GLUON_SYNCBN_THREADS_PATIENCE_H_

#include <algorithm>
#include <chrono>

namespace gluon_syncbn {

class Patience {
 public:
  using Clock = std::chrono::steady_clock;
  using Seconds = std::chrono::duration<double>;

  explicit Patience(double timeout_seconds) : timeout_(timeout_seconds) {}

  Seconds timeout() const { return timeout_; }
  // A process that is stopped does not wait: of the time between two calls only so much counts.
  Seconds waited() {
    const Clock::time_point now = Clock::now();
    waited_ += std::min<Seconds>({now - looked_, kMost, timeout_ / 2});
    looked_ = now;
    return waited_;
  }
  // A tenth of the timeout. Longer waits are reported.
  Seconds first() const { return timeout_ * 0.1; }
  bool is_long() { return waited() > first(); }
  bool is_over() { return waited() > timeout_; }
  // The time until the next check: at most `every`, and at first() and the timeout.
  Seconds slice(Seconds every) {
    const Seconds so_far = waited();
    Seconds next = so_far < first() ? first() - so_far : first();
    if (so_far < timeout_) next = std::min(next, timeout_ - so_far);
    return std::max(std::min(every, next), kLeast);
  }

 private:
  static constexpr Seconds kLeast{0.001}, kMost{3};

  Seconds timeout_, waited_{0};
  Clock::time_point looked_ = Clock::now();
};

}  // namespace gluon_syncbn

#endif  // GLUON_SYNCBN_THREADS_PATIENCE_H_
