#include "thread_pool.h"

#include <sched.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <condition_variable>
#include <cstdlib>
#include <deque>
#include <exception>
#include <fstream>
#include <mutex>
#include <sstream>
#include <thread>
#include <utility>
#include <vector>

namespace gluon_syncbn {

namespace {

using Clock = std::chrono::steady_clock;

// The last units of a loop take others about this long, and to be woken takes longer.
constexpr std::chrono::microseconds kLastUnits{50};

// Whether it came true within that time, which the core is shared out to whoever wants it.
template <typename F>
bool look_out_for(const F& done, std::chrono::duration<double> time) {
  for (const Clock::time_point start = Clock::now(); Clock::now() - start < time;) {
    if (done()) return true;
    std::this_thread::yield();
  }
  return done();
}

}  // namespace

struct ThreadPool::Job {
  const std::function<void(int64_t)>* f;
  int64_t units;
  std::atomic<int64_t> next{0};
  std::atomic<int64_t> done{0};
  std::mutex mutex;
  std::condition_variable finished;
  // What the first unit that failed has thrown.
  std::exception_ptr error;

  // Returns how many units are done: this one, or with it all that are not begun, if it throws.
  int64_t run(int64_t unit) {
    try {
      (*f)(unit);
      return 1;
    } catch (...) {
      const std::lock_guard<std::mutex> lock(mutex);
      if (!error) error = std::current_exception();
      return 1 + std::max<int64_t>(0, units - next.exchange(units));
    }
  }

  // Works until no unit is left to begin, or it is enough.
  template <typename F>
  void work(const F& enough) {
    while (!enough()) {
      const int64_t unit = next++;
      if (unit >= units) return;
      const int64_t ended = run(unit);
      if ((done += ended) == units) {
        const std::lock_guard<std::mutex> lock(mutex);
        finished.notify_all();
      }
    }
  }

  bool begun() const { return next >= units; }
};

struct ThreadPool::State {
  using Lock = std::unique_lock<std::mutex>;

  std::mutex mutex;
  std::condition_variable changed;
  std::deque<std::shared_ptr<Job>> jobs;
  bool stopping = false;
  // How many are to work at a time, and how many do: callers, helpers and threads of the pool.
  int wanted;
  int busy = 0;
  // Whether there may be work for a helper, who looks at it without the lock.
  std::atomic<bool> inviting{false};
  std::vector<std::thread> threads;

  explicit State(int threads_wanted) : wanted(threads_wanted) {}

  // One more than there are cores for would only get in the way.
  bool may_help() const { return busy < wanted && !jobs.empty(); }

  // After a change: sees to it that whoever may work does.
  void invite() {
    inviting = may_help();
    if (inviting) changed.notify_all();
  }

  // Works in the oldest loop, with the lock open, if that has a unit left.
  template <typename F>
  void work(Lock* lock, const F& enough) {
    if (!may_help()) return;
    const std::shared_ptr<Job> job = jobs.front();
    if (job->begun()) return jobs.pop_front();
    ++busy;
    inviting = may_help();
    lock->unlock();
    job->work(enough);
    lock->lock();
    --busy;
  }

  void serve() {
    Lock lock(mutex);
    while (true) {
      changed.wait(lock, [this] { return stopping || may_help(); });
      if (stopping) return;
      work(&lock, [] { return false; });
    }
  }
};

ThreadPool::ThreadPool(int threads) : state_(new State(threads)) {
  for (int i = 1; i < threads; ++i) {
    try {
      state_->threads.emplace_back([state = state_.get()] { state->serve(); });
    } catch (const std::exception&) {
      // The system gives no more of them.
      const State::Lock lock(state_->mutex);
      state_->wanted = i;
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
    const State::Lock lock(state_->mutex);
    state_->jobs.push_back(job);
    ++state_->busy;
    state_->invite();
  }
  job->work([] { return false; });
  {
    const State::Lock lock(state_->mutex);
    --state_->busy;
    const auto mine = std::find(state_->jobs.begin(), state_->jobs.end(), job);
    if (mine != state_->jobs.end()) state_->jobs.erase(mine);
    state_->invite();
  }
  // A thread that still has the job finds no unit left to begin and never touches f.
  const auto finished = [&] { return job->done == job->units; };
  if (!look_out_for(finished, kLastUnits)) {
    State::Lock lock(job->mutex);
    job->finished.wait(lock, finished);
  }
  if (job->error) std::rethrow_exception(std::move(job->error));
}

void ThreadPool::help(const std::function<bool()>& done, std::chrono::duration<double> patience) {
  const auto called = [&] { return state_->inviting.load() || done(); };
  while (look_out_for(called, patience) && !done()) {
    State::Lock lock(state_->mutex);
    state_->work(&lock, done);
    state_->invite();
  }
}

namespace {

// How many CPUs a cgroup may use at a time. The files have a quota, "max" or -1 where there is
// none, and its period.
double quota_of(const std::string& folder, const std::vector<std::string>& files) {
  std::stringstream text;
  for (const std::string& file : files) text << std::ifstream(folder + file).rdbuf() << ' ';
  double quota, period;
  return text >> quota >> period && quota > 0 && period > 0 ? quota / period : HUGE_VAL;
}

}  // namespace

int default_threads(int cores, const std::string& root) {
  if (const char* set = std::getenv("OMP_NUM_THREADS")) {
    if (const int threads = std::atoi(set); threads > 0) return threads;
  }
  const std::string mounted = root + "/sys/fs/cgroup";
  double cpus = cores;
  std::ifstream groups(root + "/proc/self/cgroup");
  // "0::/path" for version 2, "4:cpu,cpuacct:/path" for version 1.
  for (std::string line; std::getline(groups, line);) {
    const size_t name = line.find(':') + 1, end = line.find(":/", name);
    if (name == 0 || end == line.npos) continue;
    const std::string controllers = "," + line.substr(name, end - name) + ",";
    if (controllers != ",," && controllers.find(",cpu,") == line.npos) continue;
    // The group and all that it is in. A container may have the path of outside, and itself as the
    // root.
    for (std::string path = line.substr(end + 1);; path.resize(path.rfind('/'))) {
      cpus = std::min(cpus, controllers == ",,"
                                ? quota_of(mounted + path, {"/cpu.max"})
                                : quota_of(mounted + "/cpu" + path,
                                           {"/cpu.cfs_quota_us", "/cpu.cfs_period_us"}));
      if (path.empty()) break;
    }
  }
  return std::max(1, static_cast<int>(std::ceil(cpus)));
}

namespace {

int available_cores() {
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
    auto* const mine = new ThreadPool(default_threads(available_cores()));
    if (pool.compare_exchange_strong(current, mine, std::memory_order_acq_rel)) return *mine;
    delete mine;
  }
  return *current;
}

void set_num_threads(int threads) { delete pool.exchange(new ThreadPool(threads)); }

void abandon_thread_pool() { pool.store(nullptr); }

}  // namespace gluon_syncbn
