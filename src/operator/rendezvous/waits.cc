// How a device waits for the others of its meeting: awake for a moment, then asleep. It looks up
// now and then, to warn, to ask for the calls that it waits for, and to give up.
#include "threads/waits.h"

#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <utility>

#include "rendezvous/state.h"

namespace gluon_syncbn {
namespace {

constexpr Seconds kGraceAfterInterrupt{0.5};
// The longest time between two looks at the calls that are missing.
constexpr Seconds kLongestProbe{1};
// The latest time of the warning of a wait.
constexpr Seconds kLongestSilence{5};
// Devices arrive shortly after each other, and waking a sleeping thread often takes as long as the
// work of a layer. So a call first stays awake this long, unless another thread wants the core.
constexpr Seconds kAwake{0.0003};
// So many looks, a second after each other, find a process in which nothing runs.
constexpr int kQuietLooks = 5;
constexpr Seconds kBetweenLooks{0.9};

int this_thread() { return static_cast<int>(syscall(SYS_gettid)); }

// Whether a thread of this process other than these runs, is ready to run, or waits for a disk. Yes
// if that cannot be seen.
bool another_runs(const std::multiset<int>& these) {
  std::error_code error;
  for (std::filesystem::directory_iterator task("/proc/self/task", error), end; task != end;
       task.increment(error)) {
    if (error) return true;
    if (these.count(std::atoi(task->path().filename().c_str()))) continue;
    std::ifstream file(task->path() / "stat");
    const std::string text{std::istreambuf_iterator<char>(file), {}};
    // "12 (name) S ...", and a name may have parentheses.
    const size_t name = text.rfind(") ");
    if (name != text.npos && (text[name + 2] == 'R' || text[name + 2] == 'D')) return true;
  }
  return static_cast<bool>(error);
}

}  // namespace

void State::look_around(Lock* lock) {
  const Clock::time_point now = Clock::now();
  if (now - last_look < kBetweenLooks) return;
  last_look = now;
  const std::multiset<int> these = threads;
  lock->unlock();
  const bool is_quiet = !another_runs(these) && !observer.may_run();
  lock->lock();
  calls.look();
  quiet_looks = is_quiet ? quiet_looks + 1 : 0;
}

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
  if (meeting->over) return;
  const auto thread = threads.insert(this_thread());
  struct Erase {
    std::multiset<int>* threads;
    std::multiset<int>::const_iterator thread;
    ~Erase() { threads->erase(thread); }
  } const erase{&threads, thread};
  while (!meeting->over) {
    const double slice = patience.slice(kSlice).count();
    const Waited ended = wait_until(lock, &meeting->changed, slice, interruption, is_over);
    waited = patience.waited();
    if (ended == Waited::kInterrupted) since_interrupt += Seconds(slice);
    if (!may_leave()) continue;
    if (patience.is_over()) fail(message() + layer.causes(key, *meeting, calls));
    if (quiet_looks >= kQuietLooks) {
      const std::string why = stuck();
      if (!why.empty()) fail(message() + "\n" + why);
    }
    if (since_interrupt > kGraceAfterInterrupt) fail(message() + "\nInterrupted.");
    if (waited > silence && !std::exchange(meeting->has_warned, true)) {
      const std::string text = message() + "\nAfter " + seconds_text(patience.timeout()) +
                               " this is an error." + layer.causes(key, *meeting, calls);
      lock->unlock();
      observer.warn(text);
      lock->lock();
    }
    if (waited > next_probe) {
      look_around(lock);
      next_probe = std::min(2 * waited, waited + kLongestProbe);
      for (const std::string& missing : layer.missing(*meeting)) {
        if (calls.has_open({layer.id, missing})) continue;
        lock->unlock();
        observer.waits(layer.id, missing);
        lock->lock();
      }
    }
  }
}

}  // namespace gluon_syncbn
