// How a device waits for the others of its meeting: awake for a moment, then asleep. It looks up
// now and then, to warn, to ask for the calls that it waits for, and to give up.
#include "threads/waits.h"

#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <set>
#include <string>
#include <utility>

#include "processes/text.h"
#include "rendezvous/rendezvous.h"

namespace gluon_syncbn {
namespace {

using Seconds = Patience::Seconds;

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

// The thread that waits, in the list of these, while it does.
class Listed {
 public:
  explicit Listed(std::multiset<int>* threads)
      : threads_(threads), self_(threads->insert(static_cast<int>(syscall(SYS_gettid)))) {}
  Listed(const Listed&) = delete;
  Listed& operator=(const Listed&) = delete;
  ~Listed() { threads_->erase(self_); }

 private:
  std::multiset<int>* const threads_;
  const std::multiset<int>::const_iterator self_;
};

}  // namespace

// The lock is held, except while an observer is called.
void Rendezvous::wait(Lock* lock, const Layer& layer, const Layer::Key& key, Meeting* meeting,
                      const std::string& device) {
  Patience patience(layer.config.timeout_seconds);
  const Interruption interruption;
  const auto is_over = [&] { return meeting->over.load(); };
  // GPUs take longer than that.
  if (is_cpu(device)) {
    lock->unlock();
    spin_until(is_over, kAwake);
    lock->lock();
  }
  if (meeting->over) return;
  const Listed listed(&threads_);
  const Seconds silence = std::min(patience.first(), kLongestSilence);
  Seconds waited{0}, since_interrupt{0}, next_probe{0};
  const auto message = [&] {
    return layer.title(key) + ": " + device + " has waited " + seconds_text(waited) +
           " for the other devices.\n" + layer.arrivals_text(*meeting) +
           where_missing_wait(layer, *meeting);
  };
  while (!meeting->over) {
    const Seconds slice = patience.slice(kSlice);
    meeting->changed.wait_for(*lock, slice, is_over);
    waited = patience.waited();
    if (interruption.what() == Waited::kInterrupted) since_interrupt += slice;
    if (meeting->over || meeting->is_combining) continue;
    if (patience.is_over()) stop_and_throw(message() + layer.causes(key, *meeting, calls_));
    if (quiet_looks_ >= kQuietLooks) {
      const std::string why = stuck();
      if (!why.empty()) stop_and_throw(message() + "\n" + why);
    }
    if (since_interrupt > kGraceAfterInterrupt) stop_and_throw(message() + "\nInterrupted.");
    if (waited > silence && !std::exchange(meeting->has_warned, true)) {
      const std::string text = message() + "\nAfter " + seconds_text(patience.timeout()) +
                               " this is an error." + layer.causes(key, *meeting, calls_);
      lock->unlock();
      warn(text);
      lock->lock();
    }
    if (waited > next_probe) {
      look_around(lock);
      next_probe = std::min(2 * waited, waited + kLongestProbe);
      for (const std::string& missing : layer.missing(*meeting)) {
        if (calls_.has_open({layer.id, missing})) continue;
        lock->unlock();
        observer_.waits(layer.id, missing);
        lock->lock();
      }
    }
  }
}

void Rendezvous::look_around(Lock* lock) {
  const Clock::time_point now = Clock::now();
  if (now - last_look_ < kBetweenLooks) return;
  last_look_ = now;
  const std::multiset<int> these = threads_;
  lock->unlock();
  const bool is_quiet = !another_runs(these) && !observer_.may_run();
  lock->lock();
  calls_.look();
  quiet_looks_ = is_quiet ? quiet_looks_ + 1 : 0;
}

std::string Rendezvous::stuck() const {
  std::set<std::string> waiting;
  for (const LayerPtr& layer : all()) {
    for (const auto& entry : layer->meetings) {
      for (const Meeting::Arrival& arrival : entry.second->arrivals) waiting.insert(arrival.device);
    }
  }
  std::string queued;
  for (const LayerPtr& layer : all()) {
    for (const auto& entry : layer->meetings) {
      const std::vector<std::string> missing = layer->missing(*entry.second);
      if (missing.empty()) return "";
      for (const std::string& device : missing) {
        const Calls::Standing is = calls_.standing({layer->id, device}, entry.second->opened);
        if (is != Calls::Standing::kQueued) return "";
        if (waiting.count(device)) continue;
        if (!is_cpu(device)) return "";
        queued = device;
      }
    }
  }
  if (queued.empty()) {
    return "All devices wait for each other, in different calls: they call layers in different "
           "orders; or the losses of several devices were added up on one of them, and MXNet fuses "
           "what waits for one device with what another needs: give autograd.backward the list of "
           "the losses; or " +
           workspaces_text();
  }
  return queued + " has been called, and MXNet cannot run the call, as " + workspaces_text();
}

}  // namespace gluon_syncbn
