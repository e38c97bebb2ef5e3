// The arrays that MXNet hands to the operator: which ones, their shapes and dtypes.
#ifndef GLUON_SYNCBN_MXNET_ARRAYS_H_
#define GLUON_SYNCBN_MXNET_ARRAYS_H_

#include <cstdint>
#include <string>
#include <vector>

#include "numerics/half.h"
#include "numerics/kernels.h"
#include "mxnet/api.h"

namespace gluon_syncbn {

enum Input { kData, kGamma, kBeta, kNumInputs };
enum Output { kOutput, kMean, kInvStd, kNumOutputs };
enum Auxiliary { kRunningMean, kRunningVar, kNumBatches };

// OpReqType of mxnet/op_attr_types.h.
enum Request { kNullOp, kWriteTo, kWriteInplace, kAddTo };

inline Store store_of(int request) { return request == kAddTo ? Store::kAdd : Store::kWrite; }

std::string shape_text(const int* shape, int ndim);

// The axis counted from the front. Throws where the data has no such axis.
int channel_axis(int axis, const int* shape, int ndim);

const char* name_of(DType dtype);

// Of gamma, beta, their gradients and the running statistics; `dtype` is the data's.
inline bool has_double_parameters(DType dtype) { return dtype == DType::kFloat64; }
inline DType dtype_of_parameters(DType dtype) {
  return has_double_parameters(dtype) ? DType::kFloat64 : DType::kFloat32;
}

inline size_t size_of(DType dtype) {
  const bool half = dtype == DType::kFloat16 || dtype == DType::kBFloat16;
  return half ? sizeof(Half) : dtype == DType::kFloat64 ? sizeof(double) : sizeof(float);
}

// Entry c of an array of such a dtype.
double parameter(DType dtype, const void* values, int64_t c);
void write_parameter(DType dtype, void* values, int64_t c, double value, Store how);

// The arrays of one callback, which belong to it: freed at its end, however it ends.
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
  // What errors tell of the data.
  std::string text(int i) const;

  // Zeros, where the request would have written the array, which lies on this GPU, or the CPU: -1.
  void clear(int i, int request, int gpu) const;

  // This array, which now belongs to the caller.
  Handle release(int i);

 private:
  const int* shape(int i, int* ndim) const;

  std::vector<Handle> handles_;
};

}  // namespace gluon_syncbn

#endif  // GLUON_SYNCBN_MXNET_ARRAYS_H_
