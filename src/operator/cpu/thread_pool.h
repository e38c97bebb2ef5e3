// The threads of the CPU kernels: one pool for the process.
//
// With OpenMP, every thread on which MXNet runs custom operators would have its own team, and a
// team waits for all its members, even for one that the system has not scheduled. Here a caller
// waits only for threads that have begun to work.
#ifndef GLUON_SYNCBN_CPU_THREAD_POOL_H_
#define GLUON_SYNCBN_CPU_THREAD_POOL_H_

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <list>
#include <mutex>
#include <thread>
#include <vector>

namespace gluon_syncbn {

class ThreadPool {
 public:
  // Has fewer threads if the system refuses to start more.
  explicit ThreadPool(int threads);
  ~ThreadPool();

  // Including the caller of parallel_for.
  int threads() const { return threads_; }

  // Calls f(0), ..., f(units - 1), each once, in any order, on this thread and idle ones. After an
  // exception no more calls begin; the first one's message is thrown as a std::runtime_error when
  // all calls have ended.
  void parallel_for(int64_t units, const std::function<void(int64_t)>& f);

 private:
  struct Job;
  using Lock = std::unique_lock<std::mutex>;

  void serve();
  void work(Job* job, Lock* lock);
  void unlock_and_wake(Lock* lock);

  std::mutex mutex_;
  std::condition_variable changed_;
  std::list<Job*> jobs_;
  bool stopping_ = false;
  // How many threads may work at a time, and how many do now: callers and threads of the pool.
  int threads_, busy_ = 0;
  std::vector<std::thread> workers_;
};

// The pool of the kernels, which at first has default_threads() threads.
ThreadPool& thread_pool();

// OMP_NUM_THREADS, as with MXNet, or one thread per core that this process may use.
int default_threads();

// Replaces the pool. No kernel may be running.
void set_num_threads(int threads);

// For the child of a fork, which has none of the threads: the next loop creates a new pool.
void abandon_thread_pool();

}  // namespace gluon_syncbn

#endif  // GLUON_SYNCBN_CPU_THREAD_POOL_H_
