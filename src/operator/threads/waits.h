// How threads wait: with a limit, and until Ctrl-C or the end of the process.
#ifndef GLUON_SYNCBN_THREADS_WAITS_H_
#define GLUON_SYNCBN_THREADS_WAITS_H_

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>

namespace gluon_syncbn {

// Counts Ctrl-C, in the signal handler. A wait during which it changes ends.
inline std::atomic<unsigned> interrupts{0};
// Whether the process ends, and with it all waits, including later ones.
inline std::atomic<bool> process_ends{false};
// Whether something in MXNet waits in vain, so that what is queued behind it never ends.
inline std::atomic<bool> abandoned{false};

// How often a waiting thread looks at these.
constexpr std::chrono::duration<double> kSlice{0.1};

enum class Waited { kDone = 0, kTimeIsUp, kInterrupted, kClosed };

// What ends waits early: Ctrl-C after construction, or the end of the process.
class Interruption {
 public:
  // Returns kTimeIsUp if nothing has.
  Waited what() const {
    if (interrupts != before_) return Waited::kInterrupted;
    return process_ends ? Waited::kClosed : Waited::kTimeIsUp;
  }

 private:
  unsigned before_ = interrupts;
};

// Stays awake, yielding the core, until done() or the time is up. Returns done(). Waking a thread
// often takes longer.
template <typename Done>
bool spin_until(const Done& done, std::chrono::duration<double> time) {
  using Clock = std::chrono::steady_clock;
  for (const Clock::time_point start = Clock::now(); Clock::now() - start < time;) {
    if (done()) return true;
    std::this_thread::yield();
  }
  return done();
}

// Calls sleep(seconds) until it returns true, meaning that the wait has succeeded, or until the
// time is up or the wait is interrupted.
template <typename Sleep>
Waited wait_in_slices(double seconds, const Interruption& interruption, const Sleep& sleep) {
  using Clock = std::chrono::steady_clock;
  const auto end = Clock::now() + std::chrono::duration<double>(seconds);
  for (;;) {
    const double left = std::chrono::duration<double>(end - Clock::now()).count();
    if (sleep(std::clamp(left, 0.0, kSlice.count()))) return Waited::kDone;
    const Waited ended = interruption.what();
    if (ended != Waited::kTimeIsUp || left <= 0) return ended;
  }
}

// The same, until done() returns true. It is called with the lock, whenever `changed` is notified.
template <typename Done>
Waited wait_until(std::unique_lock<std::mutex>* lock, std::condition_variable* changed,
                  double seconds, const Interruption& interruption, const Done& done) {
  return wait_in_slices(seconds, interruption, [&](double slice) {
    return changed->wait_for(*lock, std::chrono::duration<double>(slice), done);
  });
}

}  // namespace gluon_syncbn

#endif  // GLUON_SYNCBN_THREADS_WAITS_H_
