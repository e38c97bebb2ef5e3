// The kernels of the CPU: loops over the values of a shard, on a pool of threads.
#ifndef GLUON_SYNCBN_CPU_KERNELS_H_
#define GLUON_SYNCBN_CPU_KERNELS_H_

#include "numerics/shards.h"

namespace gluon_syncbn {

// Those of one dtype. gamma and beta point to values of its Arithmetic (half.h).
struct Kernels {
  // sums[c] = {sum(x), sum(x^2)}.
  void (*forward_sums)(View, const void* x, ChannelSums* sums);
  // y = activation((x - mean) * inv_std * gamma + beta + residual); y may be x.
  void (*forward)(const ForwardShard&, const Statistics*);
  // sums[c] = {sum(g), sum(g * (x - mean))} for the gradient g of the activation's argument. If
  // there is y in place of x, z = (x - mean) * inv_std * gamma + beta takes the place of x, and its
  // mean that of mean.
  void (*backward_sums)(const BackwardShard&, const Statistics*);
  // dx, given the sums and the count of all devices, and dresidual. With zero sums the statistics
  // are constants. dx may be dy.
  void (*backward)(const BackwardShard&, const Statistics*, const ChannelSums* sums, double count);
  // Sums and results, for a shard that is the whole batch. With S > 1 and channels enough for the
  // threads, channels are summed and written a few at a time, so that the second access of x (and
  // dy) is served by the cache.
  void (*forward_alone)(const ForwardShard&, double epsilon, Statistics*);
  void (*backward_alone)(const BackwardShard&, const Statistics*);
};

const Kernels& cpu_kernels(DType dtype);

}  // namespace gluon_syncbn

#endif  // GLUON_SYNCBN_CPU_KERNELS_H_
