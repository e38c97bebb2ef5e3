// One device's part of a batch, as raw pointers: what kernels read and write, without
// synchronization and without MXNet.
#ifndef GLUON_SYNCBN_NUMERICS_SHARDS_H_
#define GLUON_SYNCBN_NUMERICS_SHARDS_H_

#include <cstdint>

#include "numerics/dtypes.h"
#include "numerics/formulas.h"
#include "numerics/sums.h"

namespace gluon_syncbn {

// An array of shape (N, C, S): S contiguous values per channel. (N, C) data has S = 1. So has NHWC
// data, with N*H*W rows, of which R = H*W belong to each sample.
struct View {
  int64_t N = 0, C = 0, S = 0, R = 1;
  int64_t size() const { return N * C * S; }
};

// Whether a result replaces the values of its array or is added to them: with grad_req='add', and
// where a compiled graph adds gradients in place. It is rounded before it is added, as a separate
// addition would find it. For large arrays, the CPU kernels choose kStream, which replaces values
// and bypasses the caches.
enum class WriteMode { kWrite, kAdd, kStream };

// The shard of one device. Null gamma means ones. Null y, dx, dresidual are not computed.
struct ForwardShard {
  View view;
  // Null without a residual.
  const void *x = nullptr, *gamma = nullptr, *beta = nullptr, *residual = nullptr;
  Epilogue epilogue;
  void* y = nullptr;
  WriteMode mode = WriteMode::kWrite;
};

struct BackwardShard {
  View view;
  // y is read where x alone does not determine the derivative of the activation: after a residual,
  // and otherwise null. Or x is null, and z = normalize(x), the argument of a leaky relu, is found
  // from y (see from_y).
  const void *dy = nullptr, *x = nullptr, *y = nullptr, *gamma = nullptr, *beta = nullptr;
  Epilogue epilogue;
  void* dx = nullptr;
  WriteMode mode = WriteMode::kWrite;
  void* dresidual = nullptr;
  WriteMode residual_mode = WriteMode::kWrite;
  // Output: the sums of this shard alone.
  ChannelSums* sums = nullptr;

  // Whether what backward reads in the place of x is z = activation^-1(y), which is linear in x.
  bool from_y() const { return !x; }
};

// What forward keeps for backward, in the device's memory, for each channel of all batches.
struct ForBackward {
  Statistics* statistics = nullptr;
  // On GPUs only: the statistics of z if it is found from y (from_y), otherwise null.
  Statistics* of_z = nullptr;
  // On GPUs only: the gates of the activation, of type Gate; null without an activation.
  void* gates = nullptr;

  // The statistics of what backward sums: z or x.
  SBN_HOST_DEVICE const Statistics* used() const { return of_z ? of_z : statistics; }
};

}  // namespace gluon_syncbn

#endif  // GLUON_SYNCBN_NUMERICS_SHARDS_H_
