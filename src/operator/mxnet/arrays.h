// The arrays that MXNet passes to the operator: their order, shapes and dtypes.
#ifndef GLUON_SYNCBN_MXNET_ARRAYS_H_
#define GLUON_SYNCBN_MXNET_ARRAYS_H_

#include <cstdint>
#include <string>
#include <vector>

#include "mxnet/c_api.h"
#include "numerics/shards.h"

namespace gluon_syncbn {

// The residual is there only if the operator adds one.
enum Input { kData, kGamma, kBeta, kResidual };
enum Output { kOutput, kMean, kInvStd, kNumOutputs };
enum Auxiliary { kRunningMean, kRunningVar, kNumBatches };

// OpReqType of mxnet/op_attr_types.h.
enum Request { kNullOp, kWriteTo, kWriteInplace, kAddTo };

inline WriteMode write_mode_of(int request) {
  return request == kAddTo ? WriteMode::kAdd : WriteMode::kWrite;
}

std::string shape_text(const int* shape, int ndim);

// The nonnegative index of the axis. Throws if the data has no such axis.
int channel_axis(int axis, const int* shape, int ndim);

const char* name_of(DType dtype);

// The dtype of gamma, beta, their gradients and the running statistics, for data of this dtype.
// Throws if the operator does not support it.
DType dtype_of_parameters(DType dtype);
size_t size_of(DType dtype);

// The arrays of one callback, which owns them.
class Arrays {
 public:
  Arrays(int size, Handle* handles) : handles_(handles, handles + size) {}
  Arrays(const Arrays&) = delete;
  Arrays& operator=(const Arrays&) = delete;
  ~Arrays();

  void* data(int i) const;
  View view(int i, int axis) const;
  // The length of the first axis.
  int64_t samples(int i) const;
  DType dtype(int i) const;
  size_t bytes(int i) const;
  // "data of shape (2, 3)", for errors.
  std::string text(int i) const;

  Handle handle(int i) const { return handles_[static_cast<size_t>(i)]; }

 private:
  const int* shape(int i, int* ndim) const;

  std::vector<Handle> handles_;
};

}  // namespace gluon_syncbn

#endif  // GLUON_SYNCBN_MXNET_ARRAYS_H_
