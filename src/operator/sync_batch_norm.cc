// The operator GluonSyncBatchNorm: MXNet's callbacks, shapes, types, requests and errors.
//
//   data, gamma, beta -> output, mean, inv_std
//   auxiliary: running_mean, running_var, and with momentum=None num_batches_tracked (1,)
//
// mean and inv_std have a row of C values for each virtual device, of which there mostly is one.
//
// Each forward and backward runs on a thread of its own, made by MXNet for custom operators, so
// waiting for the other devices blocks nobody.
#include "sync_batch_norm.h"

#include <signal.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <locale>
#include <memory>
#include <mutex>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "all_reduce.h"
#include "kernels.h"
#include "mxnet_api.h"
#include "passes_cuda.h"
#include "running_statistics.h"
#include "stores.h"
#include "thread_pool.h"
#include "watch.h"

namespace gluon_syncbn {
namespace {

std::string this_process;
bool naive_engine = false;
bool onednn = false;

// What an exchange between processes has to say at most.
constexpr int kMostErrorText = 1 << 13;

// Never destroyed: calls may still wait in it when the process ends.
AllReduce* all_reduce = nullptr;
RunningStates* running_states = nullptr;
std::atomic<int64_t> call_count{0};

void check(int status, const char* what) {
  if (status != 0) throw std::runtime_error(std::string("MXNet's ") + what + " failed");
}

enum Input { kData, kGamma, kBeta, kNumInputs };
enum Output { kOutput, kMean, kInvStd, kNumOutputs };
enum Auxiliary { kRunningMean, kRunningVar, kNumBatches };

// OpReqType of mxnet/op_attr_types.h.
enum Request { kNullOp, kWriteTo, kWriteInplace, kAddTo };

// As MXNet's executor asks when it is bound.
bool mirrors() {
  const char* const set = std::getenv("MXNET_BACKWARD_DO_MIRROR");
  return set && std::atoi(set) != 0;
}

Store store_of(int request) { return request == kAddTo ? Store::kAdd : Store::kWrite; }

struct Settings {
  int64_t layer = -1;
  double epsilon = 1e-5;
  RunningRule running;
  int axis = 1;
  bool fix_gamma = false;
  bool use_global_stats = false;
  // Traced for GPUs: without the gate that oneDNN's layouts ask for on the CPU.
  bool gpu_only = false;
  // Which of the layer's nodes in graphs this is; imperative calls have none.
  int64_t place = -1;
  // Into how many chunks a batch is cut, each with statistics of its own; 0: the batch is a part of
  // one that all devices have.
  int virtual_devices = 0;
  // The user asks MXNet's executor to compute the node a second time before the backward.
  bool force_mirroring = false;
  // What could not be read. It is told later: MXNet crashes when an error comes where settings are
  // read.
  std::string error;

  Settings(int size, const char** keys, const char** values) {
    bool foreign = false;
    for (int i = 0; i < size; ++i) {
      const std::string key = keys[i], value = values[i];
      if (key == "layer") read(key, value, &layer);
      if (key == "epsilon") read(key, value, &epsilon);
      if (key == "momentum") {
        running.cumulative = value == "None";
        if (!running.cumulative) read(key, value, &running.momentum);
      }
      if (key == "axis") read(key, value, &axis);
      if (key == "place") read(key, value, &place);
      if (key == "virtual_devices") read(key, value, &virtual_devices);
      if (key == "unbiased") running.unbiased = value == "True";
      if (key == "fix_gamma") fix_gamma = value == "True";
      if (key == "use_global_stats") use_global_stats = value == "True";
      if (key == "gpu_only") gpu_only = value == "True";
      if (key == "__force_mirroring__") force_mirroring = true;
      if (key == "process") foreign = value != this_process;
    }
    // In a graph that another process made, numbers stand for other layers.
    if (foreign) layer = -1;
  }

 private:
  template <typename T>
  void read(const std::string& key, const std::string& text, T* value) {
    std::istringstream stream(text);
    stream.imbue(std::locale::classic());
    if (!(stream >> *value) || !stream.eof()) {
      error = "SyncBatchNorm cannot read " + key + "=" + text + ": it has to be a number.";
    }
  }
};

std::string shape_text(const int* shape, int ndim) {
  std::string text = "(";
  for (int i = 0; i < ndim; ++i) text += (i ? ", " : "") + std::to_string(shape[i]);
  return text + (ndim == 1 ? ",)" : ")");
}

// The axis counted from the front. Throws where the data has no such axis.
int channel_axis(int axis, const int* shape, int ndim) {
  if (ndim < 2 || ndim > 5) {
    throw dmlc::Error(
        "SyncBatchNorm takes data of 2 to 5 dimensions, such as (N, C) or (N, C, H, W). It got "
        "shape " +
        shape_text(shape, ndim) + ".");
  }
  if (axis < -ndim || axis >= ndim) {
    throw dmlc::Error("SyncBatchNorm was made with axis=" + std::to_string(axis) +
                      ", but its data has shape " + shape_text(shape, ndim) +
                      ". Choose an axis from " + std::to_string(-ndim) + " to " +
                      std::to_string(ndim - 1) + ".");
  }
  return axis < 0 ? axis + ndim : axis;
}

View view_of(const int* shape, int ndim, int axis) {
  axis = channel_axis(axis, shape, ndim);
  View view{1, shape[axis], 1};
  for (int i = 0; i < axis; ++i) view.N *= shape[i];
  for (int i = axis + 1; i < ndim; ++i) view.S *= shape[i];
  if (view.S == 1) {
    for (int i = 1; i < axis; ++i) view.R *= shape[i];
  }
  if (view.size() == 0) {
    throw std::runtime_error(
        "data of shape " + shape_text(shape, ndim) +
        " holds no values. Leave a device without data out of the step, within "
        "gluon_syncbn.participants.");
  }
  return view;
}

const char* name_of(DType dtype) {
  // mshadow/base.h, in order.
  static const char* const kNames[] = {"float32", "float64", "float16", "uint8",
                                       "int32",   "int8",    "int64",   "bool"};
  const int number = static_cast<int>(dtype);
  if (dtype == DType::kBFloat16) return "bfloat16";
  return number >= 0 && number < 8 ? kNames[number] : "another dtype";
}

// Of gamma, beta, their gradients and the running statistics; `dtype` is the data's.
bool has_double_parameters(DType dtype) { return dtype == DType::kFloat64; }

size_t size_of(DType dtype) {
  const bool half = dtype == DType::kFloat16 || dtype == DType::kBFloat16;
  return half ? sizeof(Half) : dtype == DType::kFloat64 ? sizeof(double) : sizeof(float);
}

// The arrays of one callback, which belong to it: freed at its end, however it ends.
class Arrays {
 public:
  Arrays(int size, Handle* handles) : handles_(handles, handles + size) {}
  Arrays(const Arrays&) = delete;
  Arrays& operator=(const Arrays&) = delete;
  ~Arrays() {
    for (Handle handle : handles_) mxnet.ndarray_free(handle);
  }

  void* data(int i) const {
    void* pointer = nullptr;
    check(mxnet.ndarray_get_data(handles_[i], &pointer), "MXNDArrayGetData");
    return pointer;
  }

  View view(int i, int axis) const {
    int ndim = 0;
    const int* const sizes = shape(i, &ndim);
    return view_of(sizes, ndim, axis);
  }

  // The length of the first axis.
  int64_t samples(int i) const {
    int ndim = 0;
    return *shape(i, &ndim);
  }

  DType dtype(int i) const {
    int dtype = -1;
    check(mxnet.ndarray_get_dtype(handles_[i], &dtype), "MXNDArrayGetDType");
    return static_cast<DType>(dtype);
  }

  // Zeros, where the request would have written the array, which lies on this GPU, or the CPU: -1.
  void clear(int i, int request, int gpu) const {
    if (request != kWriteTo && request != kWriteInplace) return;
    int ndim = 0;
    const int* const sizes = shape(i, &ndim);
    size_t bytes = size_of(dtype(i));
    for (int axis = 0; axis < ndim; ++axis) bytes *= static_cast<size_t>(sizes[axis]);
    if (gpu < 0) {
      std::memset(data(i), 0, bytes);
    } else {
      clear_on_gpu(gpu, data(i), bytes);
    }
  }

  // What errors tell of the data.
  std::string text(int i) const {
    int ndim = 0;
    const int* const sizes = shape(i, &ndim);
    return "data of shape " + shape_text(sizes, ndim);
  }

  // Whoever waits for what this call writes gets an MXNetError of this text. (Throwing it here
  // would do the same, but MXNet keeps what custom operators throw in one variable for all of them:
  // of two that fail together, one could be lost.)
  void poison(int written, const std::string& text) {
    check(mxnet.engine_push_sync(
              [](void*, void* what) { throw dmlc::Error(*static_cast<std::string*>(what)); },
              new std::string(text), [](void* what) { delete static_cast<std::string*>(what); },
              &kCpuContext, nullptr, 0, &handles_[written], 1, nullptr, 0, "SyncBatchNormError"),
          "MXEnginePushSyncND");
  }

 private:
  const int* shape(int i, int* ndim) const {
    const int* sizes = nullptr;
    check(mxnet.ndarray_get_shape(handles_[i], ndim, &sizes), "MXNDArrayGetShapeEx");
    return sizes;
  }

  std::vector<Handle> handles_;
};

double parameter(DType dtype, const void* values, int64_t c) {
  return has_double_parameters(dtype) ? static_cast<const double*>(values)[c]
                                      : static_cast<const float*>(values)[c];
}

void write_parameter(DType dtype, void* values, int64_t c, double value,
                     Store how = Store::kWrite) {
  if (how == Store::kAdd) value += parameter(dtype, values, c);
  if (has_double_parameters(dtype)) {
    static_cast<double*>(values)[c] = value;
  } else {
    static_cast<float*>(values)[c] = static_cast<float>(value);
  }
}

// One node of a graph on one device, or one imperative call: what its backward has to know of its
// forward.
class Call {
 public:
  Call(const Settings& settings, const AllReduce::LayerPtr& layer, const char* context)
      : settings_(settings),
        layer_(layer),
        device_(context),
        gpu_(gpu_of(device_)),
        number_(call_count++),
        recomputes_(settings.place >= 0 && (settings.force_mirroring || mirrors())),
        running_(running_states->of(settings.layer, device_)) {
    for (void*& self : contexts) self = this;
  }

  // For the callbacks: one for each of them.
  void* contexts[3];

  void forward(const Arrays& arrays, const int* request, bool is_train) {
    check_device();
    const int outputs = kNumInputs, running = kNumInputs + kNumOutputs;
    const DType dtype = arrays.dtype(kData);
    const Kernels& kernels = cpu_kernels(dtype);
    const bool wanted = request[kOutput] != kNullOp;
    const ForwardPart part{arrays.view(kData, settings_.axis),
                           arrays.data(kData),
                           gamma(arrays.data(kGamma)),
                           arrays.data(kBeta),
                           wanted ? arrays.data(outputs + kOutput) : nullptr,
                           store_of(request[kOutput])};

    // A backward finds none after a forward that fails.
    batches_.clear();
    from_batch_ = is_train && !settings_.use_global_stats;
    std::vector<BatchPtr> batches;
    if (gpu_ >= 0) {
      batches_ = forward_by_cuda(arrays, request, part);
      return;
    }
    if (!from_batch_) {
      batches.push_back(given_batch(dtype, part.view.C, arrays.data(running + kRunningMean),
                                    arrays.data(running + kRunningVar)));
      forward_alone(kernels, part, *batches[0]);
    } else if (settings_.virtual_devices) {
      for (const Chunk& chunk : chunks(arrays.samples(kData))) {
        const ForwardPart own = chunk.of(part, dtype);
        batches.push_back(forward_together(kernels, {&own}, settings_.epsilon));
      }
    } else {
      check_engine();
      ticket_ = all_reduce->next_ticket(layer_, device_, settings_.place);
      batches.push_back(meet_forward(kernels, dtype, part));
    }
    if (from_batch_) {
      update_running(dtype, batches,
                     {arrays.data(running + kRunningMean), arrays.data(running + kRunningVar),
                      settings_.running.cumulative ? arrays.data(running + kNumBatches) : nullptr});
    }

    batches_ = std::move(batches);
    write_statistics(arrays, outputs + kMean, request[kMean], &Statistics::mean);
    write_statistics(arrays, outputs + kInvStd, request[kInvStd], &Statistics::inv_std);
  }

  void backward(const Arrays& arrays, const int* request) {
    check_device();
    const int data = kNumOutputs + kData;
    const int gradients = kNumOutputs + kNumInputs + kNumOutputs;
    const DType dtype = arrays.dtype(data);
    const Kernels& kernels = cpu_kernels(dtype);
    // Also a device that wants no dx has to meet the others: they may.
    const bool wanted = request[kData] != kNullOp;
    const View view = arrays.view(data, settings_.axis);
    if (batches_.empty() || static_cast<int64_t>(batches_[0]->channels.size()) != view.C) {
      throw Error(title() + " goes backward through a forward that has failed.");
    }
    if (recomputes_) running_->goes_backward(settings_.place, number_);
    std::vector<ChannelSums> sums(view.C);
    const BackwardPart part{view,
                            arrays.data(kOutput),
                            arrays.data(data),
                            gamma(arrays.data(kNumOutputs + kGamma)),
                            wanted ? arrays.data(gradients + kData) : nullptr,
                            store_of(request[kData]),
                            sums.data()};
    if (gpu_ >= 0) return backward_by_cuda(arrays, request, part);

    // Of this device alone: the Trainer adds them over the devices.
    std::vector<double> dgamma(view.C), dbeta(view.C);
    const auto add_to_parameters = [&](const Batch& batch) {
      for (int64_t c = 0; c < view.C; ++c) {
        dgamma[c] += sums[c].second.value() * batch.channels[c].inv_std;
        dbeta[c] += sums[c].first.value();
      }
    };
    if (!from_batch_) {
      const Statistics* const constant = batches_[0]->channels.data();
      kernels.backward_sums(view, part.dy, part.x, constant, sums.data());
      add_to_parameters(*batches_[0]);
      if (wanted) {
        kernels.backward_constant(view, part.dy, constant, part.gamma, part.dx, part.store);
      }
    } else if (settings_.virtual_devices) {
      const std::vector<Chunk> cut = chunks(arrays.samples(data));
      for (size_t i = 0; i < cut.size(); ++i) {
        const BackwardPart chunk = cut[i].of(part, dtype);
        kernels.backward_together({&chunk}, batches_[i]->channels.data());
        add_to_parameters(*batches_[i]);
      }
    } else {
      meet_backward(kernels, dtype, part);
      add_to_parameters(*batches_[0]);
    }
    write_channels(arrays, gradients + kGamma, request[kGamma], dtype, view.C,
                   [&](int64_t c) { return settings_.fix_gamma ? 0 : dgamma[c]; });
    write_channels(arrays, gradients + kBeta, request[kBeta], dtype, view.C,
                   [&](int64_t c) { return dbeta[c]; });
  }

  // Runs a callback's work. Its errors become those of the three arrays it writes, from `written`
  // on, and of everyone who waits for this device.
  template <typename F>
  int run(Arrays* arrays, int written, const int* requests, const F& work) {
    std::string text;
    try {
      work();
      return 1;
    } catch (const Error& error) {
      text = error.what();
    } catch (const std::exception& error) {
      text = title() + ": " + error.what();
      all_reduce->fail(layer_, text);
    }
    // MXNet's naive engine has no such arrays: there an exception goes straight up to the caller.
    if (naive_engine) throw dmlc::Error(text);
    // Once one result was waited for, MXNet takes the error for told and goes on with what it finds
    // in the others.
    for (int i = 0; i < 3 && has_kernels(); ++i) arrays->clear(written + i, requests[i], gpu_);
    arrays->poison(written, text);
    return 1;
  }

 private:
  // What one device brings to a meeting whose last arrival runs the passes for all.
  template <typename KernelPart>
  struct Work : Part {
    const KernelPart* kernel;
    DType dtype;
    BatchPtr batch;
  };

  // What a virtual device has of a batch: samples begin..end, which lie together.
  struct Chunk {
    int64_t begin, end, samples;

    ForwardPart of(ForwardPart part, DType dtype) const {
      part.x = from(part.view, part.x, dtype);
      part.y = from(part.view, part.y, dtype);
      part.view = of(part.view);
      return part;
    }

    BackwardPart of(BackwardPart part, DType dtype) const {
      part.dy = from(part.view, part.dy, dtype);
      part.x = from(part.view, part.x, dtype);
      part.dx = from(part.view, part.dx, dtype);
      part.view = of(part.view);
      return part;
    }

   private:
    View of(View view) const {
      view.N = view.N / samples * (end - begin);
      return view;
    }

    // Null stays null.
    const void* from(View view, const void* values, DType dtype) const {
      const size_t bytes = static_cast<size_t>(view.size() / samples * begin) * size_of(dtype);
      return values ? static_cast<const char*>(values) + bytes : nullptr;
    }
    void* from(View view, void* values, DType dtype) const {
      return const_cast<void*>(from(view, static_cast<const void*>(values), dtype));
    }
  };

  // As many as there are virtual devices; the first are larger by one where they do not share the
  // samples evenly.
  std::vector<Chunk> chunks(int64_t samples) const {
    const int64_t count = settings_.virtual_devices;
    if (samples < count) {
      throw std::runtime_error(
          "VirtualBatchNorm was made with virtual_devices=" + std::to_string(count) +
          ", and its data has " + std::to_string(samples) +
          " samples. Give each virtual device one at least.");
    }
    std::vector<Chunk> result;
    const int64_t size = samples / count, larger = samples % count;
    for (int64_t i = 0, begin = 0; i < count; ++i) {
      const int64_t end = begin + size + (i < larger ? 1 : 0);
      result.push_back({begin, end, samples});
      begin = end;
    }
    return result;
  }

  BatchPtr given_batch(DType dtype, int64_t channels, const void* mean, const void* var) const {
    Batch batch{std::vector<Statistics>(channels)};
    for (int64_t c = 0; c < channels; ++c) {
      batch.channels[c] =
          given_statistics(parameter(dtype, mean, c), parameter(dtype, var, c), settings_.epsilon);
    }
    return std::make_shared<const Batch>(std::move(batch));
  }

  static void forward_alone(const Kernels& kernels, const ForwardPart& p, const Batch& batch) {
    if (p.y) kernels.forward(p.view, p.x, batch.channels.data(), p.gamma, p.beta, p.y, p.store);
  }

  // y of all parts, and their statistics.
  static BatchPtr forward_together(const Kernels& kernels,
                                   const std::vector<const ForwardPart*>& parts, double epsilon) {
    Batch batch{std::vector<Statistics>(parts[0]->view.C)};
    for (const ForwardPart* part : parts) {
      batch.count += static_cast<double>(part->view.N * part->view.S);
    }
    kernels.forward_together(parts, epsilon, batch.channels.data());
    return std::make_shared<const Batch>(std::move(batch));
  }

  template <typename KernelPart>
  static std::vector<const KernelPart*> kernel_parts(const std::vector<Part*>& parts) {
    std::vector<const KernelPart*> result;
    const auto* const first = static_cast<const Work<KernelPart>*>(parts[0]);
    for (const Part* part : parts) {
      const auto* const work = static_cast<const Work<KernelPart>*>(part);
      if (work->dtype != first->dtype) {
        throw std::runtime_error(std::string("one device has ") + name_of(first->dtype) +
                                 " data, another " + name_of(work->dtype) + ". Cast the data.");
      }
      result.push_back(work->kernel);
    }
    return result;
  }

  // y and the statistics of the batch, with all devices.
  BatchPtr meet_forward(const Kernels& kernels, DType dtype, const ForwardPart& part) {
    const int64_t channels = part.view.C;
    if (!all_reduce->shares_memory(layer_)) {
      std::vector<ChannelSums> sums(channels);
      Batch batch{std::vector<Statistics>(channels)};
      batch.count = static_cast<double>(part.view.N * part.view.S);
      kernels.forward_sums(part.view, part.x, sums.data());
      all_reduce->reduce(layer_, ticket_, Direction::kForward, device_, &sums, &batch.count);
      for (int64_t c = 0; c < channels; ++c) {
        batch.channels[c] = batch_statistics(sums[c], batch.count, settings_.epsilon);
      }
      forward_alone(kernels, part, batch);
      return std::make_shared<const Batch>(std::move(batch));
    }
    Work<ForwardPart> work{{channels}, &part, dtype, nullptr};
    all_reduce->meet(
        layer_, ticket_, Direction::kForward, device_, &work, [&](const std::vector<Part*>& parts) {
          const BatchPtr batch =
              forward_together(kernels, kernel_parts<ForwardPart>(parts), settings_.epsilon);
          for (Part* p : parts) static_cast<Work<ForwardPart>*>(p)->batch = batch;
        });
    return work.batch;
  }

  // dx, and the sums of this device alone, with all devices.
  void meet_backward(const Kernels& kernels, DType dtype, const BackwardPart& part) {
    const int64_t channels = part.view.C;
    const Statistics* const statistics = batches_[0]->channels.data();
    if (!all_reduce->shares_memory(layer_)) {
      kernels.backward_sums(part.view, part.dy, part.x, statistics, part.sums);
      std::vector<ChannelSums> sums(part.sums, part.sums + channels);
      double count = static_cast<double>(part.view.N * part.view.S);
      all_reduce->reduce(layer_, ticket_, Direction::kBackward, device_, &sums, &count);
      if (part.dx) {
        kernels.backward(part.view, part.dy, part.x, statistics, part.gamma, sums.data(), count,
                         part.dx, part.store);
      }
      return;
    }
    Work<BackwardPart> work{{channels}, &part, dtype, nullptr};
    all_reduce->meet(layer_, ticket_, Direction::kBackward, device_, &work,
                     [&](const std::vector<Part*>& parts) {
                       kernels.backward_together(kernel_parts<BackwardPart>(parts), statistics);
                     });
  }

  std::string title() const {
    return "SyncBatchNorm" + (layer_ ? " '" + all_reduce->name(layer_) + "'" : "") + " on " +
           device_;
  }

  const void* gamma(const void* values) const { return settings_.fix_gamma ? nullptr : values; }

  // The parts of a batch that have statistics of their own: chunks of virtual devices, or the
  // whole.
  template <typename KernelPart>
  std::vector<KernelPart> parts_of(const KernelPart& whole, DType dtype, int64_t samples) const {
    if (!from_batch_ || !settings_.virtual_devices) return {whole};
    std::vector<KernelPart> parts;
    for (const Chunk& chunk : chunks(samples)) parts.push_back(chunk.of(whole, dtype));
    return parts;
  }

  // Brings this device's sums to the others.
  Meet meet_by_cuda(Direction direction, int64_t channels) {
    if (!from_batch_ || settings_.virtual_devices) return nullptr;
    return [=](ChannelSums* sums, double* count) {
      std::vector<ChannelSums> all(sums, sums + channels);
      all_reduce->reduce(layer_, ticket_, direction, device_, &all, count);
      std::copy(all.begin(), all.end(), sums);
    };
  }

  std::vector<BatchPtr> forward_by_cuda(const Arrays& arrays, const int* request,
                                        const ForwardPart& whole) {
    const int outputs = kNumInputs, running = kNumInputs + kNumOutputs;
    const DType dtype = arrays.dtype(kData);
    if (from_batch_ && !settings_.virtual_devices) {
      check_engine();
      ticket_ = all_reduce->next_ticket(layer_, device_, settings_.place);
    }
    const auto result = [&](int output) {
      return Result{request[output] == kNullOp ? nullptr : arrays.data(outputs + output),
                    request[output] == kAddTo};
    };
    return forward_on_gpu(
        {gpu_,
         dtype,
         arrays.text(kData),
         settings_.epsilon,
         parts_of(whole, dtype, arrays.samples(kData)),
         from_batch_,
         meet_by_cuda(Direction::kForward, whole.view.C),
         {arrays.data(running + kRunningMean), arrays.data(running + kRunningVar),
          settings_.running.cumulative ? arrays.data(running + kNumBatches) : nullptr},
         [&](const std::vector<BatchPtr>& batches, void* const(&on_host)[3]) {
           return update_running(dtype, batches, on_host);
         },
         result(kMean),
         result(kInvStd),
         std::max(1, settings_.virtual_devices)});
  }

  void backward_by_cuda(const Arrays& arrays, const int* request, const BackwardPart& whole) {
    const int data = kNumOutputs + kData, gradients = kNumOutputs + kNumInputs + kNumOutputs;
    const DType dtype = arrays.dtype(data);
    const auto result = [&](int input) {
      return Result{request[input] == kNullOp ? nullptr : arrays.data(gradients + input),
                    request[input] == kAddTo};
    };
    backward_on_gpu({gpu_, dtype, arrays.text(data), parts_of(whole, dtype, arrays.samples(data)),
                     batches_, from_batch_, meet_by_cuda(Direction::kBackward, whole.view.C),
                     result(kGamma), result(kBeta)});
  }

  bool has_kernels() const { return gpu_ < 0 || cuda_backend(); }

  // Whether there are kernels for the device, and a graph that fits it.
  void check_device() const {
    if (!has_kernels()) {
      throw std::runtime_error(
          "this build has kernels for the CPU alone. Use CPU contexts, or build it again where "
          "nvcc is: GLUON_SYNCBN_CUDA=1 pip install --force-reinstall --no-deps .");
    }
    if (gpu_ >= 0) return;
    if (onednn && settings_.gpu_only) {
      throw std::runtime_error(
          "the graph was traced for GPUs. Call net.hybridize() again after the net was moved to "
          "another kind of device.");
    }
  }

  void check_engine() const {
    if (naive_engine && all_reduce->participants(layer_) > 1) {
      throw Error(
          "SyncBatchNorm cannot meet other devices under MXNET_ENGINE_TYPE=NaiveEngine, where one "
          "call has to end before the next begins. Use one device, or unset MXNET_ENGINE_TYPE.");
    }
  }

  // The running statistics: mean, variance, and the number of batches or null. Returns whether they
  // have changed.
  bool update_running(DType dtype, const std::vector<BatchPtr>& batches,
                      void* const (&running)[3]) {
    if (recomputes_ && running_->is_recomputed(settings_.place, number_, batches)) return false;
    if (has_double_parameters(dtype)) {
      update_running<double>(batches, running);
    } else {
      update_running<float>(batches, running);
    }
    return true;
  }

  template <typename P>
  void update_running(const std::vector<BatchPtr>& batches, void* const (&running)[3]) {
    const auto values = [&](int i) { return static_cast<P*>(running[i]); };
    running_->update<P>(batches, settings_.running,
                        {values(kRunningMean), values(kRunningVar), values(kNumBatches)});
  }

  template <typename F>
  static void write_channels(const Arrays& arrays, int array, int request, DType dtype,
                             int64_t size, const F& value) {
    if (request == kNullOp) return;
    void* const values = arrays.data(array);
    for (int64_t i = 0; i < size; ++i) {
      write_parameter(dtype, values, i, value(i), store_of(request));
    }
  }

  void write_statistics(const Arrays& arrays, int array, int request,
                        double Statistics::* which) const {
    // Outside training there is one batch, whatever the number of virtual devices.
    const int64_t rows = std::max(1, settings_.virtual_devices);
    const int64_t channels = static_cast<int64_t>(batches_[0]->channels.size());
    write_channels(arrays, array, request, DType::kFloat64, rows * channels, [&](int64_t i) {
      const size_t row = batches_.size() == 1 ? 0 : static_cast<size_t>(i / channels);
      return batches_[row]->channels[i % channels].*which;
    });
  }

  const Settings settings_;
  const AllReduce::LayerPtr layer_;
  const std::string device_;
  // -1: the CPU.
  const int gpu_;
  const int64_t number_;
  // Whether MXNet may compute the forward a second time before the backward, to save memory.
  const bool recomputes_;
  const std::shared_ptr<RunningState> running_;
  bool from_batch_ = false;
  Ticket ticket_{};
  // What the forward has normalized by: one, or one for each virtual device.
  std::vector<BatchPtr> batches_;
};

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
  Call* const call = static_cast<Call*>(state);
  return call->run(&arrays, kNumInputs + kOutput, requests,
                   [&] { call->forward(arrays, requests, is_train != 0); });
}

int operator_backward(int size, void** handles, int*, const int* requests, int, void* state) {
  Arrays arrays(size, handles);
  Call* const call = static_cast<Call*>(state);
  return call->run(&arrays, 2 * kNumOutputs + kNumInputs + kData, requests,
                   [&] { call->backward(arrays, requests); });
}

// The callbacks that say what the operator looks like, CustomOpPropCallbacks of mxnet/c_api.h.
struct Property {
  explicit Property(const Settings& s) : settings(s), layer(all_reduce->find(s.layer)) {
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
        "SyncBatchNorm has to know the shape of its data before anything else can be inferred.");
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
  const DType parameters = has_double_parameters(data) ? DType::kFloat64 : DType::kFloat32;
  // MXNet's own blocks do not know 'bfloat16'.
  const DType cast = data == DType::kBFloat16 ? parameters : data;
  for (int i = 0; i < size; ++i) {
    const DType expected = i == kNumInputs + kMean || i == kNumInputs + kInvStd ? DType::kFloat64
                           : i == kData || i == kNumInputs + kOutput            ? data
                                                                                : parameters;
    if (types[i] != kUnknown && types[i] != static_cast<int>(expected)) {
      throw dmlc::Error(std::string("SyncBatchNorm got data of dtype ") + name_of(data) +
                        ", for which its parameters have to be " + name_of(parameters) +
                        ", and an array of " + name_of(static_cast<DType>(types[i])) +
                        " among them. Call cast('" + name_of(cast) + "') on the net.");
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

// What went wrong, or nothing.
std::string exchange_over(Line* line, const Message& message, std::vector<double>* all) {
  try {
    line->exchange(message.title, message.timeout_seconds, message.values.data(), all->data());
    return "";
  } catch (const std::exception& error) {
    return error.what();
  }
}

// A device that takes part again: see gluon_syncbn_settle.
struct Settlement {
  int64_t layer, generation;
  std::string device, text;
  Handle marker = nullptr;

  ~Settlement() {
    if (marker) mxnet.ndarray_free(marker);
  }
};

// Handles SIGINT, after whoever did so before.
struct sigaction previous_interrupt_action;

void on_interrupt(int signal, siginfo_t* info, void* context) {
  AllReduce::interrupt();
  if (previous_interrupt_action.sa_flags & SA_SIGINFO) {
    previous_interrupt_action.sa_sigaction(signal, info, context);
  } else if (previous_interrupt_action.sa_handler != SIG_DFL &&
             previous_interrupt_action.sa_handler != SIG_IGN) {
    previous_interrupt_action.sa_handler(signal);
  }
}

}  // namespace
}  // namespace gluon_syncbn

using namespace gluon_syncbn;

const char* gluon_syncbn_version() { return GLUON_SYNCBN_VERSION; }

int gluon_syncbn_register(void* const* api, const char* process, int is_naive_engine,
                          int has_onednn, void (*warn)(const char*),
                          void (*failed)(int64_t, int64_t, const char*),
                          gluon_syncbn_exchange exchange) {
  std::memcpy(&mxnet, api, sizeof(mxnet));
  this_process = process;
  naive_engine = is_naive_engine != 0;
  onednn = has_onednn != 0;
  Observer observer;
  observer.warn = [warn](const std::string& text) { warn(text.c_str()); };
  observer.failed = [failed](int64_t layer, int64_t generation, const std::string& text) {
    failed(layer, generation, text.c_str());
  };
  observer.exchange = [exchange](const Message& message, std::vector<double>* all) {
    const auto size = static_cast<int64_t>(message.values.size());
    const LinePtr line = lines().find(message.layer, message.key);
    if (line && line->size() == size) return exchange_over(line.get(), message, all);
    char error[kMostErrorText] = "";
    const int status = exchange(message.layer, message.key.c_str(), message.title.c_str(),
                                message.channels, message.values.data(), size, all->data(),
                                static_cast<int64_t>(all->size()), error, kMostErrorText);
    return status == 0 ? std::string() : std::string(error[0] ? error : "The exchange failed.");
  };
  if (!all_reduce) all_reduce = new AllReduce;
  if (!running_states) running_states = new RunningStates;
  all_reduce->observe(observer);
  return mxnet.custom_op_register("GluonSyncBatchNorm", create_property);
}

void gluon_syncbn_after_fork() {
  lines().clear();
  abandon_thread_pool();
  abandon_cuda_memory();
  all_reduce->start_over();
}

void gluon_syncbn_tell_next(const char* text) { all_reduce->tell_next(text); }

void gluon_syncbn_configure(int64_t layer, const char* name, const char* const* devices,
                            int num_devices, int expected, int group_size, double timeout_seconds,
                            int processes, int first_rank, int end_rank) {
  // Its store may be another one from now on.
  lines().forget(layer);
  LayerConfig config;
  config.name = name;
  config.devices.assign(devices, devices + num_devices);
  config.num_devices = static_cast<size_t>(expected);
  config.group_size = static_cast<size_t>(group_size);
  config.timeout_seconds = timeout_seconds;
  config.processes = static_cast<size_t>(processes);
  config.first_rank = static_cast<size_t>(first_rank);
  config.end_rank = static_cast<size_t>(end_rank);
  for (const std::string& device : config.devices) config.has_gpus |= gpu_of(device) >= 0;
  all_reduce->configure(layer, config);
  running_states->keep(layer);
}

void gluon_syncbn_set_present(const char* const* devices, int num_devices) {
  all_reduce->set_present({devices, devices + num_devices});
}

void gluon_syncbn_set_absent(int absent) { all_reduce->set_absent(absent != 0); }

void gluon_syncbn_forget(int64_t layer) {
  lines().forget(layer);
  all_reduce->forget(layer);
  running_states->forget(layer);
}

void gluon_syncbn_restart(int64_t layer, int variance) {
  running_states->restart(layer, variance != 0);
}

int gluon_syncbn_settle(int64_t layer, int64_t generation, const char* device, void** arrays,
                        int num_arrays, const char* text) {
  // The naive engine keeps no error in arrays.
  if (num_arrays == 0 || naive_engine) {
    all_reduce->settle(layer, generation, device);
    return 0;
  }
  auto* settlement = new Settlement{layer, generation, device, text};
  const uint32_t one = 1;
  int status = mxnet.ndarray_create(&one, 1, kCpuContext.device_type, kCpuContext.device_id, 1, 0,
                                    &settlement->marker);
  // MXNet clears an error where somebody waits for it, and then everywhere. The error of the failed
  // step is the user's, so it is replaced in these arrays by one of our own, which the marker holds
  // too. Waiting for the marker clears that one.
  std::vector<Handle> written(arrays, arrays + num_arrays);
  written.push_back(settlement->marker);
  const auto replace = [](void*, void* argument) {
    throw dmlc::Error(static_cast<Settlement*>(argument)->text);
  };
  const auto clear = [](void*, void* argument) {
    const Settlement& s = *static_cast<Settlement*>(argument);
    mxnet.ndarray_wait_to_read(s.marker);
    all_reduce->settle(s.layer, s.generation, s.device);
  };
  if (status == 0) {
    status = mxnet.engine_push_sync(replace, settlement, nullptr, &kCpuContext, nullptr, 0,
                                    written.data(), num_arrays + 1, &kNoSkip, 0,
                                    "SyncBatchNormReplaceError");
  }
  if (status == 0) {
    // Runs after `replace`, which writes the same arrays, and frees the settlement of both.
    status = mxnet.engine_push_sync(
        clear, settlement, [](void* s) { delete static_cast<Settlement*>(s); }, &kCpuContext,
        nullptr, 0, arrays, num_arrays, &kNoSkip, 0, "SyncBatchNormClearError");
  } else {
    delete settlement;
  }
  return status;
}

void gluon_syncbn_close(const char* reason) {
  all_reduce->close(reason);
  Watch::close();
}

void gluon_syncbn_release() { release_cuda_memory(); }

const char* gluon_syncbn_cuda() { return cuda_backend() ? cuda_backend()->description : nullptr; }

int gluon_syncbn_waiting() { return all_reduce->waiting(); }

int gluon_syncbn_catch_interrupts() {
  struct sigaction action{};
  action.sa_sigaction = on_interrupt;
  action.sa_flags = SA_SIGINFO;
  sigemptyset(&action.sa_mask);
  struct sigaction current{};
  sigaction(SIGINT, nullptr, &current);
  if (current.sa_flags & SA_SIGINFO && current.sa_sigaction == on_interrupt) return 0;
  return sigaction(SIGINT, nullptr, &previous_interrupt_action) ||
         sigaction(SIGINT, &action, nullptr);
}
