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

// An array of shape (N, C, S): S contiguous values per channel. (N, C) data has S = 1. So has NHWC
// data, with N*H*W rows, of which R = H*W belong to each sample.
struct View {
  int64_t N, C, S, R = 1;
  int64_t size() const { return N * C * S; }
};

// Whether a result replaces the values of its array or is added to them (grad_req='add'). For large
// arrays, the CPU kernels choose kStream, which replaces values and bypasses the caches.
enum class Store { kWrite, kAdd, kStream };

// The shard of one device. Null gamma means ones. Null y, dx, dresidual are not computed.
struct ForwardShard {
  View view;
  // Null without a residual.
  const void *x, *gamma, *beta, *residual;
  Epilogue epilogue;
  void* y;
  Store store;
};

struct BackwardShard {
  View view;
  // y is read where x alone does not determine the derivative of the activation. It is null unless
  // there is an activation after a residual, or x is null and is recovered from y, which needs a
  // leaky relu.
  const void *dy, *x, *y, *gamma, *beta;
  Epilogue epilogue;
  void* dx;
  Store store;
  void* dresidual;
  Store residual_store;
  // Output: the sums of this shard alone.
  ChannelSums* sums;

  bool recovers_x() const { return !x; }
};

// What forward keeps for backward, in the device's memory, for each channel of all batches.
struct ForBackward {
  Statistics* statistics = nullptr;
  // On GPUs only: the statistics of z (formulas.h) if x is recovered from y, otherwise null.
  Statistics* of_z = nullptr;
  // On GPUs only: the gates of the activation, of type Gate; null without an activation.
  void* gates = nullptr;

  // The statistics of what backward sums: z or x.
  SBN_HOST_DEVICE const Statistics* used() const { return of_z ? of_z : statistics; }
};

// The kernels for one kind of device and one dtype. gamma and beta point to values of its
// Arithmetic (half.h).
struct Kernels {
  // sums[c] = {sum(x), sum(x^2)}.
  void (*forward_sums)(View, const void* x, ChannelSums* sums);
  // y = activation((x - mean) * inv_std * gamma + beta + residual); y may be x.
  void (*forward)(const ForwardShard&, const Statistics*);
  // sums[c] = {sum(g), sum(g * (x - mean))} for the gradient g of the activation's argument. If x
  // is recovered, z = (x - mean) * inv_std * gamma + beta takes the place of x, and its mean that
  // of mean.
  void (*backward_sums)(const BackwardShard&, const Statistics*);
  // dx, given the sums and the count of all devices, and dresidual. With zero sums the statistics
  // are constants. dx may be dy.
  void (*backward)(const BackwardShard&, const Statistics*, const ChannelSums* sums, double count);
  // Sums and results in one pass, for a shard that is the whole batch: channels are summed and
  // written a few at a time, so that the second access of x (and dy) is served by the cache.
  void (*forward_alone)(const ForwardShard&, double epsilon, Statistics*);
  void (*backward_alone)(const BackwardShard&, const Statistics*);
};

const Kernels& cpu_kernels(DType dtype);

}  // namespace gluon_syncbn

#endif  // GLUON_SYNCBN_NUMERICS_KERNELS_H_
