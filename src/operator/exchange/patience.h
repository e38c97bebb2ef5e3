// How long a wait may take, and when to check on it.
#ifndef GLUON_SYNCBN_EXCHANGE_PATIENCE_H_
#define GLUON_SYNCBN_EXCHANGE_PATIENCE_H_

#include <algorithm>
#include <chrono>

namespace gluon_syncbn {

class Patience {
 public:
  using Clock = std::chrono::steady_clock;
  using Seconds = std::chrono::duration<double>;

  explicit Patience(double timeout_seconds) : timeout_(timeout_seconds) {}

  Seconds timeout() const { return timeout_; }
  Seconds waited() const { return Clock::now() - start_; }
  // A tenth of the timeout. Longer waits are reported.
  Seconds first() const { return timeout_ * 0.1; }
  bool is_long() const { return waited() > first(); }
  bool is_over() const { return waited() > timeout_; }
  // The time until the next check: at first(), then every `every`, and at the timeout.
  Seconds slice(Seconds every) const {
    const Seconds so_far = waited();
    const Seconds next =
        so_far < first() ? first() - so_far : std::min({every, first(), timeout_ - so_far});
    return std::max(next, kLeast);
  }

 private:
  static constexpr Seconds kLeast{0.001};

  Seconds timeout_;
  Clock::time_point start_ = Clock::now();
};

// How often a waiting call wakes up to check for Ctrl-C.
constexpr Patience::Seconds kSlice{0.1};

}  // namespace gluon_syncbn

#endif  // GLUON_SYNCBN_EXCHANGE_PATIENCE_H_
