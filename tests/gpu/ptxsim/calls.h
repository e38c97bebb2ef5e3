// What is counted of the calls of CUDA's functions, and what may become of one instead of its work.
#ifndef GLUON_SYNCBN_TESTS_PTXSIM_CALLS_H_
#define GLUON_SYNCBN_TESTS_PTXSIM_CALLS_H_

#include <cstdint>
#include <map>
#include <optional>
#include <string>

namespace ptxsim {

// Only of those that this program makes, or the library gluon_syncbn, and not MXNet.
class Calls {
 public:
  Calls();

  // A call of a function from this address. Returns the error that it ends with at once: 0 if it is
  // dropped. Nothing as a rule.
  std::optional<int> enter(const std::string& function, void* caller);

  // Adds to a count, if the thread's last call that entered was one of those.
  void add(const std::string& name, uint64_t count);
  uint64_t count(const std::string& name) const;

  // After `calls` more calls, one of this function fails. -1: none does.
  void fail_next(const std::string& function, int calls) { left_[function] = calls; }

 private:
  std::map<std::string, uint64_t> counts_;
  std::map<std::string, int> left_;
  // Where calls come from, to a file, and from where they are dropped.
  const char *sites_, *dropped_;
};

}  // namespace ptxsim

#endif  // GLUON_SYNCBN_TESTS_PTXSIM_CALLS_H_
