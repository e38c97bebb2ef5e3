// Updates the running statistics of layers.
#ifndef GLUON_SYNCBN_NUMERICS_RUNNING_STATISTICS_H_
#define GLUON_SYNCBN_NUMERICS_RUNNING_STATISTICS_H_

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "numerics/formulas.h"

namespace gluon_syncbn {

// The statistics of a batch of `count` values per channel.
struct Batch {
  std::vector<Statistics> channels;
  double count = 0;
};
using BatchPtr = std::shared_ptr<const Batch>;

struct RunningRule {
  double momentum = 0.9;
  // The mean of all batches so far, instead of the moving average.
  bool cumulative = false;
  // The variance divided by count - 1, instead of count.
  bool unbiased = false;
};

// The running statistics of one layer on one device, of shapes (C,), (C,), and, if the rule is
// cumulative, (1,).
template <typename P>
struct RunningArrays {
  P *mean, *variance, *num_batches;
};

// The state of a layer on one device between calls, in addition to those arrays.
class RunningState {
 public:
  // Updates the arrays by the batch of the device, or by those of its virtual devices. Each virtual
  // device has its own running statistics. The arrays hold their mean, computed in P as MXNet does
  // when it saves the parameters of several devices.
  template <typename P>
  void update(const std::vector<BatchPtr>& batches, const RunningRule& rule,
              const RunningArrays<P>& arrays);

  // The user has written an array: all virtual devices continue with its values.
  void restart(bool variance);

  // If MXNet recomputes forward passes before the backward: whether this call of the node repeats
  // the last one.
  bool is_recomputed(int64_t node, int64_t call, const std::vector<BatchPtr>& batches);
  // A call that goes backward is not recomputed later.
  void on_backward(int64_t node, int64_t call);

 private:
  // The values of all virtual devices, and their mean as it was last written.
  struct Virtual {
    std::vector<double> each, mean;
  };

  template <typename P, typename F>
  static void update_average(size_t count, const F& batch_value, double momentum, size_t channels,
                             P* running, Virtual* state);

  // The last forward call of a node, and its statistics.
  struct Computed {
    int64_t call = -1;
    std::vector<BatchPtr> batches;
  };

  std::mutex mutex_;
  Virtual mean_, variance_;
  std::map<int64_t, Computed> computed_;
};

// The states of all layers, by layer and device. A state is kept from keep() to forget() and while
// it is referenced.
class RunningStates {
 public:
  void keep(int64_t layer);
  void forget(int64_t layer);
  std::shared_ptr<RunningState> of(int64_t layer, const std::string& device);
  // See RunningState.
  void restart(int64_t layer, bool variance);

 private:
  using Key = std::pair<int64_t, std::string>;

  std::mutex mutex_;
  std::set<int64_t> kept_;
  std::map<Key, std::shared_ptr<RunningState>> states_;
};

}  // namespace gluon_syncbn

#endif  // GLUON_SYNCBN_NUMERICS_RUNNING_STATISTICS_H_
