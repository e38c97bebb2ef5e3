// A loop is a job: a counter of units, from which the caller and idle threads take one at a time.
// So the caller never waits for a thread that has not begun, only for units that others have taken.
#include "cpu/thread_pool.h"

#include <sched.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <exception>
#include <optional>
#include <stdexcept>
#include <string>

#include "threads/waits.h"

namespace gluon_syncbn {

// Belongs to the caller of parallel_for, which waits until no other thread uses it.
struct ThreadPool::Job {
  const std::function<void(int64_t)>& f;
  const int64_t units;
  std::atomic<int64_t> next{0};
  // The threads that work on it. Changed with the pool's lock.
  std::atomic<int> busy{0};
  std::condition_variable finished;
  std::mutex mutex;
  // The message of the first unit that threw.
  std::optional<std::string> error;

  Job(const std::function<void(int64_t)>& function, int64_t size) : f(function), units(size) {}

  // Runs units until none is left.
  void run() {
    for (int64_t unit; (unit = next++) < units;) {
      try {
        f(unit);
      } catch (const std::exception& thrown) {
        const std::lock_guard<std::mutex> lock(mutex);
        if (!error) error = thrown.what();
        next = units;
      }
    }
  }
};

ThreadPool::ThreadPool(int threads) : threads_(threads) {
  for (int i = 1; i < threads; ++i) {
    try {
      workers_.emplace_back([this] { serve(); });
    } catch (const std::exception&) {
      // The system refuses another thread.
      const Lock lock(mutex_);
      threads_ = i;
      break;
    }
  }
}

ThreadPool::~ThreadPool() {
  {
    const Lock lock(mutex_);
    stopping_ = true;
  }
  changed_.notify_all();
  for (std::thread& worker : workers_) worker.join();
}

void ThreadPool::serve() {
  Lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [this] { return stopping_ || (busy_ < threads_ && !jobs_.empty()); });
    if (stopping_) return;
    work(jobs_.front(), &lock);
  }
}

// Works on a job until none of its units is left, with the lock released.
void ThreadPool::work(Job* job, Lock* lock) {
  ++busy_;
  ++job->busy;
  unlock_and_wake(lock);
  job->run();
  lock->lock();
  jobs_.remove(job);
  --busy_;
  if (--job->busy == 0) job->finished.notify_one();
}

// Wakes threads if more units are left than this one takes: two at most, as each wakes others.
void ThreadPool::unlock_and_wake(Lock* lock) {
  constexpr int64_t kMost = 2;
  int64_t wanted = -1;
  for (const Job* job : jobs_) {
    wanted += std::clamp<int64_t>(job->units - job->next, 0, threads_);
  }
  wanted = std::min<int64_t>({wanted, threads_ - busy_, kMost});
  lock->unlock();
  for (; wanted > 0; --wanted) changed_.notify_one();
}

void ThreadPool::parallel_for(int64_t units, const std::function<void(int64_t)>& f) {
  if (units <= 1 || threads_ == 1) {
    for (int64_t unit = 0; unit < units; ++unit) f(unit);
    return;
  }
  Job job(f, units);
  const auto finished = [&] { return job.busy == 0; };
  Lock lock(mutex_);
  jobs_.push_back(&job);
  work(&job, &lock);
  unlock_and_wake(&lock);
  // For the last units of other threads, as waking this one often takes longer.
  spin_until(finished, std::chrono::microseconds(50));
  lock.lock();
  job.finished.wait(lock, finished);
  if (job.error) throw std::runtime_error(*job.error);
}

int default_threads() {
  if (const char* set = std::getenv("OMP_NUM_THREADS")) {
    if (const int threads = std::atoi(set); threads > 0) return threads;
  }
  cpu_set_t cores;
  if (sched_getaffinity(0, sizeof(cores), &cores) == 0) return std::max(1, CPU_COUNT(&cores));
  return static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
}

namespace {

// Not destroyed at exit: a kernel may still run when the process ends.
std::atomic<ThreadPool*> pool{nullptr};

}  // namespace

ThreadPool& thread_pool() {
  ThreadPool* current = pool.load(std::memory_order_acquire);
  if (!current) {
    auto* const mine = new ThreadPool(default_threads());
    if (pool.compare_exchange_strong(current, mine, std::memory_order_acq_rel)) return *mine;
    delete mine;
  }
  return *current;
}

void set_num_threads(int threads) { delete pool.exchange(new ThreadPool(threads)); }

void abandon_thread_pool() { pool.store(nullptr); }

}  // namespace gluon_syncbn
