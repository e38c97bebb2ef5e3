#include "call.h"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <stdexcept>
#include <utility>

#include "chunks.h"
#include "engine_errors.h"
#include "mxnet_api.h"
#include "process.h"

namespace gluon_syncbn {
namespace {

// Where the arrays of a callback begin, CustomOp of MXNet's custom.cc: in forward inputs, outputs,
// auxiliary states; in backward gradients of outputs, inputs, outputs, gradients of inputs.
constexpr int kForwardOutputs = kNumInputs, kForwardRunning = kNumInputs + kNumOutputs;
constexpr int kBackwardInputs = kNumOutputs, kGradients = kNumOutputs + kNumInputs + kNumOutputs;

std::atomic<int64_t> call_count{0};

// As MXNet's executor asks when it is bound.
bool mirrors() {
  const char* const set = std::getenv("MXNET_BACKWARD_DO_MIRROR");
  return set && std::atoi(set) != 0;
}

// What one device brings to a meeting whose last arrival runs the passes for all.
template <typename KernelPart>
struct Work : Part {
  const KernelPart* kernel = nullptr;
  BatchPtr batch;
};

template <typename KernelPart>
Work<KernelPart> work_of(const KernelPart& part, DType dtype) {
  Work<KernelPart> work;
  work.channels = part.view.C;
  work.dtype = name_of(dtype);
  work.kernel = &part;
  return work;
}

template <typename KernelPart>
std::vector<const KernelPart*> kernel_parts(const std::vector<Part*>& parts) {
  std::vector<const KernelPart*> result;
  for (const Part* part : parts) {
    result.push_back(static_cast<const Work<KernelPart>*>(part)->kernel);
  }
  return result;
}

// y of one part.
void normalize(const Kernels& kernels, const ForwardPart& p, const Batch& batch) {
  if (p.y) kernels.forward(p.view, p.x, batch.channels.data(), p.gamma, p.beta, p.y, p.store);
}

// y of all parts, and their statistics.
BatchPtr forward_together(const Kernels& kernels, const std::vector<const ForwardPart*>& parts,
                          double epsilon) {
  Batch batch{std::vector<Statistics>(parts[0]->view.C)};
  for (const ForwardPart* part : parts) {
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

// The running mean, variance, and the number of batches or null.
struct RunningPointers {
  void* each[3];
  RunningPointers(const Arrays& arrays, bool cumulative)
      : each{arrays.data(kForwardRunning + kRunningMean),
             arrays.data(kForwardRunning + kRunningVar),
             cumulative ? arrays.data(kForwardRunning + kNumBatches) : nullptr} {}
};

}  // namespace

Call::Call(const Settings& settings, const AllReduce::LayerPtr& layer, const char* context)
    : settings_(settings),
      layer_(layer),
      device_(context),
      gpu_(gpu_of(device_)),
      number_(call_count++),
      recomputes_(settings.place >= 0 && (settings.force_mirroring || mirrors())),
      running_(process.running_states->of(settings.layer, device_)) {
  for (void*& self : contexts) self = this;
}

int Call::forward(Arrays* arrays, const int* requests, bool is_train) {
  return run(arrays, kForwardOutputs + kOutput, requests, &ticket_,
             [&] { forward_pass(*arrays, requests, is_train); });
}

int Call::backward(Arrays* arrays, const int* requests) {
  return run(arrays, kGradients + kData, requests, nullptr,
             [&] { backward_pass(*arrays, requests); });
}

int Call::run(Arrays* arrays, int written, const int* requests, const Ticket* forward,
              const std::function<void()>& work) {
  std::string text;
  try {
    work();
    return 1;
  } catch (const Error& error) {
    text = error.what();
  } catch (const std::exception& error) {
    text = title() + ": " + error.what();
    process.all_reduce->fail(layer_, text, device_, forward);
  }
  // MXNet's naive engine has no such arrays: there an exception goes straight up to the caller.
  if (process.naive_engine) throw dmlc::Error(text);
  // Once one result was waited for, MXNet takes the error for told and goes on with what it finds
  // in the others.
  for (int i = 0; i < 3 && has_kernels(); ++i) arrays->clear(written + i, requests[i], gpu_);
  tell_error(arrays->release(written), device_, text);
  return 1;
}

std::string Call::title() const {
  return "SyncBatchNorm" + (layer_ ? " '" + process.all_reduce->name(layer_) + "'" : "") + " on " +
         device_;
}

bool Call::has_kernels() const { return gpu_ < 0 || cuda_backend(); }

// Whether there are kernels for the device, and a graph that fits it.
void Call::check_device() const {
  if (!has_kernels()) {
    throw std::runtime_error(
        "this build has kernels for the CPU alone. Use CPU contexts, or build it again where "
        "nvcc is: GLUON_SYNCBN_CUDA=1 pip install --force-reinstall --no-deps .");
  }
  if (gpu_ >= 0) return;
  if (process.onednn && settings_.gpu_only) {
    throw std::runtime_error(
        "the graph was traced for GPUs. Call net.hybridize() again after the net was moved to "
        "another kind of device.");
  }
}

void Call::check_engine() const {
  if (process.naive_engine && process.all_reduce->participants(layer_) > 1) {
    throw Error(
        "SyncBatchNorm cannot meet other devices under MXNET_ENGINE_TYPE=NaiveEngine, where one "
        "call has to end before the next begins. Use one device, or unset MXNET_ENGINE_TYPE.");
  }
}

void Call::check_count(const Arrays& arrays) const {
  const DType parameters = dtype_of_parameters(arrays.dtype(kData));
  const DType count = arrays.dtype(kForwardRunning + kNumBatches);
  if (count != parameters) {
    throw std::runtime_error(std::string("num_batches_tracked is of dtype ") + name_of(count) +
                             " and has to be " + name_of(parameters) +
                             " in training. Cast that parameter.");
  }
}

void Call::forward_pass(const Arrays& arrays, const int* requests, bool is_train) {
  check_device();
  // A backward finds none after a forward that fails.
  batches_.clear();
  ticket_ = Ticket{-1, 0, 0, nullptr};
  from_batch_ = is_train && !settings_.use_global_stats;
  if (is_shared()) {
    check_engine();
    // Before anything that may fail on this device alone: others then know which call has failed.
    ticket_ = process.all_reduce->next_ticket(layer_, device_, settings_.place);
  }
  const View view = arrays.view(kData, settings_.axis);
  if (from_batch_ && view.size() == 0) {
    throw std::runtime_error(
        arrays.text(kData) +
        " holds no values. Do not train the net with it: leave the device out of the step within "
        "gluon_syncbn.participants.");
  }
  const bool wanted = requests[kOutput] != kNullOp && view.size() > 0;
  const ForwardPart whole{view,
                          arrays.data(kData),
                          gamma(arrays.data(kGamma)),
                          arrays.data(kBeta),
                          wanted ? arrays.data(kForwardOutputs + kOutput) : nullptr,
                          store_of(requests[kOutput])};
  if (from_batch_ && settings_.running.cumulative) check_count(arrays);
  batches_ =
      gpu_ < 0 ? forward_by_cpu(arrays, requests, whole) : forward_by_cuda(arrays, requests, whole);
}

void Call::backward_pass(const Arrays& arrays, const int* requests) {
  check_device();
  // Also a device that wants no dx has to meet the others: they may.
  const bool wanted = requests[kData] != kNullOp;
  const View view = arrays.view(kBackwardInputs + kData, settings_.axis);
  if (batches_.empty() || static_cast<int64_t>(batches_[0]->channels.size()) != view.C) {
    throw Error(title() + " goes backward through a forward that has failed.");
  }
  if (view.size() == 0) {
    for (const int input : {kGamma, kBeta}) {
      arrays.clear(kGradients + input, requests[input], gpu_);
    }
    return;
  }
  if (recomputes_) running_->goes_backward(settings_.place, number_);
  const BackwardPart whole{view,
                           arrays.data(kOutput),
                           arrays.data(kBackwardInputs + kData),
                           gamma(arrays.data(kBackwardInputs + kGamma)),
                           wanted ? arrays.data(kGradients + kData) : nullptr,
                           store_of(requests[kData]),
                           nullptr};
  if (gpu_ < 0) {
    backward_by_cpu(arrays, requests, whole);
  } else {
    backward_by_cuda(arrays, requests, whole);
  }
}

std::vector<BatchPtr> Call::forward_by_cpu(const Arrays& arrays, const int* requests,
                                           const ForwardPart& whole) {
  const DType dtype = arrays.dtype(kData);
  const Kernels& kernels = cpu_kernels(dtype);
  const RunningPointers running(arrays, settings_.running.cumulative);
  std::vector<BatchPtr> batches;
  if (!from_batch_) {
    batches.push_back(
        given_batch(dtype, whole.view.C, running.each[kRunningMean], running.each[kRunningVar]));
    normalize(kernels, whole, *batches[0]);
  } else if (is_shared()) {
    batches.push_back(meet_forward(dtype, whole));
  } else {
    for (const ForwardPart& part : parts_of(whole, dtype, arrays.samples(kData))) {
      batches.push_back(forward_together(kernels, {&part}, settings_.epsilon));
    }
  }
  if (from_batch_) update_running(dtype, batches, running.each);
  write_statistics(arrays, kForwardOutputs + kMean, requests[kMean], batches, &Statistics::mean);
  write_statistics(arrays, kForwardOutputs + kInvStd, requests[kInvStd], batches,
                   &Statistics::inv_std);
  return batches;
}

void Call::backward_by_cpu(const Arrays& arrays, const int* requests, const BackwardPart& whole) {
  const DType dtype = arrays.dtype(kBackwardInputs + kData);
  const Kernels& kernels = cpu_kernels(dtype);
  const View& view = whole.view;
  std::vector<ChannelSums> sums(view.C);
  // Of this device alone: the Trainer adds them over the devices.
  std::vector<double> dgamma(view.C), dbeta(view.C);
  const auto parts = parts_of(whole, dtype, arrays.samples(kBackwardInputs + kData));
  for (size_t i = 0; i < parts.size(); ++i) {
    BackwardPart part = parts[i];
    part.sums = sums.data();
    const Statistics* const statistics = batches_[i]->channels.data();
    if (!from_batch_) {
      kernels.backward_sums(view, part.dy, part.x, statistics, part.sums);
      if (part.dx) {
        kernels.backward_constant(view, part.dy, statistics, part.gamma, part.dx, part.store);
      }
    } else if (is_shared()) {
      meet_backward(dtype, part);
    } else {
      kernels.backward_together({&part}, statistics);
    }
    for (int64_t c = 0; c < view.C; ++c) {
      dgamma[c] += sums[c].second.value() * statistics[c].inv_std;
      dbeta[c] += sums[c].first.value();
    }
  }
  write_values(arrays, kGradients + kGamma, requests[kGamma], dtype, view.C,
               [&](int64_t c) { return settings_.fix_gamma ? 0 : dgamma[c]; });
  write_values(arrays, kGradients + kBeta, requests[kBeta], dtype, view.C,
               [&](int64_t c) { return dbeta[c]; });
}

std::vector<BatchPtr> Call::forward_by_cuda(const Arrays& arrays, const int* requests,
                                            const ForwardPart& whole) {
  const DType dtype = arrays.dtype(kData);
  const RunningPointers running(arrays, settings_.running.cumulative);
  const auto result = [&](int output) {
    return Result{requests[output] == kNullOp ? nullptr : arrays.data(kForwardOutputs + output),
                  requests[output] == kAddTo};
  };
  return forward_on_gpu({gpu_,
                         dtype,
                         arrays.text(kData),
                         settings_.epsilon,
                         parts_of(whole, dtype, arrays.samples(kData)),
                         from_batch_,
                         meet_by_cuda(Direction::kForward, dtype, whole.view.C),
                         {running.each[0], running.each[1], running.each[2]},
                         [&](const std::vector<BatchPtr>& batches, void* const(&on_host)[3]) {
                           return update_running(dtype, batches, on_host);
                         },
                         result(kMean),
                         result(kInvStd),
                         std::max(1, settings_.virtual_devices)});
}

void Call::backward_by_cuda(const Arrays& arrays, const int* requests, const BackwardPart& whole) {
  constexpr int kX = kBackwardInputs + kData;
  const DType dtype = arrays.dtype(kX);
  const auto result = [&](int input) {
    return Result{requests[input] == kNullOp ? nullptr : arrays.data(kGradients + input),
                  requests[input] == kAddTo};
  };
  backward_on_gpu({gpu_, dtype, arrays.text(kX), parts_of(whole, dtype, arrays.samples(kX)),
                   batches_, from_batch_, meet_by_cuda(Direction::kBackward, dtype, whole.view.C),
                   result(kGamma), result(kBeta)});
}

BatchPtr Call::meet_forward(DType dtype, const ForwardPart& part) {
  const Kernels& kernels = cpu_kernels(dtype);
  const int64_t channels = part.view.C;
  if (!process.all_reduce->shares_memory(layer_)) {
    std::vector<ChannelSums> sums(channels);
    Batch batch{std::vector<Statistics>(channels)};
    batch.count = static_cast<double>(part.view.N * part.view.S);
    kernels.forward_sums(part.view, part.x, sums.data());
    process.all_reduce->reduce(layer_, ticket_, Direction::kForward, device_, name_of(dtype), &sums,
                               &batch.count);
    for (int64_t c = 0; c < channels; ++c) {
      batch.channels[c] = batch_statistics(sums[c], batch.count, settings_.epsilon);
    }
    normalize(kernels, part, batch);
    return std::make_shared<const Batch>(std::move(batch));
  }
  Work<ForwardPart> work = work_of(part, dtype);
  process.all_reduce->meet(
      layer_, ticket_, Direction::kForward, device_, &work, [&](const std::vector<Part*>& parts) {
        const BatchPtr batch =
            forward_together(kernels, kernel_parts<ForwardPart>(parts), settings_.epsilon);
        for (Part* p : parts) static_cast<Work<ForwardPart>*>(p)->batch = batch;
      });
  return work.batch;
}

void Call::meet_backward(DType dtype, const BackwardPart& part) {
  const Kernels& kernels = cpu_kernels(dtype);
  const Statistics* const statistics = batches_[0]->channels.data();
  if (!process.all_reduce->shares_memory(layer_)) {
    kernels.backward_sums(part.view, part.dy, part.x, statistics, part.sums);
    std::vector<ChannelSums> sums(part.sums, part.sums + part.view.C);
    double count = static_cast<double>(part.view.N * part.view.S);
    process.all_reduce->reduce(layer_, ticket_, Direction::kBackward, device_, name_of(dtype),
                               &sums, &count);
    if (part.dx) {
      kernels.backward(part.view, part.dy, part.x, statistics, part.gamma, sums.data(), count,
                       part.dx, part.store);
    }
    return;
  }
  Work<BackwardPart> work = work_of(part, dtype);
  process.all_reduce->meet(
      layer_, ticket_, Direction::kBackward, device_, &work, [&](const std::vector<Part*>& parts) {
        kernels.backward_together(kernel_parts<BackwardPart>(parts), statistics);
      });
}

Meet Call::meet_by_cuda(Direction direction, DType dtype, int64_t channels) {
  if (!is_shared()) return nullptr;
  return [=](ChannelSums* sums, double* count) {
    std::vector<ChannelSums> all(sums, sums + channels);
    process.all_reduce->reduce(layer_, ticket_, direction, device_, name_of(dtype), &all, count);
    std::copy(all.begin(), all.end(), sums);
  };
}

template <typename KernelPart>
std::vector<KernelPart> Call::parts_of(const KernelPart& whole, DType dtype,
                                       int64_t samples) const {
  if (!from_batch_ || !settings_.virtual_devices) return {whole};
  return cut(whole, dtype, samples, settings_.virtual_devices);
}

BatchPtr Call::given_batch(DType dtype, int64_t channels, const void* mean, const void* var) const {
  Batch batch{std::vector<Statistics>(channels)};
  for (int64_t c = 0; c < channels; ++c) {
    batch.channels[c] =
        given_statistics(parameter(dtype, mean, c), parameter(dtype, var, c), settings_.epsilon);
  }
  return std::make_shared<const Batch>(std::move(batch));
}

bool Call::update_running(DType dtype, const std::vector<BatchPtr>& batches,
                          void* const (&running)[3]) {
  // Of a process that has run out of data, and repeats its last batch.
  if (batches[0]->count == 0 || !process.all_reduce->has_data(is_shared() ? layer_ : nullptr)) {
    return false;
  }
  if (recomputes_ && running_->is_recomputed(settings_.place, number_, batches)) return false;
  const auto update = [&](auto zero) {
    using P = decltype(zero);
    const auto values = [&](int i) { return static_cast<P*>(running[i]); };
    running_->update<P>(batches, settings_.running,
                        {values(kRunningMean), values(kRunningVar), values(kNumBatches)});
  };
  if (has_double_parameters(dtype)) {
    update(double{});
  } else {
    update(float{});
  }
  return true;
}

void Call::write_statistics(const Arrays& arrays, int array, int request,
                            const std::vector<BatchPtr>& batches,
                            double Statistics::* which) const {
  // Outside training there is one batch, whatever the number of virtual devices.
  const int64_t rows = std::max(1, settings_.virtual_devices);
  const auto channels = static_cast<int64_t>(batches[0]->channels.size());
  write_values(arrays, array, request, DType::kFloat64, rows * channels, [&](int64_t i) {
    const size_t row = batches.size() == 1 ? 0 : static_cast<size_t>(i / channels);
    return batches[row]->channels[i % channels].*which;
  });
}

}  // namespace gluon_syncbn
