// Updates the running statistics of layers.
#ifndef GLUON_SYNCBN_NUMERICS_RUNNING_STATISTICS_H_
#define GLUON_SYNCBN_NUMERICS_RUNNING_STATISTICS_H_

#include <memory>
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

// Updates the arrays with the statistics of the device's batch, or with the mean of those of its
// virtual devices.
template <typename P>
void update_running(const std::vector<BatchPtr>& batches, const RunningRule& rule,
                    const RunningArrays<P>& arrays) {
  double momentum = rule.momentum;
  if (rule.cumulative) {
    *arrays.num_batches += 1;
    momentum = cumulative_momentum(*arrays.num_batches);
  }
  const auto update = [&](P* running, const auto& value_of) {
    for (size_t c = 0; c < batches[0]->channels.size(); ++c) {
      double sum = 0;
      for (const BatchPtr& batch : batches) sum += value_of(*batch, batch->channels[c]);
      const double mean = sum / static_cast<double>(batches.size());
      running[c] = static_cast<P>(moving_average(running[c], mean, momentum));
    }
  };
  update(arrays.mean, [](const Batch&, const Statistics& s) { return s.mean; });
  update(arrays.variance, [&](const Batch& batch, const Statistics& s) {
    return running_variance(s, batch.count, rule.unbiased);
  });
}

}  // namespace gluon_syncbn

#endif  // GLUON_SYNCBN_NUMERICS_RUNNING_STATISTICS_H_
