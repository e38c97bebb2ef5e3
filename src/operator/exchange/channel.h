// The exchange of numbers with other processes, where all of them know how: what a layer does in
// every pass, without Python, which is asked only when something takes long or goes wrong.
#ifndef GLUON_SYNCBN_EXCHANGE_CHANNEL_H_
#define GLUON_SYNCBN_EXCHANGE_CHANNEL_H_

#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "mxnet/api.h"
#include "mxnet/watch.h"

namespace gluon_syncbn {

// The meetings to which this process has come, for other processes that ask.
class Attendance {
 public:
  struct Entry {
    std::string meeting;
    // When it came, or when it left; as Python's time.monotonic().
    double since;
    bool open;
  };

  // Present from its making to its end, of which success() says that it was a good one.
  class Stay {
   public:
    Stay(Attendance* attendance, std::string meeting);
    Stay(const Stay&) = delete;
    Stay& operator=(const Stay&) = delete;
    ~Stay();

    void success() { success_ = true; }
    const std::string& meeting() const { return entry_->meeting; }

   private:
    Attendance* const attendance_;
    std::list<Entry>::iterator entry_;
    bool success_ = false;
  };

  // Those under way and then the last that ended well, each with the oldest first.
  std::vector<Entry> entries() const;

 private:
  mutable std::mutex mutex_;
  std::list<Entry> open_;
  std::deque<Entry> ended_;
};

// A wait that is not over, or that is of no use any more.
struct Delay {
  // kTimeIsUp: of the slice after which somebody looks. kWritten: with an error.
  Waited waited;
  std::string title, meeting, error;
  double seconds, timeout;
  // How often somebody has looked at it before.
  int looks;
};

// What connects this process with others.
struct Connection {
  // Held during each call of the store's functions, which are not made for several threads.
  std::mutex calls;
  Attendance attendance;
  // Says why to give up, or nothing.
  std::function<std::string(const Delay&)> look;
};

// How one sum travels.
class Carrier {
 public:
  virtual ~Carrier() = default;
  // Takes this process's numbers.
  virtual void pack(const double* mine) = 0;
  // Sends them. Nobody else calls the store meanwhile. Returns 0, or -1 with an error of MXNet's.
  virtual int send() = 0;
  // What MXNet writes when those of all have come.
  virtual Handle answer() const = 0;
  // The numbers of all, by rank. Throws std::runtime_error.
  virtual void unpack(double* everyone) = 0;
};

// One key, by which all processes exchange equally many numbers, again and again.
class Line {
 public:
  Line(std::shared_ptr<Connection> connection, std::string key, int64_t size,
       std::unique_ptr<Carrier> carrier);

  int64_t size() const { return size_; }
  // How many exchanges there were.
  int64_t calls() const;

  // Writes the numbers of all processes, by rank. Waits for an earlier exchange on another thread:
  // the store could not tell which answer is whose. Throws std::runtime_error.
  void exchange(const std::string& title, double timeout_seconds, const double* mine,
                double* everyone);

 private:
  void wait(const Attendance::Stay& stay, const std::string& title, double timeout_seconds);

  const std::shared_ptr<Connection> connection_;
  const std::string key_;
  const int64_t size_;
  const std::unique_ptr<Carrier> carrier_;
  mutable std::mutex turn_;
  int64_t calls_ = 0;
};
using LinePtr = std::shared_ptr<Line>;

// The lines of the layers' messages. A message that has none takes the way through Python, which
// finds out why.
class Lines {
 public:
  void set(int64_t layer, const std::string& key, LinePtr line);
  // Null where there is none.
  LinePtr find(int64_t layer, const std::string& key) const;
  // Of one layer, and of all.
  void forget(int64_t layer);
  void clear();

 private:
  mutable std::mutex mutex_;
  std::map<std::pair<int64_t, std::string>, LinePtr> lines_;
};

}  // namespace gluon_syncbn

#endif  // GLUON_SYNCBN_EXCHANGE_CHANNEL_H_
