// A loop is a job: a counter of units, from which the caller and idle threads take one at a time.
// So the caller never waits for a thread that has not begun, only for units that others have taken.
#include "cpu/thread_pool.h"

#include <sched.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <deque>
#include <exception>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "threads/waits.h"

namespace gluon_syncbn {

namespace {

// How long a caller spins for the last units of other threads.
constexpr std::chrono::microseconds kSpin{50};

}  // namespace

struct ThreadPool::Job {
  const std::function<void(int64_t)>* f;
  int64_t units;
  std::atomic<int64_t> next{0};
  std::atomic<int64_t> done{0};
  std::mutex mutex;
  std::condition_variable finished;
  // The message of the first unit that threw.
  std::optional<std::string> error;

  // Returns how many units this finishes: one, or if it throws, also all that have not begun.
  int64_t run(int64_t unit) {
    try {
      (*f)(unit);
      return 1;
    } catch (const std::exception& thrown) {
      const std::lock_guard<std::mutex> lock(mutex);
      if (!error) error = thrown.what();
      return 1 + std::max<int64_t>(0, units - next.exchange(units));
    }
  }

  // Runs units until none is left.
  void work() {
    for (int64_t unit; (unit = next++) < units;) {
      const int64_t finished_units = run(unit);
      if ((done += finished_units) == units) {
        const std::lock_guard<std::mutex> lock(mutex);
        finished.notify_all();
      }
    }
  }

  int64_t left() const { return std::max<int64_t>(0, units - next); }
};

struct ThreadPool::State {
  using Lock = std::unique_lock<std::mutex>;

  std::mutex mutex;
  std::condition_variable changed;
  std::deque<std::shared_ptr<Job>> jobs;
  bool stopping = false;
  // How many threads may work at a time, and how many do now: callers and threads of the pool.
  int max_busy;
  int busy = 0;
  int asleep = 0;
  std::vector<std::thread> threads;

  explicit State(int size) : max_busy(size) {}

  bool can_work() const { return busy < max_busy && !jobs.empty(); }

  // After a change: releases the lock, and wakes threads if more units are left than this thread
  // takes. It wakes two at most, as each of them wakes others in turn.
  void notify(Lock* lock, int64_t taken = 0) {
    constexpr int kMost = 2;
    int64_t wanted = -taken;
    for (const auto& job : jobs) wanted += std::min<int64_t>(job->left(), max_busy);
    wanted = std::min<int64_t>({wanted, asleep, max_busy - busy, kMost});
    lock->unlock();
    for (; wanted > 0; --wanted) changed.notify_one();
  }

  // Works on the oldest job, with the lock released.
  void work(Lock* lock) {
    if (!can_work()) return;
    const std::shared_ptr<Job> job = jobs.front();
    if (job->left() == 0) return jobs.pop_front();
    ++busy;
    notify(lock, 1);
    job->work();
    lock->lock();
    --busy;
  }

  void serve() {
    Lock lock(mutex);
    while (true) {
      ++asleep;
      changed.wait(lock, [this] { return stopping || can_work(); });
      --asleep;
      if (stopping) return;
      work(&lock);
    }
  }
};

ThreadPool::ThreadPool(int threads) : state_(new State(threads)) {
  for (int i = 1; i < threads; ++i) {
    try {
      state_->threads.emplace_back([state = state_.get()] { state->serve(); });
    } catch (const std::exception&) {
      // The system refuses another thread.
      const State::Lock lock(state_->mutex);
      state_->max_busy = i;
      break;
    }
  }
}

ThreadPool::~ThreadPool() {
  {
    const std::lock_guard<std::mutex> lock(state_->mutex);
    state_->stopping = true;
  }
  state_->changed.notify_all();
  for (std::thread& thread : state_->threads) thread.join();
}

int ThreadPool::threads() const { return state_->max_busy; }

void ThreadPool::parallel_for(int64_t units, const std::function<void(int64_t)>& f) {
  if (units <= 1 || threads() == 1) {
    for (int64_t unit = 0; unit < units; ++unit) f(unit);
    return;
  }
  const auto job = std::make_shared<Job>();
  job->f = &f;
  job->units = units;
  {
    State::Lock lock(state_->mutex);
    state_->jobs.push_back(job);
    ++state_->busy;
    state_->notify(&lock, 1);
  }
  job->work();
  {
    State::Lock lock(state_->mutex);
    --state_->busy;
    const auto mine = std::find(state_->jobs.begin(), state_->jobs.end(), job);
    if (mine != state_->jobs.end()) state_->jobs.erase(mine);
    state_->notify(&lock);
  }
  // A thread that still holds the job finds no unit left and does not call f.
  const auto finished = [&] { return job->done == job->units; };
  if (!spin_until(finished, kSpin)) {
    State::Lock lock(job->mutex);
    job->finished.wait(lock, finished);
  }
  if (job->error) throw std::runtime_error(*job->error);
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
