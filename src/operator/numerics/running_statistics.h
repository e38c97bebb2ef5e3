// How the running statistics of a layer follow those of its batches.
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

// The statistics of `count` values of each channel.
struct Batch {
  std::vector<Statistics> channels;
  double count = 0;
};
using BatchPtr = std::shared_ptr<const Batch>;

struct RunningRule {
  double momentum = 0.9;
  // The mean of all batches so far, in place of the moving average.
  bool cumulative = false;
  // The variance divided by count - 1, in place of count.
  bool unbiased = false;
};

// The arrays of one layer on one device, of P values: (C,), (C,), and (1,) where the rule is
// cumulative.
template <typename P>
struct RunningArrays {
  P *mean, *variance, *num_batches;
};

// What a layer on one device has to remember between its calls, beside those arrays.
class RunningState {
 public:
  // Updates the arrays by a batch, or by those of several virtual devices: of these, each has
  // running statistics of its own, and the arrays hold the mean, added and divided in P as MXNet
  // does when it saves the parameters of so many devices.
  template <typename P>
  void update(const std::vector<BatchPtr>& batches, const RunningRule& rule,
              const RunningArrays<P>& arrays);

  // Somebody else writes an array: all virtual devices go on from there.
  void restart(bool variance);

  // Where MXNet computes forward passes a second time before the backward, in a node of its own:
  // whether a call computes what another one has computed last at this place.
  bool is_recomputed(int64_t place, int64_t call, const std::vector<BatchPtr>& batches);
  // Nobody computes a call again that goes backward itself.
  void goes_backward(int64_t place, int64_t call);

 private:
  // The values that virtual devices have, and their mean as it was written.
  struct Virtual {
    std::vector<double> each, mean;
  };

  template <typename P, typename F>
  static void follow(size_t count, const F& batch_value, double momentum, size_t channels,
                     P* running, Virtual* of);

  // The last forward call at a place, and what came out.
  struct Computed {
    int64_t call = -1;
    std::vector<BatchPtr> batches;
  };

  std::mutex mutex_;
  Virtual mean_, variance_;
  std::map<int64_t, Computed> computed_;
};

// The states of all layers, by layer and device: from keep() to forget(), and as long as somebody
// holds one.
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
