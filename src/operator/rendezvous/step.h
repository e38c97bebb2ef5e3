// Whether the step of this process has failed. No lock: events in, answers out. failures.cc tells
// it what MXNet and Python say. docs/design.md, "After an error", has the table.
#ifndef GLUON_SYNCBN_RENDEZVOUS_STEP_H_
#define GLUON_SYNCBN_RENDEZVOUS_STEP_H_

#include <string>

namespace gluon_syncbn {

// A step goes through all layers, so it fails as a whole. It stays failed until Python has raised
// the error and nothing of it is left.
class Step {
 public:
  bool runs() const { return is_ == Is::kRunning; }
  bool has_failed() const { return is_ == Is::kFailed; }
  // The first failure; empty while the step runs.
  const std::string& why() const { return why_; }

  void fail(const std::string& why) {
    if (!runs()) return;
    is_ = Is::kFailed;
    why_ = why;
  }
  // As a failure, for good: the process ends.
  void end(const std::string& why) {
    fail(why);
    is_ = Is::kEnded;
  }
  void recover() {
    if (is_ != Is::kEnded) *this = Step();
  }

 private:
  enum class Is { kRunning, kFailed, kEnded };

  Is is_ = Is::kRunning;
  std::string why_;
};

}  // namespace gluon_syncbn

#endif  // GLUON_SYNCBN_RENDEZVOUS_STEP_H_
