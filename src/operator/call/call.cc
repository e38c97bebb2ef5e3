#include "call/call.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <utility>

#include "call/process.h"
#include "call/virtual_devices.h"
#include "cuda/device.h"
#include "mxnet/engine_errors.h"

namespace gluon_syncbn {
namespace {

// The offsets of a callback's arrays, CustomOp of MXNet's custom.cc: in forward inputs, outputs,
// auxiliary states; in backward gradients of outputs, inputs, outputs, gradients of inputs.
constexpr int kBackwardInputs = kNumOutputs;

// What a device contributes if the last to arrive runs the kernels for all.
template <typename Part>
struct PartContribution : Contribution {
  PartContribution(const Part& p, DType dtype) : Contribution{p.view.C, name_of(dtype)}, part(&p) {}

  const Part* part;
  BatchPtr batch;
};

template <typename Part>
std::vector<const Part*> parts_of(const std::vector<Contribution*>& contributions) {
  std::vector<const Part*> parts;
  for (const Contribution* contribution : contributions) {
    parts.push_back(static_cast<const PartContribution<Part>*>(contribution)->part);
  }
  return parts;
}

// y of one part.
void normalize(const Kernels& kernels, const ForwardShard& p, const Batch& batch) {
  if (p.y) kernels.forward(p, batch.channels.data());
}

// y of all parts, and their statistics.
BatchPtr normalize_all(const Kernels& kernels, const std::vector<const ForwardShard*>& parts,
                       double epsilon) {
  Batch batch{std::vector<Statistics>(parts[0]->view.C)};
  for (const ForwardShard* part : parts) {
    batch.count += static_cast<double>(part->view.N * part->view.S);
  }
  kernels.forward_together(parts, epsilon, batch.channels.data());
  return std::make_shared<const Batch>(std::move(batch));
}

template <typename F>
void write_values(const Arrays& arrays, int array, int request, DType dtype, int64_t size,
                  const F& value) {
  if (request == kNullOp) return;
  void* const values = arrays.data(array);
  for (int64_t i = 0; i < size; ++i) {
    write_parameter(dtype, values, i, value(i), store_of(request));
  }
}

// What a GPU contributes if all of them add the sums.
struct SharedContribution : Contribution {
  const SharedSums& own;
  std::vector<SharedSums> all;
};

// The running mean, variance, and the number of batches or null.
struct RunningPointers {
  void* each[3];
  RunningPointers(const Arrays& arrays, int first, bool cumulative)
      : each{arrays.data(first + kRunningMean), arrays.data(first + kRunningVar),
             cumulative ? arrays.data(first + kNumBatches) : nullptr} {}
};

}  // namespace

Call::Call(const Attributes& attributes, const LayerPtr& layer, const char* context)
    : attributes_(attributes),
      layer_(layer),
      device_(context),
      gpu_(gpu_of(device_)),
      outputs_(attributes.inputs()),
      running_arrays_(outputs_ + kNumOutputs),
      gradients_(kBackwardInputs + attributes.inputs() + kNumOutputs) {
  for (void*& self : contexts) self = this;
}

int Call::forward(Arrays* arrays, const int* requests, bool is_train) {
  return run(arrays, outputs_ + kOutput, kNumOutputs, requests, &id_,
             [&] { forward_pass(*arrays, requests, is_train); });
}

int Call::backward(Arrays* arrays, const int* requests) {
  return run(arrays, gradients_ + kData, attributes_.inputs(), requests, nullptr,
             [&] { backward_pass(*arrays, requests); });
}

int Call::run(Arrays* arrays, int written, int count, const int* requests, const CallId* forward,
              const std::function<void()>& work) {
  std::string text;
  try {
    work();
    return 1;
  } catch (const Error& error) {
    text = error.what();
  } catch (const std::exception& error) {
    text = title() + ": " + error.what();
    if (forward && has_met_) {
      text +=
          " Its running statistics are as before this step, and those of other devices may have "
          "followed the batch: continue from the last checkpoint.";
    }
    process.rendezvous->fail(layer_, text, device_, forward);
  }
  // Under MXNet's naive engine arrays hold no errors: an exception goes straight up to the caller.
  if (process.naive_engine) throw dmlc::Error(text);
  // Once the user has waited for one result, MXNet forgets the error and goes on with the values of
  // the others.
  for (int i = 0; i < count && has_kernels(); ++i) clear(*arrays, written + i, requests[i]);
  report_error(arrays->release(written), device_, text);
  return 1;
}

std::string Call::title() const {
  return attributes_.block_name() + (layer_ ? " '" + process.rendezvous->name(layer_) + "'" : "") +
         " on " + device_;
}

bool Call::has_kernels() const { return gpu_ < 0 || cuda_backend(); }

void Call::clear(const Arrays& arrays, int array, int request) const {
  if (request != kWriteTo && request != kWriteInplace) return;
  if (gpu_ < 0) {
    std::memset(arrays.data(array), 0, arrays.bytes(array));
  } else {
    clear_on_gpu(gpu_, arrays.data(array), arrays.bytes(array));
  }
}

// Whether there are kernels for the device, and the graph was traced for it.
void Call::check_device() const {
  if (!has_kernels()) {
    throw std::runtime_error(
        "this build has kernels for the CPU only. Use CPU contexts, or build it again where nvcc "
        "is installed: GLUON_SYNCBN_CUDA=1 pip install --force-reinstall --no-deps .");
  }
  if (gpu_ >= 0) return;
  if (process.onednn && attributes_.gpu_only) {
    throw std::runtime_error(
        "the graph was traced for GPUs. Call net.hybridize() again after the net was moved to "
        "another kind of device.");
  }
}

void Call::check_engine() const {
  if (process.naive_engine && process.rendezvous->meeting_size(layer_) > 1) {
    throw Error(
        "SyncBatchNorm cannot synchronize devices under MXNET_ENGINE_TYPE=NaiveEngine, where a "
        "call "
        "must end before the next begins. Use one device, or unset MXNET_ENGINE_TYPE.");
  }
}

void Call::check_count(const Arrays& arrays) const {
  const DType parameters = dtype_of_parameters(dtype_);
  const DType count = arrays.dtype(running_arrays_ + kNumBatches);
  if (count != parameters) {
    throw std::runtime_error(std::string("num_batches_tracked is of dtype ") + name_of(count) +
                             " and must be " + name_of(parameters) +
                             " in training. Cast that parameter.");
  }
}

void Call::forward_pass(const Arrays& arrays, const int* requests, bool is_train) {
  check_device();
  // So that a backward after a failed forward finds none.
  channels_ = 0;
  batches_.clear();
  on_gpu_ = {};
  has_met_ = false;
  id_ = CallId{-1, 0, 0, nullptr};
  from_batch_ = is_train && !attributes_.use_global_stats;
  if (is_shared()) {
    check_engine();
    // Before anything that may fail on this device only: so the others know which call has failed.
    id_ = process.rendezvous->next_call(layer_, device_, attributes_.node);
  }
  const View view = arrays.view(kData, attributes_.axis);
  dtype_ = arrays.dtype(kData);
  if (from_batch_ && view.size() == 0) {
    throw std::runtime_error(
        arrays.text(kData) +
        " holds no values. Do not train the net with it: leave the device out of the step within "
        "gluon_syncbn.participants.");
  }
  if (requests[kOutput] == kAddTo && attributes_.needs_y()) {
    throw std::runtime_error(
        "backward reads y, and y was requested to be added to another array: request it with "
        "'write'.");
  }
  const bool wanted = requests[kOutput] != kNullOp && view.size() > 0;
  const ForwardShard whole{view,
                           arrays.data(kData),
                           gamma(arrays.data(kGamma)),
                           arrays.data(kBeta),
                           attributes_.residual ? arrays.data(kResidual) : nullptr,
                           attributes_.epilogue,
                           wanted ? arrays.data(outputs_ + kOutput) : nullptr,
                           store_of(requests[kOutput])};
  if (from_batch_ && attributes_.running.cumulative) check_count(arrays);
  if (gpu_ < 0) {
    batches_ = forward_by_cpu(arrays, requests, whole);
  } else {
    on_gpu_ = forward_by_cuda(arrays, requests, whole);
  }
  channels_ = view.C;
}

void Call::backward_pass(const Arrays& arrays, const int* requests) {
  check_device();
  // That of dy, as x may not be there.
  const View view = arrays.view(kOutput, attributes_.axis);
  if (channels_ != view.C) {
    throw Error(title() + " goes backward through a forward that has failed.");
  }
  if (view.size() == 0) {
    for (const int input : {kGamma, kBeta}) clear(arrays, gradients_ + input, requests[input]);
    return;
  }
  const auto input = [&](int i, bool needed) -> const void* {
    return needed ? arrays.data(kBackwardInputs + i) : nullptr;
  };
  // A device that wants no gradient still synchronizes, as others may want theirs.
  const auto gradient = [&](int i) -> void* {
    return requests[i] == kNullOp ? nullptr : arrays.data(gradients_ + i);
  };
  const int inputs = attributes_.inputs();
  const BackwardShard whole{view,
                            arrays.data(kOutput),
                            input(kData, attributes_.needs_x()),
                            input(inputs + kOutput, attributes_.needs_y()),
                            gamma(input(kGamma, true)),
                            input(kBeta, attributes_.needs_beta()),
                            attributes_.epilogue,
                            gradient(kData),
                            store_of(requests[kData]),
                            attributes_.residual ? gradient(kResidual) : nullptr,
                            attributes_.residual ? store_of(requests[kResidual]) : Store::kWrite,
                            nullptr};
  if (gpu_ < 0) {
    backward_by_cpu(arrays, requests, whole);
  } else {
    backward_by_cuda(arrays, requests, whole);
  }
}

std::vector<BatchPtr> Call::forward_by_cpu(const Arrays& arrays, const int* requests,
                                           const ForwardShard& whole) {
  const Kernels& kernels = cpu_kernels(dtype_);
  const RunningPointers running(arrays, running_arrays_, attributes_.running.cumulative);
  std::vector<BatchPtr> batches;
  if (!from_batch_) {
    batches.push_back(
        given_batch(whole.view.C, running.each[kRunningMean], running.each[kRunningVar]));
    normalize(kernels, whole, *batches[0]);
  } else if (is_shared()) {
    batches.push_back(synchronized_forward(whole));
  } else {
    for (const ForwardShard& part : chunks_of(whole, arrays.samples(kData))) {
      batches.push_back(normalize_all(kernels, {&part}, attributes_.epsilon));
    }
  }
  if (from_batch_) update_running(batches, running.each);
  write_statistics(arrays, requests, batches);
  return batches;
}

void Call::backward_by_cpu(const Arrays& arrays, const int* requests, const BackwardShard& whole) {
  const Kernels& kernels = cpu_kernels(dtype_);
  const View& view = whole.view;
  std::vector<ChannelSums> sums(view.C);
  // Of this device only: the Trainer adds them over the devices.
  std::vector<double> dgamma(view.C), dbeta(view.C);
  const auto parts = chunks_of(whole, arrays.samples(kOutput));
  for (size_t i = 0; i < parts.size(); ++i) {
    BackwardShard part = parts[i];
    part.sums = sums.data();
    const Statistics* const statistics = batches_[i]->channels.data();
    if (!from_batch_) {
      kernels.backward_sums(part, statistics);
      const std::vector<ChannelSums> zeros(view.C);
      if (part.dx || part.dresidual) kernels.backward(part, statistics, zeros.data(), 0);
    } else if (is_shared()) {
      synchronized_backward(part);
    } else {
      kernels.backward_together({&part}, statistics);
    }
    for (int64_t c = 0; c < view.C; ++c) {
      // The sums are of (x - mean), or of (x - mean) * inv_std * gamma if x is recovered.
      const double gamma =
          whole.gamma ? effective_gamma(parameter(dtype_, whole.gamma, c), attributes_.epilogue)
                      : 1;
      const double inv_std = whole.recovers_x() ? 1 / gamma : statistics[c].inv_std;
      dgamma[c] += sums[c].second.value() * inv_std;
      dbeta[c] += sums[c].first.value();
    }
  }
  write_values(arrays, gradients_ + kGamma, requests[kGamma], dtype_, view.C,
               [&](int64_t c) { return attributes_.fix_gamma ? 0 : dgamma[c]; });
  write_values(arrays, gradients_ + kBeta, requests[kBeta], dtype_, view.C,
               [&](int64_t c) { return dbeta[c]; });
}

KeptOnGpu Call::forward_by_cuda(const Arrays& arrays, const int* requests,
                                const ForwardShard& whole) {
  const RunningPointers running(arrays, running_arrays_, attributes_.running.cumulative);
  const auto result = [&](int output) {
    return Result{requests[output] == kNullOp ? nullptr : arrays.data(outputs_ + output),
                  requests[output] == kAddTo};
  };
  GpuForward task{gpu_,
                  dtype_,
                  arrays.text(kData),
                  attributes_.epsilon,
                  chunks_of(whole, arrays.samples(kData)),
                  from_batch_,
                  together(Direction::kForward, whole.view.C),
                  {running.each[0], running.each[1], running.each[2]},
                  has_data(),
                  attributes_.running,
                  nullptr,
                  result(kMean),
                  result(kInvStd),
                  std::max(1, attributes_.virtual_devices)};
  // The host has all statistics, or adds those of virtual devices.
  if (task.together.reduce || task.parts.size() > 1) {
    task.update_on_host = [&](const std::vector<BatchPtr>& batches, void* const(&on_host)[3]) {
      return update_running(batches, on_host);
    };
  }
  return forward_on_gpu(task);
}

void Call::backward_by_cuda(const Arrays& arrays, const int* requests, const BackwardShard& whole) {
  const auto result = [&](int input) {
    return Result{requests[input] == kNullOp ? nullptr : arrays.data(gradients_ + input),
                  requests[input] == kAddTo};
  };
  backward_on_gpu({gpu_, dtype_, arrays.text(kOutput), chunks_of(whole, arrays.samples(kOutput)),
                   on_gpu_, from_batch_, together(Direction::kBackward, whole.view.C),
                   result(kGamma), result(kBeta)});
}

BatchPtr Call::synchronized_forward(const ForwardShard& part) {
  const Kernels& kernels = cpu_kernels(dtype_);
  const int64_t channels = part.view.C;
  if (!process.rendezvous->shares_memory(layer_)) {
    std::vector<ChannelSums> sums(channels);
    Batch batch{std::vector<Statistics>(channels)};
    batch.count = static_cast<double>(part.view.N * part.view.S);
    kernels.forward_sums(part.view, part.x, sums.data());
    process.rendezvous->reduce(layer_, id_, Direction::kForward, device_, name_of(dtype_), &sums,
                               &batch.count);
    for (int64_t c = 0; c < channels; ++c) {
      batch.channels[c] = batch_statistics(sums[c], batch.count, attributes_.epsilon);
    }
    normalize(kernels, part, batch);
    return std::make_shared<const Batch>(std::move(batch));
  }
  using Mine = PartContribution<ForwardShard>;
  Mine mine(part, dtype_);
  process.rendezvous->meet(
      layer_, id_, Direction::kForward, device_, &mine, [&](const std::vector<Contribution*>& all) {
        const BatchPtr batch =
            normalize_all(kernels, parts_of<ForwardShard>(all), attributes_.epsilon);
        for (Contribution* each : all) static_cast<Mine*>(each)->batch = batch;
      });
  return mine.batch;
}

void Call::synchronized_backward(const BackwardShard& part) {
  const Kernels& kernels = cpu_kernels(dtype_);
  const Statistics* const statistics = batches_[0]->channels.data();
  if (!process.rendezvous->shares_memory(layer_)) {
    kernels.backward_sums(part, statistics);
    std::vector<ChannelSums> sums(part.sums, part.sums + part.view.C);
    double count = static_cast<double>(part.view.N * part.view.S);
    process.rendezvous->reduce(layer_, id_, Direction::kBackward, device_, name_of(dtype_), &sums,
                               &count);
    if (part.dx || part.dresidual) kernels.backward(part, statistics, sums.data(), count);
    return;
  }
  PartContribution<BackwardShard> mine(part, dtype_);
  process.rendezvous->meet(layer_, id_, Direction::kBackward, device_, &mine,
                           [&](const std::vector<Contribution*>& all) {
                             kernels.backward_together(parts_of<BackwardShard>(all), statistics);
                           });
}

Together Call::together(Direction direction, int64_t channels) {
  Together result;
  if (!is_shared()) return result;
  const Members all = process.rendezvous->members_of(layer_, id_, device_);
  for (const std::string& device : all.devices) result.gpus.push_back(gpu_of(device));
  if (all.count == 1 && !all.exchanges) return result;
  const bool are_gpus =
      !result.gpus.empty() && *std::min_element(result.gpus.begin(), result.gpus.end()) >= 0;
  if (are_gpus && all.count <= kMaxDevices && !all.exchanges) {
    result.meet = [=](const SharedSums& own) {
      SharedContribution mine{{channels, name_of(dtype_)}, own, {}};
      process.rendezvous->meet(layer_, id_, direction, device_, &mine,
                               [](const std::vector<Contribution*>& each) {
                                 std::vector<SharedSums> sums;
                                 for (const Contribution* one : each) {
                                   sums.push_back(static_cast<const SharedContribution*>(one)->own);
                                 }
                                 for (Contribution* one : each)
                                   static_cast<SharedContribution*>(one)->all = sums;
                               });
      has_met_ = true;
      return std::move(mine.all);
    };
  } else {
    result.reduce = [=](ChannelSums* sums, double* count) {
      std::vector<ChannelSums> reduced(sums, sums + channels);
      process.rendezvous->reduce(layer_, id_, direction, device_, name_of(dtype_), &reduced, count);
      has_met_ = true;
      std::copy(reduced.begin(), reduced.end(), sums);
    };
  }
  return result;
}

template <typename Part>
std::vector<Part> Call::chunks_of(const Part& whole, int64_t samples) const {
  if (!from_batch_ || !attributes_.virtual_devices) return {whole};
  return cut(whole, dtype_, samples, attributes_.virtual_devices);
}

BatchPtr Call::given_batch(int64_t channels, const void* mean, const void* var) const {
  Batch batch{std::vector<Statistics>(channels)};
  for (int64_t c = 0; c < channels; ++c) {
    batch.channels[c] = given_statistics(parameter(dtype_, mean, c), parameter(dtype_, var, c),
                                         attributes_.epsilon);
  }
  return std::make_shared<const Batch>(std::move(batch));
}

// A process that has run out of data repeats its last batch.
bool Call::has_data() const { return process.rendezvous->has_data(is_shared() ? layer_ : nullptr); }

bool Call::update_running(const std::vector<BatchPtr>& batches, void* const (&running)[3]) {
  if (batches[0]->count == 0 || !has_data()) return false;
  const auto update = [&](auto zero) {
    using P = decltype(zero);
    const auto values = [&](int i) { return static_cast<P*>(running[i]); };
    gluon_syncbn::update_running<P>(
        batches, attributes_.running,
        {values(kRunningMean), values(kRunningVar), values(kNumBatches)});
  };
  with_parameters(dtype_, update);
  return true;
}

void Call::write_statistics(const Arrays& arrays, const int* requests,
                            const std::vector<BatchPtr>& batches) const {
  // Outside training there is one batch, whatever the number of virtual devices.
  const int64_t rows = std::max(1, attributes_.virtual_devices);
  const auto channels = static_cast<int64_t>(batches[0]->channels.size());
  for (const int output : {kMean, kInvStd}) {
    write_values(arrays, outputs_ + output, requests[output], DType::kFloat64, rows * channels,
                 [&](int64_t i) {
                   const Batch& batch = *batches[batches.size() == 1 ? 0 : i / channels];
                   const Statistics& statistics = batch.channels[i % channels];
                   return output == kMean ? statistics.mean : statistics.inv_std;
                 });
  }
}

}  // namespace gluon_syncbn
