// The interface of a set of kernels: passes over memory, on raw pointers, without synchronization
// and without MXNet.
#ifndef GLUON_SYNCBN_NUMERICS_KERNELS_H_
#define GLUON_SYNCBN_NUMERICS_KERNELS_H_

#include <cstdint>
#include <vector>

#include "numerics/dtypes.h"
#include "numerics/formulas.h"
#include "numerics/sums.h"

namespace gluon_syncbn {

// An array of shape (N, C, S): S contiguous values per channel. (N, C) has S = 1. So has NHWC, as
// N*H*W rows, of which R = H*W belong to one sample.
struct View {
  int64_t N, C, S, R = 1;
  int64_t size() const { return N * C * S; }
};

// Whether a result replaces the values of its array or is added to them (grad_req='add').
enum class Store { kWrite, kAdd };

// The shard of one device in training. Null gamma means ones; null y and dx are not computed.
struct ForwardShard {
  View view;
  const void *x, *gamma, *beta;
  void* y;
  Store store;
};

struct BackwardShard {
  View view;
  const void *dy, *x, *gamma;
  void* dx;
  Store store;
  // Output: the sums of this shard alone.
  ChannelSums* sums;
};

// The kernels for one kind of device and one dtype. gamma and beta point to values of its
// Arithmetic (half.h). Null gamma means ones.
struct Kernels {
  // sums[c] = {sum(x), sum(x^2)}.
  void (*forward_sums)(View, const void* x, ChannelSums* sums);
  // y = (x - mean) * inv_std * gamma + beta; y may be x.
  void (*forward)(View, const void* x, const Statistics*, const void* gamma, const void* beta,
                  void* y, Store);
  // sums[c] = {sum(dy), sum(dy * (x - mean))}.
  void (*backward_sums)(View, const void* dy, const void* x, const Statistics*, ChannelSums* sums);
  // dx through the statistics of the batch, given the sums and the count of all devices; dx may be
  // dy.
  void (*backward)(View, const void* dy, const void* x, const Statistics*, const void* gamma,
                   const ChannelSums* sums, double count, void* dx, Store);
  // dx = dy * gamma * inv_std, where the statistics are constants.
  void (*backward_constant)(View, const void* dy, const Statistics*, const void* gamma, void* dx,
                            Store);
  // All shards of a batch at once, if they are in the same memory. A few channels at a time are
  // summed and written, so that the second access of x (and dy) is served by the cache.
  void (*forward_together)(const std::vector<const ForwardShard*>&, double epsilon, Statistics*);
  void (*backward_together)(const std::vector<const BackwardShard*>&, const Statistics*);
};

const Kernels& cpu_kernels(DType dtype);

}  // namespace gluon_syncbn

#endif  // GLUON_SYNCBN_NUMERICS_KERNELS_H_
