// What a kernel set offers, the CPU's or a GPU's: the passes over memory, on raw pointers.
//
// Kernels know nothing of devices that wait for each other, nor of MXNet.
#ifndef GLUON_SYNCBN_NUMERICS_KERNELS_H_
#define GLUON_SYNCBN_NUMERICS_KERNELS_H_

#include <cstdint>
#include <vector>

#include "numerics/dtypes.h"
#include "numerics/formulas.h"
#include "numerics/sums.h"

namespace gluon_syncbn {

// An array of shape (N, C, S): S values of one channel lie together. (N, C) has S = 1, and so has
// NHWC with N*H*W for N, of which R = H*W rows are those of one sample.
struct View {
  int64_t N, C, S, R = 1;
  int64_t size() const { return N * C * S; }
};

// How a result meets what its array holds already. kAdd: added to it (grad_req='add').
enum class Store { kWrite, kAdd };

// What one device brings to a pass in training, and where its results go. Null gamma stands for
// ones; null y and dx are not wanted.
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
  // To be written: the sums of this part alone.
  ChannelSums* sums;
};

// The kernels for one kind of device and one dtype: data and its gradients point to values of it,
// gamma and beta to values of its Arithmetic (half.h). Null gamma stands for ones.
struct Kernels {
  // sums[c] = {sum(x), sum(x^2)}: needs no statistics, so it comes before the meeting.
  void (*forward_sums)(View, const void* x, ChannelSums* sums);
  // y = (x - mean) * inv_std * gamma + beta; y may be x.
  void (*forward)(View, const void* x, const Statistics*, const void* gamma, const void* beta,
                  void* y, Store);
  // sums[c] = {sum(dy), sum(dy * (x - mean))}.
  void (*backward_sums)(View, const void* dy, const void* x, const Statistics*, ChannelSums* sums);
  // dx through the batch's statistics, with the sums and the count of all devices; dx may be dy.
  void (*backward)(View, const void* dy, const void* x, const Statistics*, const void* gamma,
                   const ChannelSums* sums, double count, void* dx, Store);
  // dx = dy * gamma * inv_std, where the statistics are constants.
  void (*backward_constant)(View, const void* dy, const Statistics*, const void* gamma, void* dx,
                            Store);
  // All parts of a batch at once, where they lie in one memory: a few channels at a time are summed
  // and written while the cache still holds them, so that x (and dy) come from memory once.
  void (*forward_together)(const std::vector<const ForwardShard*>&, double epsilon, Statistics*);
  void (*backward_together)(const std::vector<const BackwardShard*>&, const Statistics*);
};

const Kernels& cpu_kernels(DType dtype);

}  // namespace gluon_syncbn

#endif  // GLUON_SYNCBN_NUMERICS_KERNELS_H_
