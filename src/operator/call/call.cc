// A forward or backward: checks, a task of MXNet's arrays, and three steps, in synchronize(): this
// device's sums, the sums of all devices, and the results. Every error ends up in run(), which
// tells the devices that wait, and the arrays.
#include "call/call.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <stdexcept>
#include <utility>

#include "call/globals.h"
#include "cpu/pass.h"
#include "cuda/pass.h"
#include "mxnet/operations.h"

namespace gluon_syncbn {
namespace {

// The offsets of a callback's arrays, CustomOp of MXNet's custom.cc: in forward inputs, outputs,
// auxiliary states; in backward gradients of outputs, inputs, outputs, gradients of inputs.
constexpr int kBackwardInputs = kNumOutputs;

Result result(const Arrays& arrays, int array, int request) {
  return {request == kNullOp ? nullptr : arrays.data(array), request == kAddTo};
}

// Null stays null.
template <typename... T>
void advance_all(int64_t bytes, T*&... values) {
  // Via const char*, as T may be const or not.
  ((values = values ? const_cast<char*>(static_cast<const char*>(values)) + bytes : values), ...);
}

void advance(ForwardShard* part, int64_t bytes) {
  advance_all(bytes, part->x, part->residual, part->y);
}

void advance(BackwardShard* part, int64_t bytes) {
  advance_all(bytes, part->dy, part->x, part->y, part->dx, part->dresidual);
}

// Cuts a batch into the chunks of virtual devices. The first ones are larger by one sample if the
// samples do not divide evenly. Samples are on axis 0, so a chunk is contiguous: the whole shard
// with fewer samples, and pointers further on. Nothing is copied.
template <typename Part>
std::vector<Part> cut(const Part& whole, DType dtype, int64_t samples, int virtual_devices) {
  if (samples < virtual_devices) {
    throw std::runtime_error(
        "VirtualBatchNorm was made with virtual_devices=" + std::to_string(virtual_devices) +
        ", and its data has " + std::to_string(samples) +
        " samples. Give it at least one sample for each virtual device.");
  }
  const int64_t size = samples / virtual_devices, larger = samples % virtual_devices;
  const int64_t bytes_per_sample =
      whole.view.size() / samples * static_cast<int64_t>(size_of(dtype));
  std::vector<Part> chunks;
  for (int64_t i = 0, begin = 0; i < virtual_devices; ++i) {
    const int64_t count = size + (i < larger ? 1 : 0);
    Part chunk = whole;
    chunk.view.N = whole.view.N / samples * count;
    advance(&chunk, begin * bytes_per_sample);
    chunks.push_back(chunk);
    begin += count;
  }
  return chunks;
}

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

Call::~Call() { drop(); }

void Call::drop() {
  if (std::exchange(is_alive_, false)) globals.rendezvous->drop(layer_, id_, device_);
}

int Call::forward(Arrays* arrays, const int* requests, bool is_train) {
  return run(arrays, outputs_ + kOutput, kNumOutputs, requests, Direction::kForward,
             [&] { forward_pass(*arrays, requests, is_train); });
}

int Call::backward(Arrays* arrays, const int* requests) {
  return run(arrays, gradients_ + kData, attributes_.inputs(), requests, Direction::kBackward,
             [&] { backward_pass(*arrays, requests); });
}

int Call::run(Arrays* arrays, int written, int count, const int* requests, Direction direction,
              const std::function<void()>& work) {
  std::string text;
  try {
    work();
    return 1;
  } catch (const Error& error) {
    text = error.what();
  } catch (const std::exception& error) {
    text = title() + ": " + error.what();
    if (id_.meets) globals.rendezvous->fail(layer_, text);
  }
  // Under MXNet's naive engine arrays hold no errors: an exception goes straight up to the caller.
  if (globals.naive_engine) {
    globals.rendezvous->recover();
    throw dmlc::Error(text);
  }
  // Once the user has waited for one result, MXNet forgets the error and goes on with the values of
  // the others.
  for (int i = 0; i < count && has_kernels(); ++i) clear(*arrays, written + i, requests[i]);
  report_error(arrays->handle(written), text);
  if (layer_ && direction == Direction::kForward) globals.rendezvous->reported(layer_, device_);
  return 1;
}

std::string Call::title() const {
  return attributes_.block_name() +
         (layer_ ? " '" + globals.rendezvous->config(layer_).name + "'" : "") + " on " + device_;
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
  if (globals.onednn && attributes_.gpu_only) {
    throw std::runtime_error(
        "the graph was traced for GPUs. Call net.hybridize() again after the net was moved to "
        "another kind of device.");
  }
}

void Call::check_layer() const {
  if (layer_) return;
  throw std::runtime_error(
      "the layer of this graph does not exist in this process: the graph was loaded from a file, "
      "or its layer was deleted. To train a net, call gluon_syncbn.convert_sync_batchnorm(net), or "
      "build it again and load its parameters. To train a symbol, bind an mx.mod.Module, not an "
      "executor.");
}

void Call::check_engine() const {
  if (globals.naive_engine && globals.rendezvous->config(layer_).meeting_size() > 1) {
    throw std::runtime_error(
        "it cannot synchronize devices under MXNET_ENGINE_TYPE=NaiveEngine, where a "
        "call ends before the next begins. Use one device, or unset MXNET_ENGINE_TYPE.");
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
  drop();
  // So that a backward after a failed forward finds none.
  channels_ = 0;
  kept_ = {};
  id_ = {};
  from_batch_ = is_train && !attributes_.use_global_stats;
  if (is_shared()) {
    id_.meets = true;
    check_layer();
    check_engine();
    // Before anything that may fail on this device only: so the others know which call has failed.
    id_ = globals.rendezvous->next_call(layer_, device_, attributes_.node);
    is_alive_ = true;
  } else if (from_batch_) {
    globals.rendezvous->check_step();
  }
  check_device();
  const View view = arrays.view(kData, attributes_.axis);
  dtype_ = arrays.dtype(kData);
  if (from_batch_ && view.size() == 0 && !others_of_batch().exist) {
    throw std::runtime_error(arrays.text(kData) +
                             " holds no values, and no other device or process shares its "
                             "statistics. Do not train the net with it.");
  }
  if (requests[kOutput] == kAddTo && attributes_.needs_y()) {
    throw std::runtime_error(
        "backward reads y, and y was requested to be added to another array: request it with "
        "'write'.");
  }
  if (from_batch_ && attributes_.running.cumulative) check_count(arrays);
  synchronize(Direction::kForward, forward_task(arrays, requests, view));
  channels_ = view.C;
}

void Call::backward_pass(const Arrays& arrays, const int* requests) {
  check_device();
  // That of dy, as x may not be there.
  const View view = arrays.view(kOutput, attributes_.axis);
  if (channels_ != view.C) {
    throw std::runtime_error("this backward goes through a forward that has failed.");
  }
  if (from_batch_) globals.rendezvous->check_step();
  if (view.size() == 0 && !from_batch_) {
    for (const int input : {kGamma, kBeta}) clear(arrays, gradients_ + input, requests[input]);
    return;
  }
  synchronize(Direction::kBackward, backward_task(arrays, requests, view));
}

void Call::check_values(double count) const {
  static std::atomic<bool> has_warned{false};
  if (count != 1 || has_warned.exchange(true)) return;
  globals.rendezvous->warn(title() +
                           " trains on one value per channel: the variance is 0, and y is beta, "
                           "whatever x is. Give it more samples in a step, or freeze it: see "
                           "gluon_syncbn.freeze.");
}

template <typename Task>
void Call::synchronize(Direction direction, const Task& task) {
  const Others others = others_of_batch();
  const std::unique_ptr<Pass> pass = gpu_ < 0 ? cpu_pass(task) : gpu_pass(gpu_, others.gpus, task);
  const bool is_forward = direction == Direction::kForward && task.from_batch;
  if (!others.exist) {
    if (is_forward) {
      check_values(std::min(count_of(task.parts.front()), count_of(task.parts.back())));
    }
    return pass->alone();
  }
  const PassSums own = pass->sums();
  const PassSums all =
      globals.rendezvous->reduce(layer_, id_, direction, device_, name_of(dtype_), own);
  if (is_forward) check_values(all.count);
  pass->finish(all);
}

Call::Others Call::others_of_batch() const {
  if (!is_shared()) return {};
  const Members all = globals.rendezvous->members_of(layer_, id_, device_);
  Others others{all.count > 1 || all.spans_processes, {}};
  if (gpu_ < 0 || !others.exist || all.spans_processes || all.count > kMaxDevices) return others;
  for (const std::string& device : all.devices) others.gpus.push_back(gpu_of(device));
  const bool has_cpus = std::count(others.gpus.begin(), others.gpus.end(), -1) > 0;
  if (has_cpus) others.gpus.clear();
  return others;
}

template <typename Shard>
void Call::set_parts(const Arrays& arrays, int data, const Shard& whole,
                     PassTask<Shard>* task) const {
  task->dtype = dtype_;
  task->what = arrays.text(data);
  task->from_batch = from_batch_;
  task->parts = {whole};
  if (!from_batch_ || !attributes_.virtual_devices) return;
  task->parts = cut(whole, dtype_, arrays.samples(data), attributes_.virtual_devices);
}

ForwardTask Call::forward_task(const Arrays& arrays, const int* requests, const View& view) {
  ForwardShard whole;
  whole.view = view;
  whole.x = arrays.data(kData);
  whole.gamma = gamma(arrays.data(kGamma));
  whole.beta = arrays.data(kBeta);
  if (attributes_.residual) whole.residual = arrays.data(kResidual);
  whole.epilogue = attributes_.epilogue;
  if (view.size() > 0) whole.y = result(arrays, outputs_ + kOutput, requests[kOutput]).to;
  whole.mode = write_mode_of(requests[kOutput]);
  ForwardTask task;
  set_parts(arrays, kData, whole, &task);
  task.epsilon = attributes_.epsilon;
  for (const int i : {kRunningMean, kRunningVar, kNumBatches}) {
    const bool exists = i != kNumBatches || attributes_.running.cumulative;
    if (exists) task.running[i] = arrays.data(running_arrays_ + i);
  }
  task.updates = globals.rendezvous->moves_running_statistics(is_shared() ? layer_ : nullptr);
  task.rule = attributes_.running;
  task.mean = result(arrays, outputs_ + kMean, requests[kMean]);
  task.inv_std = result(arrays, outputs_ + kInvStd, requests[kInvStd]);
  task.rows = std::max(1, attributes_.virtual_devices);
  task.kept = &kept_;
  return task;
}

BackwardTask Call::backward_task(const Arrays& arrays, const int* requests,
                                 const View& view) const {
  const auto input = [&](int i, bool needed) -> const void* {
    return needed ? arrays.data(kBackwardInputs + i) : nullptr;
  };
  // A device that wants no gradient still synchronizes, as others may want theirs.
  const auto gradient = [&](int i) { return result(arrays, gradients_ + i, requests[i]); };
  const auto input_gradient = [&](int i) { return view.size() > 0 ? gradient(i).to : nullptr; };
  BackwardShard whole;
  whole.view = view;
  whole.dy = arrays.data(kOutput);
  whole.x = input(kData, attributes_.needs_x());
  whole.y = input(attributes_.inputs() + kOutput, attributes_.needs_y());
  whole.gamma = gamma(input(kGamma, true));
  whole.beta = input(kBeta, attributes_.needs_beta());
  whole.epilogue = attributes_.epilogue;
  whole.dx = input_gradient(kData);
  whole.mode = write_mode_of(requests[kData]);
  if (attributes_.residual) {
    whole.dresidual = input_gradient(kResidual);
    whole.residual_mode = write_mode_of(requests[kResidual]);
  }
  BackwardTask task;
  set_parts(arrays, kOutput, whole, &task);
  task.kept = kept_;
  task.dgamma = gradient(kGamma);
  task.dbeta = gradient(kBeta);
  return task;
}

}  // namespace gluon_syncbn
