// What AllReduce keeps of its layers and meetings. Only all_reduce*.cc and meetings.cc know it.
#ifndef GLUON_SYNCBN_RENDEZVOUS_STATE_H_
#define GLUON_SYNCBN_RENDEZVOUS_STATE_H_

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "rendezvous/all_reduce.h"
#include "rendezvous/reorder_buffer.h"

namespace gluon_syncbn {

using Clock = std::chrono::steady_clock;
using Seconds = std::chrono::duration<double>;

// How often a waiting call looks up from its sleep for Ctrl-C.
constexpr Seconds kSlice{0.1};
// The share of the timeout after which a warning is given.
constexpr double kWarnAfter = 0.1;

// "cpu(0), cpu(1)", or "none".
std::string join(const std::vector<std::string>& names);
// "0.301".
std::string number(double value);
bool contains(const std::vector<std::string>& names, const std::string& name);

struct AllReduce::Meeting {
  struct Arrival {
    std::string device;
    Part* part;
  };

  std::vector<Arrival> arrivals;
  Present present;
  bool warned = false;
  // All have come, and what they came for is being done: nobody leaves.
  bool joining = false;
  std::string error;
  // A device that cannot come.
  std::string lost;
  // To look at without the lock.
  std::atomic<bool> over{false};
  std::condition_variable changed;

  bool has(const std::string& device) const;
  void end(const std::string& why = "");
  // What everyone brought, in rank order whoever came last.
  std::vector<Part*> parts(const std::vector<std::string>& ranks);
};

struct AllReduce::Layer {
  // Direction, place, number, group.
  using Key = std::tuple<Direction, int64_t, int64_t, size_t>;

  int64_t number = 0;
  LayerConfig config;
  int64_t generation = 0;
  // Why the last generation ended, and the devices that have not left it yet.
  std::string failure;
  std::set<std::string> unsettled;
  // By device, then by place: the number of the next call.
  std::map<std::string, std::map<int64_t, int64_t>> forward_calls;
  // By place: the number of the first call of a device that has made none yet.
  std::map<int64_t, int64_t> first_calls;
  std::map<Key, std::shared_ptr<Meeting>> meetings;
  // By place: the devices whose next forward call belongs to a failed step, as they had not made it
  // when it failed. Void once another device goes on at that place.
  std::map<int64_t, std::set<std::string>> owed;
  // By place: what came of backward calls that this process has not come to, or not all others.
  std::map<int64_t, Mailbox> mail;
  std::condition_variable mail_came;

  std::string title(const Key& key) const;
  // Every device goes on from the same number, also one that took no part for a while.
  void line_up();
  // Null where all take part, or none.
  Present present_of(const Present& present) const;
  // The devices of one that may come to a meeting, itself included, in rank order.
  std::vector<std::string> group_of(const std::string& device, const Present& present) const;
  // How many come to a meeting.
  size_t expected(const Meeting& meeting) const;
  // "Came: cpu(0). Missing: cpu(1)."
  std::string attendance(const Meeting& meeting) const;
  std::string causes(Direction direction) const;
  // Ends all meetings and starts a new generation.
  void start_anew(const std::string& why);
  // The same, after an error; in a forward call of one device, where there is a ticket.
  void fail(const std::string& why, const std::string& device = "",
            const Ticket* forward = nullptr);
  Error failed_before() const;
};

struct AllReduce::State {
  using Lock = std::unique_lock<std::mutex>;

  mutable std::mutex mutex;
  std::map<int64_t, LayerPtr> registered;
  std::map<int64_t, std::weak_ptr<Layer>> layers;
  std::string closed;
  std::string untold;
  // Why nobody is waited for at this moment.
  std::string given_up;
  bool absent = false;
  // When somebody last came to a meeting.
  Clock::time_point last_arrival{};
  Present present;
  Observer observer;

  LayerPtr find(int64_t number) const;
  void check_open(const LayerPtr& layer) const;
  // Ends the step for everyone at this layer, and tells the observer, with the lock open.
  void end_step(Lock* lock, Layer* layer, const std::string& text, const std::string& device = "",
                const Ticket* forward = nullptr);
  [[noreturn]] void fail(Lock* lock, Layer* layer, const std::string& text,
                         const std::string& device = "", const Ticket* forward = nullptr);
  // Sleeps until the meeting is over. Throws Error when it cannot be waited for any longer.
  void wait(Lock* lock, Layer* layer, const Layer::Key& key, Meeting* meeting,
            const std::string& device, const Ticket& ticket);
};

}  // namespace gluon_syncbn

#endif  // GLUON_SYNCBN_RENDEZVOUS_STATE_H_
