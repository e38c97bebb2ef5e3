// Streams of all devices, and the order in which their work is done.
#ifndef GLUON_SYNCBN_TESTS_PTXSIM_STREAMS_H_
#define GLUON_SYNCBN_TESTS_PTXSIM_STREAMS_H_

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <random>

#include "races.h"

namespace ptxsim {

// What an event records: a point in the work of a stream, and whether the stream has passed it.
struct Mark {
  void* stream = nullptr;
  std::shared_ptr<bool> passed;
  // Of the stream.
  Clock clock{};
};

// Work is done when it is queued; in the order "late" when somebody waits for it; and in the order
// "7", or another seed, streams go on at random whenever work is queued. So it shows if nobody
// waits. A null stream is the one of a device that waits for its others.
class Streams {
 public:
  // The order is null, or a text. All operations are added to the races.
  Streams(const char* order, Races* races);
  // Does all work before.
  void set_order(const char* order);

  // `blocking`: the device's null stream waits for it.
  void* create(int device, bool blocking);
  // Whether there was such a stream. Its work is done before.
  bool destroy(void* stream);
  // The device of a stream that is not null.
  std::optional<int> device_of(void* stream) const;

  // `device` is that of the stream.
  void queue(void* stream, int device, const char* name, std::function<void()> work);
  Mark record(void* stream, int device);
  void wait(void* stream, int device, const Mark& mark);

  // Does what is queued.
  void catch_up(void* stream, int device);
  // The same, and the host waits for it.
  void finish(void* stream, int device);
  void finish_device(int device);
  // Whether work that was queued may not have been done.
  bool defers() const { return defers_; }
  // The host does something, which is ordered with what it has waited for.
  void act(const char* name);

 private:
  struct Item {
    std::function<void()> work;
    // What a wait is for.
    std::shared_ptr<bool> needs{};
    Operation operation{};
  };
  struct Timeline {
    uint32_t number = 0;
    Clock clock{};
  };
  struct Stream {
    int device;
    bool blocking;
    std::deque<Item> items;
    Timeline timeline;
  };

  Timeline& null_of(int device);
  // Of the stream, after all that comes before what is queued now.
  Timeline& order(void* stream, int device);
  void run(const Item& item);
  void push(void* stream, int device, Item item);
  void reach(const Mark& mark);
  void do_next(Stream* stream);
  void do_all(Stream* stream);
  void do_some();
  int draw(int count);
  Stream* draw_busy();

  Races* const races_;
  Timeline host_;
  std::map<void*, Stream> streams_;
  // By device: null streams, and what streams had done that are gone.
  std::map<int, Timeline> nulls_;
  std::map<int, Clock> gone_;
  // Unlike an address, the handle of a stream that is gone is never that of a new one.
  uintptr_t last_handle_ = 0x1000;
  bool defers_ = false;
  std::optional<std::mt19937> random_;
  // See do_some.
  int calls_left_ = 0, percent_ = 0, idle_device_ = -1;
};

}  // namespace ptxsim

#endif  // GLUON_SYNCBN_TESTS_PTXSIM_STREAMS_H_
