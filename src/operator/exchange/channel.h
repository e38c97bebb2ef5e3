// Exchanges values with other processes in every pass of a layer, once all processes know its key.
// Python is called only if an exchange takes long or fails.
#ifndef GLUON_SYNCBN_EXCHANGE_CHANNEL_H_
#define GLUON_SYNCBN_EXCHANGE_CHANNEL_H_

#include <cstdint>
#include <deque>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "exchange/fixed_point.h"
#include "mxnet/watch.h"

namespace gluon_syncbn {

// The exchanges that this process has reached, for other processes that probe it.
class InFlightExchanges {
 public:
  struct Entry {
    std::string exchange;
    // When it began, or when it completed, on the clock of Python's time.monotonic().
    double since;
    bool open;
  };

  // Registers an exchange during this object's lifetime, and afterwards as complete if complete()
  // was called.
  class Registration {
   public:
    Registration(InFlightExchanges* registry, std::string exchange);
    Registration(const Registration&) = delete;
    Registration& operator=(const Registration&) = delete;
    ~Registration();

    void complete() { complete_ = true; }
    const std::string& exchange() const { return entry_->exchange; }

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

// A wait that takes long, or cannot succeed. Valid during the probe.
struct Delay {
  // kTimeIsUp: the wait has gone on until this probe. kWritten: the store has failed, with `error`.
  Waited waited;
  // The number of earlier probes of this wait.
  int probes;
  // error: MXNet's message, or "".
  const char *title, *exchange, *error;
  double seconds, timeout;
};

// What all channels of one store share.
struct Connection {
  // Held during each call of the store's functions, which are not thread-safe.
  std::mutex calls;
  InFlightExchanges in_flight;
  // Returns the reason to give up, or an empty string.
  std::function<std::string(const Delay&)> probe;
};

// The result of an exchange: the values of all processes, by rank, or their sums. kNothing:
// neither, in all processes.
enum class Answer { kValues, kSums, kNothing };

// How the values of one exchange travel.
class Transport {
 public:
  virtual ~Transport() = default;
  // Takes this process's values, which must stay valid until unpack().
  virtual void pack(const double* mine) = 0;
  // Sends them. Holds `store` while a function of the store runs. Throws StoreError.
  virtual void send(std::mutex* store) = 0;
  // Waits for the values of all processes, for at most `seconds`. Throws StoreError.
  virtual Waited wait(double seconds) = 0;
  // Writes them, or their sums. Throws std::runtime_error.
  virtual Answer unpack(double* values) = 0;
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

// A key under which all processes exchange the same number of values, again and again.
class Channel {
 public:
  Channel(std::shared_ptr<Connection> connection, std::string key, int64_t size, int64_t ranks,
          Transports transports);

  // Whether exchange() takes messages of `size` values and writes at most `all_size` values.
  bool fits(int64_t size, int64_t all_size) const {
    return size == size_ && all_size == ranks_ * size_;
  }
  // The number of exchanges so far.
  int64_t calls() const;
  // The next exchange is one of values, as the first was. All processes must call this before the
  // same exchange.
  void restart();

  // Writes the values of all processes or their sums. Exchanges on several threads take turns, as
  // the store could not tell their answers apart. Throws std::runtime_error.
  Answer exchange(const std::string& title, double timeout_seconds, const double* mine,
                  double* everyone);

 private:
  // An exchange in progress.
  struct Wait {
    const std::string &exchange, &title;
    const double timeout_seconds;
  };
  Answer travel(Transport* transport, const Wait& wait, const double* mine, double* values);
  void wait(Transport* transport, const Wait& wait);

  const std::shared_ptr<Connection> connection_;
  const std::string key_;
  const int64_t size_, ranks_;
  const Transports transports_;
  mutable std::mutex turn_;
  int64_t calls_ = 0;
};
using ChannelPtr = std::shared_ptr<Channel>;

// The channels of the layers' messages. A message without one goes through Python.
class Channels {
 public:
  void set(int64_t layer, const std::string& key, ChannelPtr channel);
  // Null if there is none.
  ChannelPtr find(int64_t layer, const std::string& key) const;
  // Removes the channels of one layer, or of all.
  void forget(int64_t layer);
  void clear();

 private:
  mutable std::mutex mutex_;
  std::map<std::pair<int64_t, std::string>, ChannelPtr> channels_;
};

// The channels of this process.
Channels& channels();

}  // namespace gluon_syncbn

#endif  // GLUON_SYNCBN_EXCHANGE_CHANNEL_H_
