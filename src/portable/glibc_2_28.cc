// What newer versions of glibc and libstdc++ have and g++'s headers use, for a portable wheel. The
// definitions stay within the library.
#include <dlfcn.h>
#include <pthread.h>
#include <time.h>

#include <new>

// glibc 2.32: whether no thread was ever started. "No" is always right.
extern "C" char __libc_single_threaded;
char __libc_single_threaded = 0;

// glibc 2.30. Without it, the wait is measured by the clock that can be set.
extern "C" int pthread_cond_clockwait(pthread_cond_t* condition, pthread_mutex_t* mutex,
                                      clockid_t clock, const timespec* until) {
  using Function = int (*)(pthread_cond_t*, pthread_mutex_t*, clockid_t, const timespec*);
  static const Function function =
      reinterpret_cast<Function>(dlsym(RTLD_DEFAULT, "pthread_cond_clockwait"));
  if (function) return function(condition, mutex, clock, until);
  timespec now, real;
  clock_gettime(clock, &now);
  clock_gettime(CLOCK_REALTIME, &real);
  real.tv_sec += until->tv_sec - now.tv_sec;
  real.tv_nsec += until->tv_nsec - now.tv_nsec;
  if (real.tv_nsec < 0) real.tv_sec--, real.tv_nsec += 1000000000;
  if (real.tv_nsec >= 1000000000) real.tv_sec++, real.tv_nsec -= 1000000000;
  return pthread_cond_timedwait(condition, mutex, &real);
}

namespace std {

// libstdc++ 11.
void __throw_bad_array_new_length() { throw bad_array_new_length(); }

}  // namespace std
