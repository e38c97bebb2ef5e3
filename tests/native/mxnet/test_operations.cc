// What is pushed to MXNet's engine, and when calls report their errors to it.
#include <atomic>
#include <thread>
#include <vector>

#include "check.h"
#include "mxnet/mxnet_fixture.h"
#include "mxnet/operations.h"
#include "threads.h"

namespace gluon_syncbn {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

// What an engine does with an operation: MXNet skips one by dropping it. Where MXNet fails decides
// whether it drops one that it does not take.
struct Engine {
  bool runs, drops, takes;
};
Engine engine;
int reads, writes, told, told_before_it_is_dropped;

int push_to_engine(void (*run)(void*, void*), void* argument, void (*deleter)(void*), const void*,
                   Handle*, int num_read, Handle*, int num_written, const void*, int, const char*) {
  reads = num_read;
  writes = num_written;
  if (engine.runs) run(nullptr, argument);
  told_before_it_is_dropped = told;
  if (engine.drops) deleter(argument);
  return engine.takes ? 0 : -1;
}

// 0: not told; 1: told that it has passed; 100: that it was skipped.
int told_by(const Engine& by, bool writes_array) {
  engine = by;
  told = 0;
  FakeArray array;
  const auto push = std::exchange(mxnet.engine_push_sync, push_to_engine);
  when_passed(&array, writes_array, "look", [](bool skipped) { told += skipped ? 100 : 1; });
  mxnet.engine_push_sync = push;
  CHECK_EQ(reads, writes_array ? 0 : 1);
  CHECK_EQ(writes, writes_array ? 1 : 0);
  return told;
}

// MXNet starts what writes an array next once the operation has run, and drops it later.
TEST(whoever_looks_at_an_array_is_told_once_and_before_it_is_written_again) {
  for (const bool writes_array : {false, true}) {
    CHECK_EQ(told_by({true, true, true}, writes_array), 1);
    CHECK_EQ(told_before_it_is_dropped, 1);
    CHECK_EQ(told_by({false, true, true}, writes_array), 100);
    CHECK_EQ(told_by({false, true, false}, writes_array), 1);
    CHECK_EQ(told_by({false, false, false}, writes_array), 1);
  }
}

// The second begins when it may.
class Second {
 public:
  explicit Second(Reports* reports)
      : thread_([this, reports] {
          reports->begin();
          has_begun_ = true;
        }) {}
  bool has_begun_after(double seconds) const {
    sleep(seconds);
    return has_begun_;
  }
  ~Second() { thread_.join(); }

 private:
  std::atomic<bool> has_begun_{false};
  std::thread thread_;
};

TEST(a_report_waits_until_mxnet_has_recorded_the_one_before) {
  Reports reports;
  FakeArray first, second;
  first.start();
  second.start();
  reports.begin();
  reports.expect(&first);
  {
    const Second other(&reports);
    CHECK(!other.has_begun_after(0.1));
    first.write();
  }
  reports.expect(&second);
  const Second third(&reports);
  CHECK(!third.has_begun_after(0.1));
  second.write();
}

TEST(a_report_that_was_skipped_or_late_ends) {
  Reports reports;
  for (int i = 0; i < 3; ++i) {
    reports.begin();
    reports.soon();
  }
  FakeArray array;
  array.start();
  reports.begin();
  reports.expect(&array);
  reports.soon();
  reports.begin();
  // The end of the one before does not end this one.
  const Second other(&reports);
  array.write();
  CHECK(!other.has_begun_after(0.1));
  const Clock::time_point start = Clock::now();
  reports.soon();
  while (!other.has_begun_after(0.001)) {
  }
  CHECK(seconds_since(start) < 2);
}

}  // namespace
}  // namespace gluon_syncbn

int main() {
  gluon_syncbn::use_fake_mxnet();
  return check::run_all("operations", 60);
}
