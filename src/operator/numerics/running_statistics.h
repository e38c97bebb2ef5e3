// How the running statistics of a layer follow its batches, for host and device. They follow the
// batch of all devices, or the mean of the statistics of virtual devices' batches: either as a
// moving average, or as the mean of all batches so far.
#ifndef GLUON_SYNCBN_NUMERICS_RUNNING_STATISTICS_H_
#define GLUON_SYNCBN_NUMERICS_RUNNING_STATISTICS_H_

#include "numerics/formulas.h"

namespace gluon_syncbn {

struct RunningRule {
  double momentum = 0.9;
  // The mean of all batches so far, instead of the moving average.
  bool cumulative = false;
  // The variance divided by count - 1, instead of count.
  bool unbiased = false;
};

// The numbers of values of several batches: the first ones may be larger.
struct BatchCounts {
  double first, other;
  int64_t firsts;

  SBN_HOST_DEVICE double of(int64_t batch) const { return batch < firsts ? first : other; }
};

// What enters the moving averages of one channel.
struct BatchMeans {
  double mean, variance;

  // statistics_of(b) are those of batch b.
  template <typename F>
  SBN_HOST_DEVICE static BatchMeans of(int64_t batches, const BatchCounts& counts, bool unbiased,
                                       const F& statistics_of) {
    BatchMeans sums{0, 0};
    for (int64_t b = 0; b < batches; ++b) {
      const Statistics s = statistics_of(b);
      sums.mean += s.mean;
      sums.variance += running_variance(s, counts.of(b), unbiased);
    }
    const auto size = static_cast<double>(batches);
    return {sums.mean / size, sums.variance / size};
  }
};

}  // namespace gluon_syncbn

#endif  // GLUON_SYNCBN_NUMERICS_RUNNING_STATISTICS_H_
