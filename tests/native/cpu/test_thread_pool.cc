#include <sched.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <future>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "cpu/thread_pool.h"
#include "threads.h"

namespace gluon_syncbn {
namespace {

// The counts are not atomic, so that ThreadSanitizer detects a unit that runs twice at a time, or
// that has not finished when parallel_for returns.
void check_job(ThreadPool* pool, int64_t units) {
  std::vector<int> runs(static_cast<size_t>(units));
  pool->parallel_for(units, [&](int64_t unit) { ++runs[static_cast<size_t>(unit)]; });
  int64_t once = 0;
  for (const int count : runs) once += count == 1;
  CHECK_EQ(once, units);
}

// What f checks in a child process, within 20 seconds.
template <typename F>
void check_in_child(const F& f) {
  const pid_t child = fork();
  if (child == 0) {
    alarm(20);
    f();
    _exit(check::failed ? 1 : 0);
  }
  int status = -1;
  CHECK_EQ(waitpid(child, &status, 0), child);
  CHECK_EQ(status, 0);
}

TEST(the_size_may_be_set) {
  setenv("OMP_NUM_THREADS", "3", 1);
  CHECK_EQ(thread_pool().threads(), 3);
  for (const int threads : {2, 1}) {
    set_num_threads(threads);
    CHECK_EQ(thread_pool().threads(), threads);
    check_job(&thread_pool(), 100);
  }
}

TEST(runs_each_unit_once) {
  for (const int threads : {1, 2, 3, 4, 8}) {
    check::context = std::to_string(threads) + " threads";
    ThreadPool pool(threads);
    CHECK_EQ(pool.threads(), threads);
    for (const int64_t units : {0, 1, 2, 3, 7, 8, 9, 64, 5000}) check_job(&pool, units);
    for (int i = 0; i < 1000; ++i) check_job(&pool, 1 + i % 4);
  }
}

TEST(serves_jobs_within_jobs) {
  ThreadPool pool(3);
  in_threads(4, [&](int) {
    for (int job = 0; job < 20; ++job) {
      pool.parallel_for(
          5, [&](int64_t) { pool.parallel_for(3, [&](int64_t) { check_job(&pool, 4); }); });
    }
  });
}

// These units wait for each other, so they end only if all threads take part.
TEST(all_threads_take_part) {
  constexpr int kThreads = 3;
  ThreadPool pool(kThreads);
  for (int i = 0; i < 30; ++i) {
    std::atomic<int> begun{0};
    pool.parallel_for(kThreads, [&](int64_t) {
      ++begun;
      while (begun < kThreads) std::this_thread::yield();
    });
    CHECK_EQ(begun.load(), kThreads);
  }
}

// A kernel must not wait for another kernel that uses the threads.
TEST(caller_needs_no_free_thread) {
  ThreadPool pool(2);
  std::promise<void> release;
  const std::shared_future<void> released = release.get_future().share();
  std::atomic<int> held{0};
  std::thread holder([&] {
    pool.parallel_for(2, [&](int64_t) {
      ++held;
      released.wait();
    });
  });
  while (held < 2) std::this_thread::yield();
  check_job(&pool, 100);
  CHECK_EQ(held.load(), 2);
  release.set_value();
  holder.join();
  check_job(&pool, 100);
}

// There are too many units to run. One of them fails, on this thread or on another.
TEST(exceptions_of_units_reach_the_caller) {
  for (const int threads : {1, 2, 4}) {
    for (const bool on_caller : {true, false}) {
      if (threads == 1 && !on_caller) continue;
      check::context = std::to_string(threads) + " threads, fails on " +
                       (on_caller ? "the caller's" : "another one");
      ThreadPool pool(threads);
      const std::thread::id caller = std::this_thread::get_id();
      std::atomic<int> inside{0};
      std::atomic<bool> failed{false};
      const auto unit = [&](int64_t) {
        ++inside;
        const bool fails = (std::this_thread::get_id() == caller) == on_caller;
        if (fails) failed = true;
        while (!failed) std::this_thread::yield();
        --inside;
        if (fails) throw std::runtime_error("a unit failed");
      };
      CHECK_THROWS(std::runtime_error, pool.parallel_for(int64_t{1} << 60, unit), "a unit failed");
      CHECK_EQ(inside.load(), 0);
      check_job(&pool, 100);
    }
  }
}

TEST(units_may_all_throw) {
  ThreadPool pool(3);
  in_threads(4, [&](int) {
    const auto fails = [](int64_t unit) { throw std::runtime_error(std::to_string(unit)); };
    for (int64_t job = 0; job < 100; ++job) {
      CHECK_THROWS(std::runtime_error, pool.parallel_for(1 + job % 20, fails));
      // Also from a nested loop.
      CHECK_THROWS(std::runtime_error,
                   pool.parallel_for(3, [&](int64_t) { pool.parallel_for(4, fails); }));
      check_job(&pool, job % 20);
    }
  });
}

TEST(as_many_threads_as_the_user_or_the_affinity_says) {
  setenv("OMP_NUM_THREADS", "8", 1);
  CHECK_EQ(default_threads(), 8);
  unsetenv("OMP_NUM_THREADS");
  cpu_set_t before, one;
  CHECK_EQ(sched_getaffinity(0, sizeof(before), &before), 0);
  CHECK_EQ(default_threads(), CPU_COUNT(&before));
  CPU_ZERO(&one);
  CPU_SET(sched_getcpu(), &one);
  CHECK_EQ(sched_setaffinity(0, sizeof(one), &one), 0);
  CHECK_EQ(default_threads(), 1);
  CHECK_EQ(sched_setaffinity(0, sizeof(before), &before), 0);
}

TEST(ends_when_idle) {
  for (int i = 0; i < 200; ++i) {
    ThreadPool pool(1 + i % 4);
    if (i % 3) check_job(&pool, i % 7);
    if (i % 50 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
}

TEST(first_callers_get_the_same_pool) {
  for (int i = 0; i < 30; ++i) {
    ThreadPool* const before = &thread_pool();
    abandon_thread_pool();
    delete before;
    std::vector<ThreadPool*> pools(6);
    in_threads(6, [&](int caller) { pools[caller] = &thread_pool(); });
    for (const ThreadPool* pool : pools) CHECK(pool == &thread_pool());
  }
}

// As in a worker process of a DataLoader, which does not have the threads of the pool.
TEST(works_in_a_forked_child) {
  set_num_threads(3);
  check_job(&thread_pool(), 100);
  check_in_child([] {
    abandon_thread_pool();
#if defined(__SANITIZE_THREAD__)
    // Under ThreadSanitizer, a child cannot start threads.
    setenv("OMP_NUM_THREADS", "1", 1);
#endif
    for (int i = 0; i < 100; ++i) check_job(&thread_pool(), 50);
  });
}

}  // namespace
}  // namespace gluon_syncbn

int main() { return check::run_all("thread_pool", 120); }
