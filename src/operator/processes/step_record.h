// The exchanges of this process, by training step: a process without samples makes those of an
// earlier step again.
//
// Python says where a step ends, and MXNet runs the calls of that step later. So each layer enters
// the next step by itself, in either direction: once an array that its calls write has been
// written.
#ifndef GLUON_SYNCBN_PROCESSES_STEP_RECORD_H_
#define GLUON_SYNCBN_PROCESSES_STEP_RECORD_H_

#include <cstdint>
#include <deque>
#include <map>
#include <mutex>
#include <vector>

#include "processes/layer_messages.h"

namespace gluon_syncbn {

class StepRecord {
 public:
  struct Exchange {
    int64_t layer;
    bool is_backward;
    int64_t node;
    // How many forward calls of this node ago the call went forward: 1 if it was the last one.
    int64_t ago;
  };

  // An exchange begins.
  void note(const ProcessCall& call);
  // Ends a step and returns its number. From now on of() knows this step, and those that it has for
  // the `kept` numbers.
  int64_t end(const std::vector<int64_t>& layers, const std::vector<int64_t>& kept);
  // Later exchanges of the layer in this direction belong to this step.
  void enter(int64_t layer, bool is_backward, int64_t step);
  // The exchanges of a step in their order, or of the last one before it that had any.
  std::vector<Exchange> of(int64_t step) const;

 private:
  // Where a layer is.
  struct Position {
    int64_t forward_step, backward_step;
    // By node: the number of forward calls.
    std::map<int64_t, int64_t> calls;
  };
  using Exchanges = std::map<int64_t, std::deque<Exchange>>;
  Exchanges::const_iterator find(int64_t step) const;

  mutable std::mutex mutex_;
  int64_t step_ = 0;
  std::map<int64_t, Position> positions_;
  Exchanges exchanges_;
};

}  // namespace gluon_syncbn

#endif  // GLUON_SYNCBN_PROCESSES_STEP_RECORD_H_
