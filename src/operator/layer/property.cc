#include "layer/property.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "mxnet/arrays.h"
#include "layer/call.h"
#include "layer/process.h"

namespace gluon_syncbn {
namespace {

using Callback = int (*)(void);

template <typename F>
Callback callback(F* function) {
  // By way of void(), which compilers take for any function.
  return reinterpret_cast<Callback>(reinterpret_cast<void (*)()>(function));
}

// The callbacks of one operator, CustomOpCallbacks of mxnet/c_api.h.
int operator_delete(void* state) {
  delete static_cast<Call*>(state);
  return 1;
}

int operator_forward(int size, void** handles, int*, const int* requests, int is_train,
                     void* state) {
  Arrays arrays(size, handles);
  return static_cast<Call*>(state)->forward(&arrays, requests, is_train != 0);
}

int operator_backward(int size, void** handles, int*, const int* requests, int, void* state) {
  Arrays arrays(size, handles);
  return static_cast<Call*>(state)->backward(&arrays, requests);
}

// The callbacks that say what the operator looks like, CustomOpPropCallbacks of mxnet/c_api.h.
struct Property {
  explicit Property(const Settings& s) : settings(s), layer(process.all_reduce->find(s.layer)) {
    for (void*& context : contexts) context = this;
  }

  Settings settings;
  AllReduce::LayerPtr layer;
  // What infer_shape returns.
  int channels = 0, statistics = 0, one = 1;
  int dependency[4];
  void* contexts[8];
};

int property_delete(void* state) {
  delete static_cast<Property*>(state);
  return 1;
}

template <const char* const* kNames>
int list_names(char*** names, void*) {
  *names = const_cast<char**>(kNames);
  return 1;
}

extern const char* const kInputNames[] = {"data", "gamma", "beta", nullptr};
extern const char* const kOutputNames[] = {"output", "mean", "inv_std", nullptr};
extern const char* const kAuxiliaryNames[] = {"running_mean", "running_var", nullptr};
extern const char* const kCumulativeNames[] = {"running_mean", "running_var", "num_batches_tracked",
                                               nullptr};

int list_auxiliary(char*** names, void* state) {
  return static_cast<Property*>(state)->settings.running.cumulative
             ? list_names<kCumulativeNames>(names, state)
             : list_names<kAuxiliaryNames>(names, state);
}

int infer_shape(int size, int* ndims, int** shapes, void* state) {
  Property* const property = static_cast<Property*>(state);
  if (!property->settings.error.empty()) throw dmlc::Error(property->settings.error);
  if (ndims[kData] <= 0) {
    throw dmlc::Error(
        "SyncBatchNorm has to know the shape of its data before anything else can be inferred, and "
        "a batch without samples has none: do not call the net with it.");
  }
  const int axis = channel_axis(property->settings.axis, shapes[kData], ndims[kData]);
  if (property->settings.virtual_devices && axis == 0) {
    throw dmlc::Error(
        "VirtualBatchNorm shares the samples on axis 0 out to virtual devices, and was made with "
        "axis=" +
        std::to_string(property->settings.axis) + " for data of shape " +
        shape_text(shapes[kData], ndims[kData]) + ". Choose another axis for the channels.");
  }
  property->channels = shapes[kData][axis];
  property->statistics = property->channels;
  if (property->channels > 0)
    property->statistics *= std::max(1, property->settings.virtual_devices);
  for (int i = 0; i < size; ++i) {
    if (i == kData || i == kNumInputs + kOutput) continue;
    if (i == kNumInputs + kMean || i == kNumInputs + kInvStd) {
      ndims[i] = 1;
      shapes[i] = &property->statistics;
      continue;
    }
    if (i == kNumInputs + kNumOutputs + kNumBatches) {
      ndims[i] = 1;
      shapes[i] = &property->one;
      continue;
    }
    const bool known = ndims[i] == 1 && shapes[i][0] > 0;
    if (known && property->channels > 0 && shapes[i][0] != property->channels) {
      throw dmlc::Error(
          "SyncBatchNorm got data of shape " + shape_text(shapes[kData], ndims[kData]) +
          ", which has " + std::to_string(property->channels) + " channels on axis " +
          std::to_string(axis) + ", but its parameters were made for " +
          std::to_string(shapes[i][0]) +
          ". Give it data of that many channels, or set in_channels and axis to fit.");
    }
    ndims[i] = 1;
    shapes[i] = &property->channels;
  }
  ndims[kNumInputs + kOutput] = ndims[kData];
  shapes[kNumInputs + kOutput] = shapes[kData];
  return 1;
}

int infer_type(int size, int* types, void*) {
  constexpr int kUnknown = -1;
  int type = types[kData] != kUnknown ? types[kData] : types[kNumInputs + kOutput];
  for (int i = 0; i < size && type == kUnknown; ++i) {
    if (i != kNumInputs + kMean && i != kNumInputs + kInvStd) type = types[i];
  }
  if (type == kUnknown) return 1;
  const DType data = static_cast<DType>(type);
  if (data != DType::kFloat32 && data != DType::kFloat64 && data != DType::kFloat16 &&
      data != DType::kBFloat16) {
    throw dmlc::Error(
        std::string("SyncBatchNorm takes float16, bfloat16, float32 and float64 data. It got ") +
        name_of(data) + ". Cast the data first.");
  }
  const DType parameters = dtype_of_parameters(data);
  // MXNet's own blocks do not know 'bfloat16'.
  const DType cast = data == DType::kBFloat16 ? parameters : data;
  for (int i = 0; i < size; ++i) {
    const DType expected = i == kNumInputs + kMean || i == kNumInputs + kInvStd ? DType::kFloat64
                           : i == kData || i == kNumInputs + kOutput            ? data
                                                                                : parameters;
    // SymbolBlock.cast() does not know it for what it is, and only training counts.
    if (i == kNumInputs + kNumOutputs + kNumBatches && types[i] != kUnknown) continue;
    if (types[i] != kUnknown && types[i] != static_cast<int>(expected)) {
      throw dmlc::Error(std::string("SyncBatchNorm got data of dtype ") + name_of(data) +
                        ", for which its parameters have to be " + name_of(parameters) +
                        ", and one of them is " + name_of(static_cast<DType>(types[i])) +
                        ". Call cast('" + name_of(cast) + "') on the net.");
    }
    types[i] = static_cast<int>(expected);
  }
  return 1;
}

int backward_dependency(const int* output_gradients, const int* inputs, const int* outputs,
                        int* size, int** needed, void* state) {
  Property* const property = static_cast<Property*>(state);
  // The statistics themselves are kept in the Call, to more digits. `mean` is named so that in a
  // graph whose buffers are used again the next forward, which writes it, waits for this backward.
  const int needs[] = {output_gradients[kOutput], inputs[kData], inputs[kGamma], outputs[kMean]};
  std::memcpy(property->dependency, needs, sizeof(needs));
  *size = 4;
  *needed = property->dependency;
  return 1;
}

int create_operator(const char* context, int, unsigned**, const int*, const int*,
                    CallbackList* result, void* state) {
  static Callback callbacks[] = {callback(operator_delete), callback(operator_forward),
                                 callback(operator_backward)};
  const Property& property = *static_cast<Property*>(state);
  Call* const call = new Call(property.settings, property.layer, context);
  *result = {3, callbacks, call->contexts};
  return 1;
}

}  // namespace

int create_property(const char*, int size, const char** keys, const char** values,
                    CallbackList* result) {
  static Callback callbacks[] = {callback(property_delete),
                                 callback(list_names<kInputNames>),
                                 callback(list_names<kOutputNames>),
                                 callback(list_auxiliary),
                                 callback(infer_shape),
                                 callback(backward_dependency),
                                 callback(create_operator),
                                 callback(infer_type)};
  Property* const property = new Property(Settings(size, keys, values));
  *result = {8, callbacks, property->contexts};
  return 1;
}

}  // namespace gluon_syncbn
