#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <future>
#include <memory>
#include <thread>
#include <vector>

#include "check.h"
#include "cpu/thread_pool.h"

namespace gluon_syncbn {
namespace {

// Neither the units nor the count are atomic: ThreadSanitizer sees a unit that is run twice at a
// time, or whose work is not finished when parallel_for returns.
void check_job(ThreadPool* pool, int64_t units) {
  std::vector<int> runs(static_cast<size_t>(units));
  pool->parallel_for(units, [&](int64_t unit) { ++runs[static_cast<size_t>(unit)]; });
  int64_t once = 0;
  for (const int count : runs) once += count == 1;
  CHECK_EQ(once, units);
}

void starts_with_as_many_threads_as_mxnet() {
  setenv("OMP_NUM_THREADS", "3", 1);
  CHECK_EQ(thread_pool().threads(), 3);
  set_num_threads(2);
  CHECK_EQ(thread_pool().threads(), 2);
  check_job(&thread_pool(), 100);
  set_num_threads(1);
  CHECK_EQ(thread_pool().threads(), 1);
  check_job(&thread_pool(), 100);
}

void runs_each_unit_once() {
  for (const int threads : {1, 2, 3, 4, 8}) {
    check::context = std::to_string(threads) + " threads";
    ThreadPool pool(threads);
    CHECK_EQ(pool.threads(), threads);
    for (const int64_t units : {0, 1, 2, 3, 7, 8, 9, 64, 5000}) check_job(&pool, units);
  }
}

void runs_many_short_jobs() {
  check::context = "short jobs";
  ThreadPool pool(4);
  for (int i = 0; i < 3000; ++i) check_job(&pool, 1 + i % 4);
}

void serves_many_callers_at_once() {
  check::context = "many callers";
  ThreadPool pool(3);
  std::vector<std::thread> callers;
  for (int i = 0; i < 8; ++i) {
    callers.emplace_back([&pool, i] {
      for (int job = 0; job < 300; ++job) check_job(&pool, (i + job) % 20);
    });
  }
  for (std::thread& caller : callers) caller.join();
}

void serves_jobs_within_jobs() {
  check::context = "jobs within jobs";
  ThreadPool pool(3);
  std::vector<std::thread> callers;
  for (int i = 0; i < 4; ++i) {
    callers.emplace_back([&pool] {
      for (int job = 0; job < 20; ++job) {
        pool.parallel_for(
            5, [&](int64_t) { pool.parallel_for(3, [&](int64_t) { check_job(&pool, 4); }); });
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
}

// Units that wait for each other end only where all threads take part.
void all_threads_take_part() {
  check::context = "all threads";
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

// A kernel must not wait for another one that holds the threads.
void caller_needs_no_free_thread() {
  check::context = "busy threads";
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

void help_ends_when_patience_does() {
  check::context = "patience";
  for (const int threads : {1, 2}) {
    ThreadPool pool(threads);
    pool.help([] { return false; }, std::chrono::milliseconds(1));
    pool.help([] { return true; }, std::chrono::hours(1));
    check_job(&pool, 10);
  }
}

// What it waits for comes while it works for others: it begins no other unit.
void who_waits_helps_until_it_need_not() {
  check::context = "help";
  ThreadPool pool(2);
  std::atomic<bool> done{false};
  std::atomic<int> units_of_helper{0};
  std::promise<std::thread::id> id;
  std::thread waiting([&] {
    id.set_value(std::this_thread::get_id());
    pool.help([&] { return done.load(); }, std::chrono::hours(1));
  });
  const std::thread::id helper = id.get_future().get();
  // Mostly the thread of the pool is asleep and the helper is first.
  while (!done) {
    pool.parallel_for(50, [&](int64_t) {
      if (std::this_thread::get_id() == helper) {
        done = true;
        ++units_of_helper;
      }
      std::this_thread::sleep_for(std::chrono::microseconds(20));
    });
  }
  waiting.join();
  CHECK_EQ(units_of_helper.load(), 1);
  check_job(&pool, 100);
}

// Several at once, who come and go while loops are begun and end.
void many_help_and_leave() {
  check::context = "many helpers";
  ThreadPool pool(3);
  std::atomic<int> callers{4};
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&pool, &callers, i] {
      for (int job = 0; job < 300; ++job) check_job(&pool, (i + job) % 20);
      --callers;
    });
  }
  for (int i = 0; i < 3; ++i) {
    threads.emplace_back([&pool, &callers] {
      while (callers > 0) pool.help([&] { return callers == 0; }, std::chrono::microseconds(30));
    });
  }
  for (std::thread& thread : threads) thread.join();
}

void ends_when_idle() {
  check::context = "destruction";
  for (int i = 0; i < 200; ++i) {
    ThreadPool pool(1 + i % 4);
    if (i % 3) check_job(&pool, i % 7);
    if (i % 50 == 0) std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
}

void first_callers_get_the_same_pool() {
  check::context = "first callers";
  for (int i = 0; i < 30; ++i) {
    ThreadPool* const before = &thread_pool();
    abandon_thread_pool();
    delete before;
    std::vector<ThreadPool*> pools(6);
    std::vector<std::thread> callers;
    for (ThreadPool*& pool : pools) callers.emplace_back([&pool] { pool = &thread_pool(); });
    for (std::thread& caller : callers) caller.join();
    for (const ThreadPool* pool : pools) CHECK(pool == &thread_pool());
  }
}

// As in a worker process of a DataLoader: the threads of the pool are the parent's.
void works_in_a_forked_child() {
  check::context = "fork";
  set_num_threads(3);
  check_job(&thread_pool(), 100);
  const pid_t child = fork();
  if (child == 0) {
    alarm(20);
    abandon_thread_pool();
#if defined(__SANITIZE_THREAD__)
    // ThreadSanitizer lets no child start threads.
    setenv("OMP_NUM_THREADS", "1", 1);
#endif
    for (int i = 0; i < 100; ++i) check_job(&thread_pool(), 50);
    _exit(check::failed ? 1 : 0);
  }
  int status = -1;
  CHECK_EQ(waitpid(child, &status, 0), child);
  CHECK_EQ(status, 0);
}

}  // namespace
}  // namespace gluon_syncbn

int main() {
  using namespace gluon_syncbn;
  // To hang is to fail.
  alarm(120);
  starts_with_as_many_threads_as_mxnet();
  runs_each_unit_once();
  runs_many_short_jobs();
  serves_many_callers_at_once();
  serves_jobs_within_jobs();
  all_threads_take_part();
  caller_needs_no_free_thread();
  help_ends_when_patience_does();
  who_waits_helps_until_it_need_not();
  many_help_and_leave();
  ends_when_idle();
  first_callers_get_the_same_pool();
  works_in_a_forked_child();
  return check::finish("thread_pool");
}
