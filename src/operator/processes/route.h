// Routes to other processes. A route has a key. In an exchange over it, every process brings
// equally many values, and gets those of all, or their sums. A transport carries them. Python opens
// a route, once all processes know its key, and closes it if waiting is of no use.
#ifndef GLUON_SYNCBN_PROCESSES_ROUTE_H_
#define GLUON_SYNCBN_PROCESSES_ROUTE_H_

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <list>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <vector>

#include "mxnet/array_wait.h"
#include "processes/fixed_point.h"

namespace gluon_syncbn {

// The exchanges that this process has reached.
class InFlightExchanges {
 public:
  struct Entry {
    // What users see, the key, and the number of the call with this key.
    std::string title, key;
    int64_t number;
    double timeout_seconds;
    // When it began, or when it completed, on the clock of Python's time.monotonic().
    double since;
    bool open;
  };

  // Registers an exchange during this object's lifetime, and afterwards as complete if complete()
  // was called.
  class Registration {
   public:
    // Its `since` and `open` are set here.
    Registration(InFlightExchanges* registry, Entry entry);
    Registration(const Registration&) = delete;
    Registration& operator=(const Registration&) = delete;
    ~Registration();

    void complete() { complete_ = true; }

   private:
    InFlightExchanges* const registry_;
    std::list<Entry>::iterator entry_;
    bool complete_ = false;
  };

  // The exchanges in flight, then the last completed ones, each oldest first.
  std::vector<Entry> entries() const;

 private:
  mutable std::mutex mutex_;
  std::list<Entry> open_;
  std::deque<Entry> complete_;
};

// What all routes of one store share.
struct Connection {
  // Held during each call of the store's functions, which are not thread-safe.
  std::mutex calls;
  InFlightExchanges in_flight;
  // The seconds that an exchange which the store has failed waits to be closed, with a text that
  // says more.
  double explained_within = 0;
};

// The result of an exchange: the values of all processes, by rank, or their sums. kNothing:
// neither, in all processes.
enum class Answer { kValues, kSums, kNothing };

// How the values of one exchange travel.
class Transport {
 public:
  virtual ~Transport() = default;
  // Takes this process's values, which must stay valid until wait() has ended.
  virtual void pack(const double* mine) = 0;
  // Sends them. Holds `store` while a function of the store runs. Throws StoreError.
  virtual void send(std::mutex* store) = 0;
  // Waits for the values of all processes, for at most `seconds`. Throws StoreError.
  virtual Waited wait(double seconds) = 0;
  // Replaces this process's values with those of all, or their sums. Throws std::runtime_error.
  virtual Answer unpack(std::vector<double>* values) = 0;
};

// A store's message about a failed exchange.
struct StoreError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// The transport of the values of all processes and, if the store can add, that of their sums.
struct Transports {
  std::unique_ptr<Transport> values, sums;
  std::shared_ptr<FixedPoint> fixed_point;
};

class Route {
 public:
  // size: the number of values that each of `ranks` processes brings.
  Route(std::shared_ptr<Connection> connection, std::string key, int64_t size, int64_t ranks,
        Transports transports);

  int64_t ranks() const { return ranks_; }
  // The number of exchanges so far.
  int64_t calls() const;
  // Exchanges that wait, and those that begin from now on, raise this. The first text stays.
  void close(const std::string& why);

  // Replaces this process's values with those of all, by rank, or with their sums. Exchanges on
  // several threads take turns, as the store could not tell their answers apart. Throws
  // std::runtime_error, also if the route is not for so many values. The timeout is for `in_flight`
  // alone: who reads that closes the route.
  Answer exchange(const std::string& title, double timeout_seconds, std::vector<double>* values);

 private:
  // Throws if it is closed.
  void check_open(const std::string& title) const;
  Answer travel(Transport* transport, const std::string& title, std::vector<double>* values);
  void wait(Transport* transport, const std::string& title);
  void wait_for_explanation();

  const std::shared_ptr<Connection> connection_;
  const std::string key_;
  const int64_t size_, ranks_;
  const Transports transports_;
  mutable std::mutex turn_;
  int64_t calls_ = 0;
  // Not `turn_`, which an exchange holds while it waits.
  mutable std::mutex closing_;
  std::condition_variable closes_;
  std::string closed_;
};
using RoutePtr = std::shared_ptr<Route>;

}  // namespace gluon_syncbn

#endif  // GLUON_SYNCBN_PROCESSES_ROUTE_H_
