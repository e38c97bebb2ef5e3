// Threads for the loops of the CPU kernels: one pool for the whole process.
//
// Not OpenMP: each of the threads on which MXNet runs custom operators would get a team of its own,
// and a team waits for all its members, also for one that the system gives no core to. Here a
// caller waits for nobody who has not begun.
#ifndef GLUON_SYNCBN_THREAD_POOL_H_
#define GLUON_SYNCBN_THREAD_POOL_H_

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

namespace gluon_syncbn {

class ThreadPool {
 public:
  // With fewer threads where the system gives no more.
  explicit ThreadPool(int threads);
  ~ThreadPool();

  // Including the caller of parallel_for.
  int threads() const;

  // Calls f(0), ..., f(units - 1), each once, in any order, on this thread and those that are free.
  // If one throws, no more are begun, and what the first threw is thrown here once all have ended.
  void parallel_for(int64_t units, const std::function<void(int64_t)>& f);

  // For who waits for something that others are about to do in loops of this pool, on a thread that
  // is awake when no thread of the pool is: works in those loops until done(), or until there was
  // nothing to do for so long.
  void help(const std::function<bool()>& done, std::chrono::duration<double> patience);

 private:
  struct Job;
  struct State;
  std::unique_ptr<State> state_;
};

// The pool of the kernels. It starts with default_threads().
ThreadPool& thread_pool();

// OMP_NUM_THREADS, as with MXNet, or one for each core, but not more than the CPU quota of the
// process's cgroups lets run at a time. /proc and /sys are looked for in `root`.
int default_threads(int cores, const std::string& root = "");

// Replaces it. No kernel may run meanwhile.
void set_num_threads(int threads);

// In the child of a fork, which has none of the threads: the next loop makes a pool of its own.
void abandon_thread_pool();

}  // namespace gluon_syncbn

#endif  // GLUON_SYNCBN_THREAD_POOL_H_
