// The part of MXNet 1.9.1's C API that the operator uses, as function pointers from Python.
//
// No C++ object crosses the boundary, as libmxnet was built by GCC 4.8. No header of MXNet is
// needed.
#ifndef GLUON_SYNCBN_MXNET_C_API_H_
#define GLUON_SYNCBN_MXNET_C_API_H_

#include <cstdint>
#include <stdexcept>

// MXNet catches this type by name (dmlc/logging.h) and raises MXNetError.
namespace dmlc {
struct Error : public std::runtime_error {
  using std::runtime_error::runtime_error;
};
}  // namespace dmlc

namespace gluon_syncbn {

using Handle = void*;

// MXCallbackList of mxnet/c_api.h.
struct CallbackList {
  int size;
  int (**callbacks)(void);
  void** contexts;
};

using PropertyCreator = int (*)(const char* op_type, int size, const char** keys,
                                const char** values, CallbackList*);

// Context of mxnet/base.h.
struct Context {
  int device_type;
  int32_t device_id;
};
constexpr Context kCpuContext{1, 0};

// FnProperty of mxnet/engine.h: run even if an array that it depends on holds an error.
constexpr int kNoSkip = 7;
// Run on threads of the engine that belong to no device.
constexpr int kCpuPrioritized = 3;

// In the order of _FUNCTIONS in gluon_syncbn/native/_layer.py.
struct MXNetApi {
  int (*custom_op_register)(const char* op_type, PropertyCreator);
  int (*ndarray_get_data)(Handle, void** data);
  int (*ndarray_get_shape)(Handle, int* ndim, const int** shape);
  int (*ndarray_get_dtype)(Handle, int* dtype);
  int (*ndarray_free)(Handle);
  int (*ndarray_wait_to_read)(Handle);
  int (*engine_push_sync)(void (*run)(void* context, void* argument), void* argument,
                          void (*deleter)(void* argument), const void* context, Handle* read,
                          int num_read, Handle* written, int num_written, const void* property,
                          int priority, const char* name);
  const char* (*last_error)();
};

inline MXNetApi mxnet;

}  // namespace gluon_syncbn

#endif  // GLUON_SYNCBN_MXNET_C_API_H_
