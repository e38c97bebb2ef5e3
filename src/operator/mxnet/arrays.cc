// Shapes become (N, C, S) here, the only form that kernels know: the axes before that of the
// channels count as N, those after it as S.
#include "mxnet/arrays.h"

#include <stdexcept>
#include <utility>

namespace gluon_syncbn {
namespace {

void check(int status, const char* what) {
  if (status != 0) throw std::runtime_error(std::string("MXNet's ") + what + " failed");
}

View view_of(const int* shape, int ndim, int axis) {
  axis = channel_axis(axis, shape, ndim);
  View view{1, shape[axis], 1};
  for (int i = 0; i < axis; ++i) view.N *= shape[i];
  for (int i = axis + 1; i < ndim; ++i) view.S *= shape[i];
  if (view.S == 1) {
    for (int i = 1; i < axis; ++i) view.R *= shape[i];
  }
  return view;
}

}  // namespace

std::string shape_text(const int* shape, int ndim) {
  std::string text = "(";
  for (int i = 0; i < ndim; ++i) text += (i ? ", " : "") + std::to_string(shape[i]);
  return text + (ndim == 1 ? ",)" : ")");
}

int channel_axis(int axis, const int* shape, int ndim) {
  if (ndim < 2 || ndim > 5) {
    throw dmlc::Error(
        "takes data of 2 to 5 dimensions, such as (N, C) or (N, C, H, W). It got "
        "shape " +
        shape_text(shape, ndim) + ".");
  }
  if (axis < -ndim || axis >= ndim) {
    throw dmlc::Error("was made with axis=" + std::to_string(axis) + ", but its data has shape " +
                      shape_text(shape, ndim) + ". Choose an axis from " + std::to_string(-ndim) +
                      " to " + std::to_string(ndim - 1) + ".");
  }
  return axis < 0 ? axis + ndim : axis;
}

const char* name_of(DType dtype) {
  // mshadow/base.h, in order.
  static const char* const kNames[] = {"float32", "float64", "float16", "uint8",
                                       "int32",   "int8",    "int64",   "bool"};
  const int index = static_cast<int>(dtype);
  if (dtype == DType::kBFloat16) return "bfloat16";
  return index >= 0 && index < 8 ? kNames[index] : "another dtype";
}

DType dtype_of_parameters(DType dtype) {
  try {
    return has_double_parameters(dtype) ? DType::kFloat64 : DType::kFloat32;
  } catch (const std::invalid_argument&) {
    throw dmlc::Error(std::string("takes float16, bfloat16, float32 and float64 data. It got ") +
                      name_of(dtype) + ". Cast the data first.");
  }
}

size_t size_of(DType dtype) {
  return with_dtype(dtype, [](auto zero) { return sizeof(zero); });
}

Arrays::~Arrays() {
  for (Handle handle : handles_) {
    if (handle) mxnet.ndarray_free(handle);
  }
}

void* Arrays::data(int i) const {
  void* pointer = nullptr;
  check(mxnet.ndarray_get_data(handles_[i], &pointer), "MXNDArrayGetData");
  return pointer;
}

View Arrays::view(int i, int axis) const {
  int ndim = 0;
  const int* const sizes = shape(i, &ndim);
  return view_of(sizes, ndim, axis);
}

int64_t Arrays::samples(int i) const {
  int ndim = 0;
  return *shape(i, &ndim);
}

DType Arrays::dtype(int i) const {
  int dtype = -1;
  check(mxnet.ndarray_get_dtype(handles_[i], &dtype), "MXNDArrayGetDType");
  return static_cast<DType>(dtype);
}

std::string Arrays::text(int i) const {
  int ndim = 0;
  const int* const sizes = shape(i, &ndim);
  return "data of shape " + shape_text(sizes, ndim);
}

size_t Arrays::bytes(int i) const {
  int ndim = 0;
  const int* const sizes = shape(i, &ndim);
  size_t bytes = size_of(dtype(i));
  for (int axis = 0; axis < ndim; ++axis) bytes *= static_cast<size_t>(sizes[axis]);
  return bytes;
}

const int* Arrays::shape(int i, int* ndim) const {
  const int* sizes = nullptr;
  check(mxnet.ndarray_get_shape(handles_[i], ndim, &sizes), "MXNDArrayGetShapeEx");
  return sizes;
}

}  // namespace gluon_syncbn
