// The operator GluonSyncBatchNorm as MXNet sees it: an Operator names the arrays of a node and
// infers their shapes and dtypes, and makes a Call for each device, whose forward and backward
// MXNet calls later. Wrong shapes and dtypes are errors here, before anything runs.
//
//   data, gamma, beta, residual if there is one -> output, mean, inv_std
//   auxiliary: running_mean, running_var, and with momentum=None num_batches_tracked (1,)
//
// mean and inv_std have a row of C values for each virtual device, usually one.
#include <algorithm>
#include <string>
#include <vector>

#include "call/call.h"
#include "call/globals.h"
#include "mxnet/arrays.h"

namespace gluon_syncbn {
namespace {

using Callback = int (*)(void);

template <typename F>
Callback callback(F* function) {
  // Via void (*)(), to which compilers allow casts of any function without a warning.
  return reinterpret_cast<Callback>(reinterpret_cast<void (*)()>(function));
}

// The callbacks of one call, CustomOpCallbacks of mxnet/c_api.h.
int delete_call(void* state) {
  delete static_cast<Call*>(state);
  return 1;
}

int forward(int size, void** handles, int*, const int* requests, int is_train, void* state) {
  Arrays arrays(size, handles);
  return static_cast<Call*>(state)->forward(&arrays, requests, is_train != 0);
}

int backward(int size, void** handles, int*, const int* requests, int, void* state) {
  Arrays arrays(size, handles);
  return static_cast<Call*>(state)->backward(&arrays, requests);
}

// One node, or one imperative call, and its callbacks, CustomOpPropCallbacks of mxnet/c_api.h.
struct Operator {
  explicit Operator(const Attributes& a) : attributes(a), layer(globals.rendezvous->find(a.layer)) {
    for (void*& context : contexts) context = this;
  }

  // Whether array i of infer_shape and infer_type has the shape and the dtype of the data.
  bool is_data(int i) const {
    return i == kData || i == attributes.inputs() + kOutput ||
           (i == kResidual && attributes.residual);
  }
  bool is_statistic(int i) const {
    return i == attributes.inputs() + kMean || i == attributes.inputs() + kInvStd;
  }

  const Attributes attributes;
  const LayerPtr layer;
  // Memory for the results of callbacks.
  int channels = 0, statistics = 0, one = 1, needed[6];
  void* contexts[8];
};

int delete_operator(void* state) {
  delete static_cast<Operator*>(state);
  return 1;
}

template <const char* const* kNames>
int list_names(char*** names, void*) {
  *names = const_cast<char**>(kNames);
  return 1;
}

extern const char* const kInputNames[] = {"data", "gamma", "beta", nullptr};
extern const char* const kResidualNames[] = {"data", "gamma", "beta", "residual", nullptr};
extern const char* const kOutputNames[] = {"output", "mean", "inv_std", nullptr};
extern const char* const kAuxiliaryNames[] = {"running_mean", "running_var", nullptr};
extern const char* const kCumulativeNames[] = {"running_mean", "running_var", "num_batches_tracked",
                                               nullptr};

int list_inputs(char*** names, void* state) {
  return static_cast<Operator*>(state)->attributes.residual
             ? list_names<kResidualNames>(names, state)
             : list_names<kInputNames>(names, state);
}

int list_auxiliary(char*** names, void* state) {
  return static_cast<Operator*>(state)->attributes.running.cumulative
             ? list_names<kCumulativeNames>(names, state)
             : list_names<kAuxiliaryNames>(names, state);
}

void check_residual(const int* shape, int ndim, const int* residual, int residual_ndim) {
  const auto is_known = [](const int* sizes, int n) {
    return n > 0 && std::all_of(sizes, sizes + n, [](int each) { return each > 0; });
  };
  if (is_known(shape, ndim) && is_known(residual, residual_ndim) &&
      !std::equal(shape, shape + ndim, residual, residual + residual_ndim)) {
    throw dmlc::Error("got data of shape " + shape_text(shape, ndim) + " and a residual of shape " +
                      shape_text(residual, residual_ndim) +
                      ". Give it a residual of the shape of the data.");
  }
}

// Calls f. Errors get the class of the block and the layer before them.
template <typename F>
int with_name(const Operator* op, const F& f) {
  try {
    f();
    return 1;
  } catch (const dmlc::Error& error) {
    const std::string layer =
        op->layer ? " '" + globals.rendezvous->config(op->layer).name + "'" : "";
    throw dmlc::Error(op->attributes.block_name() + layer + " " + error.what());
  }
}

void check_shapes(Operator* op, int size, int* ndims, int** shapes) {
  if (!op->attributes.error.empty()) throw dmlc::Error(op->attributes.error);
  if (ndims[kData] <= 0) {
    throw dmlc::Error(
        "does not know the shape of its data, which only operators after it may tell: give the "
        "shapes of more inputs, as in mx.sym.var('x', shape=(2, 3)).");
  }
  const int axis = channel_axis(op->attributes.axis, shapes[kData], ndims[kData]);
  if (op->attributes.virtual_devices && axis == 0) {
    throw dmlc::Error(
        "divides the samples on axis 0 among virtual devices, and was made with "
        "axis=" +
        std::to_string(op->attributes.axis) + " for data of shape " +
        shape_text(shapes[kData], ndims[kData]) + ". Choose another axis for the channels.");
  }
  op->channels = shapes[kData][axis];
  op->statistics = op->channels;
  if (op->channels > 0) op->statistics *= std::max(1, op->attributes.virtual_devices);
  const int outputs = op->attributes.inputs();
  for (int i = 0; i < size; ++i) {
    if (i == kData) continue;
    if (op->is_data(i)) {
      if (i < outputs) check_residual(shapes[kData], ndims[kData], shapes[i], ndims[i]);
      ndims[i] = ndims[kData];
      shapes[i] = shapes[kData];
      continue;
    }
    if (op->is_statistic(i)) {
      ndims[i] = 1;
      shapes[i] = &op->statistics;
      continue;
    }
    if (i == outputs + kNumOutputs + kNumBatches) {
      ndims[i] = 1;
      shapes[i] = &op->one;
      continue;
    }
    const bool known = ndims[i] == 1 && shapes[i][0] > 0;
    if (known && op->channels > 0 && shapes[i][0] != op->channels) {
      throw dmlc::Error(
          "got data of shape " + shape_text(shapes[kData], ndims[kData]) + ", which has " +
          std::to_string(op->channels) + " channels on axis " + std::to_string(axis) +
          ", but its parameters were made for " + std::to_string(shapes[i][0]) +
          ". Give it data of that many channels, or set in_channels and axis to fit.");
    }
    ndims[i] = 1;
    shapes[i] = &op->channels;
  }
}

int infer_shape(int size, int* ndims, int** shapes, void* state) {
  Operator* const op = static_cast<Operator*>(state);
  return with_name(op, [&] { check_shapes(op, size, ndims, shapes); });
}

void check_types(const Operator& op, int size, int* types) {
  constexpr int kUnknown = -1;
  const int outputs = op.attributes.inputs();
  int type = types[kData] != kUnknown ? types[kData] : types[outputs + kOutput];
  for (int i = 0; i < size && type == kUnknown; ++i) {
    if (!op.is_statistic(i)) type = types[i];
  }
  if (type == kUnknown) return;
  const DType data = static_cast<DType>(type);
  const DType parameters = dtype_of_parameters(data);
  // MXNet's own blocks do not know 'bfloat16'.
  const DType cast = data == DType::kBFloat16 ? parameters : data;
  for (int i = 0; i < size; ++i) {
    const DType expected = op.is_statistic(i) ? DType::kFloat64 : op.is_data(i) ? data : parameters;
    // SymbolBlock.cast() casts the count too, and only training uses it.
    if (i == outputs + kNumOutputs + kNumBatches && types[i] != kUnknown) continue;
    if (types[i] != kUnknown && types[i] != static_cast<int>(expected)) {
      throw dmlc::Error(std::string("got data of dtype ") + name_of(data) + ", for which " +
                        (op.is_data(i) ? "a residual must be " : "its parameters must be ") +
                        name_of(expected) + ", and one of them is " +
                        name_of(static_cast<DType>(types[i])) + ". Call cast('" + name_of(cast) +
                        "') on the net.");
    }
    types[i] = static_cast<int>(expected);
  }
}

int infer_type(int size, int* types, void* state) {
  const Operator* const op = static_cast<Operator*>(state);
  return with_name(op, [&] { check_types(*op, size, types); });
}

int backward_dependency(const int* output_gradients, const int* inputs, const int* outputs,
                        int* size, int** needed, void* state) {
  Operator* const op = static_cast<Operator*>(state);
  // Call keeps the statistics itself, in higher precision. `mean` is listed so that in a graph that
  // reuses its buffers the next forward, which writes it, waits for this backward.
  std::vector<int> needs{output_gradients[kOutput], inputs[kGamma], outputs[kMean]};
  if (op->attributes.needs_x()) needs.push_back(inputs[kData]);
  if (op->attributes.needs_beta()) needs.push_back(inputs[kBeta]);
  if (op->attributes.needs_y()) needs.push_back(outputs[kOutput]);
  *size = static_cast<int>(needs.size());
  std::copy(needs.begin(), needs.end(), op->needed);
  *needed = op->needed;
  return 1;
}

int create_call(const char* context, int, unsigned**, const int*, const int*, CallbackList* result,
                void* state) {
  static Callback callbacks[] = {callback(delete_call), callback(forward), callback(backward)};
  const Operator& op = *static_cast<Operator*>(state);
  Call* const call = new Call(op.attributes, op.layer, context);
  *result = {3, callbacks, call->contexts};
  return 1;
}

}  // namespace

int create_operator(const char*, int size, const char** keys, const char** values,
                    CallbackList* result) {
  static Callback callbacks[] = {
      callback(delete_operator), callback(list_inputs), callback(list_names<kOutputNames>),
      callback(list_auxiliary),  callback(infer_shape), callback(backward_dependency),
      callback(create_call),     callback(infer_type)};
  Operator* const op = new Operator(Attributes(size, keys, values));
  *result = {8, callbacks, op->contexts};
  return 1;
}

}  // namespace gluon_syncbn
