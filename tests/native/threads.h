// Threads of tests, and their waits.
#ifndef GLUON_SYNCBN_TESTS_THREADS_H_
#define GLUON_SYNCBN_TESTS_THREADS_H_

#include <chrono>
#include <thread>
#include <vector>

namespace gluon_syncbn {

inline void sleep(double seconds) {
  std::this_thread::sleep_for(std::chrono::duration<double>(seconds));
}

// Runs f(i) in this many threads.
template <typename F>
void in_threads(int count, const F& f) {
  std::vector<std::thread> threads;
  for (int i = 0; i < count; ++i) threads.emplace_back([&f, i] { f(i); });
  for (std::thread& thread : threads) thread.join();
}

}  // namespace gluon_syncbn

#endif  // GLUON_SYNCBN_TESTS_THREADS_H_
