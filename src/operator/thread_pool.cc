#include "thread_pool.h"

#include <sched.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdlib>
#include <deque>
#include <mutex>
#include <thread>
#include <vector>

namespace gluon_syncbn {

struct ThreadPool::Job {
  const std::function<void(int64_t)>* f;
  int64_t units;
  std::atomic<int64_t> next{0};
  std::atomic<int64_t> done{0};
  std::mutex mutex;
  std::condition_variable finished;

  // Works until no unit is left to begin.
  void work() {
    for (int64_t unit = next++; unit < units; unit = next++) {
      (*f)(unit);
      if (++done == units) {
        const std::lock_guard<std::mutex> lock(mutex);
        finished.notify_all();
      }
    }
  }

  bool begun() const { return next >= units; }
};

struct ThreadPool::State {
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<std::shared_ptr<Job>> jobs;
  bool stopping = false;
  // How many are to work at a time, and how many do: callers and threads of the pool.
  const int wanted;
  int busy = 0;
  std::vector<std::thread> threads;

  explicit State(int threads_wanted) : wanted(threads_wanted) {}

  // One more than there are cores for would only get in the way.
  bool may_help() const { return busy < wanted && !jobs.empty(); }

  void serve() {
    std::unique_lock<std::mutex> lock(mutex);
    while (true) {
      changed.wait(lock, [this] { return stopping || may_help(); });
      if (stopping) return;
      const std::shared_ptr<Job> job = jobs.front();
      if (job->begun()) {
        jobs.pop_front();
        continue;
      }
      ++busy;
      lock.unlock();
      job->work();
      lock.lock();
      --busy;
    }
  }
};

ThreadPool::ThreadPool(int threads) : state_(new State(threads)) {
  for (int i = 1; i < threads; ++i) {
    state_->threads.emplace_back([state = state_.get()] { state->serve(); });
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

int ThreadPool::threads() const { return state_->wanted; }

void ThreadPool::parallel_for(int64_t units, const std::function<void(int64_t)>& f) {
  if (units <= 1 || threads() == 1) {
    for (int64_t unit = 0; unit < units; ++unit) f(unit);
    return;
  }
  const auto job = std::make_shared<Job>();
  job->f = &f;
  job->units = units;
  {
    const std::lock_guard<std::mutex> lock(state_->mutex);
    state_->jobs.push_back(job);
    ++state_->busy;
    if (state_->may_help()) state_->changed.notify_all();
  }
  job->work();
  {
    const std::lock_guard<std::mutex> lock(state_->mutex);
    --state_->busy;
    const auto mine = std::find(state_->jobs.begin(), state_->jobs.end(), job);
    if (mine != state_->jobs.end()) state_->jobs.erase(mine);
    if (state_->may_help()) state_->changed.notify_all();
  }
  // A thread that still has the job finds no unit left to begin and never touches f.
  std::unique_lock<std::mutex> lock(job->mutex);
  job->finished.wait(lock, [&] { return job->done == job->units; });
}

namespace {

int default_threads() {
  if (const char* set = std::getenv("OMP_NUM_THREADS")) {
    if (const int threads = std::atoi(set); threads > 0) return threads;
  }
  cpu_set_t cores;
  if (sched_getaffinity(0, sizeof(cores), &cores) == 0) return std::max(1, CPU_COUNT(&cores));
  return static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
}

// Never destroyed: a kernel may still run when the process ends.
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
