// A pass queues its kernels and waits for them at its end. GpuPass is the way of the sums to other
// devices and back; GpuForward and GpuBackward queue what is between, and what follows: one small
// kernel for all that there is per channel, and then y or dx.
#include "cuda/pass.h"

#include <algorithm>

namespace gluon_syncbn {
namespace {

// What forward and backward have in common: how sums leave the device and come back. Constructors
// take all memory, so that a device for which it is too little fails before it meets others.
template <typename Task>
class GpuPass : public Pass {
 public:
  PassSums sums() override {
    const double count = count_of(task_.parts[0]);
    if (count > 0) {
      sum();
    } else {
      cuda_.clear(own_, static_cast<size_t>(C_) * sizeof(ChannelSums));
    }
    if (!gpus_.empty()) return {C_, count, {}, {cuda_.share(own_, C_, count, gpus_)}};
    on_host_ = cuda_.fetch(own_, C_);
    cuda_.wait();
    return {C_, count, {on_host_, on_host_ + C_}, {}};
  }

  void finish(const PassSums& all) override {
    cuda_.resume();
    SumsOfDevices received;
    if (all.on_gpus.empty()) {
      std::copy(all.on_host.begin(), all.on_host.end(), on_host_);
      cuda_.upload(reduced_, on_host_, C_);
      received = {1, {reduced_}};
    }
    for (const SharedSums& each : all.on_gpus) {
      received.each[received.size++] = cuda_.wait_for(each) ? each.sums : own_;
    }
    write(received, {all.count, all.count, 1});
  }

  void alone() override {
    sum();
    write(task_.from_batch ? SumsOfDevices{1, {own_}} : SumsOfDevices{}, counts_of(task_.parts));
  }

 protected:
  GpuPass(int device, const std::vector<int>& gpus, const Task& task, bool has_coefficients)
      : task_(task),
        gpus_(gpus),
        C_(task.parts[0].view.C),
        batches_(static_cast<int64_t>(task.parts.size())),
        cuda_(device, task.dtype, task.what),
        coefficients_size_(cuda_.coefficients_size(C_)),
        coefficients_(has_coefficients ? cuda_.on_device<char>(batches_ * coefficients_size_)
                                       : nullptr),
        own_(cuda_.on_device<ChannelSums>(batches_ * C_)),
        reduced_(gpus.empty() ? cuda_.on_device<ChannelSums>(C_) : nullptr) {}

  // What both directions ask of the finish kernel.
  template <typename F>
  F finish_task(const ForBackward& kept, const SumsOfDevices& all,
                const BatchCounts& counts) const {
    F task(task_.parts[0], batches_, kept);
    task.sums = all;
    task.counts = counts;
    task.coefficients = coefficients_;
    task.coefficients_stride = coefficients_size_;
    return task;
  }

  // Queues the sums of all parts.
  virtual void sum() = 0;
  // Writes all results, given the sums of all devices; without any, statistics are constant.
  virtual void write(const SumsOfDevices& all, const BatchCounts& counts) = 0;

  const Task task_;
  const std::vector<int> gpus_;
  const int64_t C_, batches_;
  CudaStream cuda_;
  const int64_t coefficients_size_;
  // Null if they are not needed.
  char* const coefficients_;
  ChannelSums* const own_;

 private:
  ChannelSums* const reduced_;
  ChannelSums* on_host_ = nullptr;
};

class GpuForward : public GpuPass<ForwardTask> {
 public:
  GpuForward(int device, const std::vector<int>& gpus, const ForwardTask& task)
      : GpuPass(device, gpus, task, task.parts[0].y != nullptr), kept_(room_for_kept()) {}

 private:
  void sum() override {
    for (int64_t i = 0; i < batches_ && task_.from_batch; ++i) {
      cuda_.forward_sums(task_.parts[i].view, task_.parts[i].x, own_ + i * C_);
    }
  }

  void write(const SumsOfDevices& all, const BatchCounts& counts) override {
    // Known only now, as other processes may have all values, or none.
    const bool updates = task_.from_batch && task_.updates && counts.first > 0;
    cuda_.finish_forward(coefficients_task(all, counts, updates));
    if (updates && task_.running[2]) cuda_.count_batch(task_.running[2]);
    for (int64_t i = 0; i < batches_ && coefficients_; ++i) {
      cuda_.normalize(task_.parts[i], coefficients_ + i * coefficients_size_);
    }
    // MXNet reads the results as soon as this call returns.
    cuda_.finish();
    *task_.kept = kept_;
  }

  Kept room_for_kept() {
    static_assert(sizeof(Gate<double>) <= sizeof(Statistics), "Gates have the room of statistics.");
    const int64_t size = batches_ * C_;
    const Epilogue& epilogue = task_.parts[0].epilogue;
    const bool activates = epilogue.activation != Activation::kNone;
    const bool from_y = epilogue.least_gamma > 0;
    Kept kept;
    kept.memory = cuda_.keep<Statistics>((1 + activates + from_y) * size);
    kept.statistics = kept.memory.get();
    kept.gates = activates ? kept.statistics + size : nullptr;
    kept.of_z = from_y ? kept.statistics + (1 + activates) * size : nullptr;
    return kept;
  }

  ForwardFinish coefficients_task(const SumsOfDevices& all, const BatchCounts& counts,
                                  bool updates) const {
    auto task = finish_task<ForwardFinish>(kept_, all, counts);
    task.beta = task_.parts[0].beta;
    task.reads_y = task_.parts[0].residual || kept_.of_z;
    task.epsilon = task_.epsilon;
    task.saved = {static_cast<double*>(task_.mean.to), static_cast<double*>(task_.inv_std.to),
                  task_.mean.add, task_.inv_std.add, task_.rows * C_};
    if (updates) {
      const auto [mean, variance, num_batches] = task_.running;
      task.running = {mean, variance, num_batches, task_.rule.momentum, task_.rule.unbiased};
    }
    if (!task_.from_batch) {
      task.mean = task_.running[0];
      task.variance = task_.running[1];
    }
    return task;
  }

  const Kept kept_;
};

class GpuBackward : public GpuPass<BackwardTask> {
 public:
  GpuBackward(int device, const std::vector<int>& gpus, const BackwardTask& task)
      : GpuPass(device, gpus, task, task.parts[0].dx || task.parts[0].dresidual) {}

 private:
  void sum() override {
    for (int64_t i = 0; i < batches_; ++i) {
      cuda_.backward_sums(task_.parts[i], task_.kept, i, own_ + i * C_);
    }
  }

  void write(const SumsOfDevices& all, const BatchCounts& counts) override {
    auto task = finish_task<BackwardFinish>(task_.kept, all, counts);
    task.own_sums = own_;
    task.gated = is_gated(task_.parts[0]);
    task.dgamma = task_.dgamma.to;
    task.add_dgamma = task_.dgamma.add;
    task.dbeta = task_.dbeta.to;
    task.add_dbeta = task_.dbeta.add;
    cuda_.finish_backward(task);
    for (int64_t i = 0; i < batches_ && coefficients_; ++i) {
      cuda_.input_gradient(task_.parts[i], coefficients_ + i * coefficients_size_);
    }
    cuda_.finish();
  }
};

}  // namespace

std::unique_ptr<Pass> gpu_pass(int device, const std::vector<int>& gpus, const ForwardTask& task) {
  return std::make_unique<GpuForward>(device, gpus, task);
}

std::unique_ptr<Pass> gpu_pass(int device, const std::vector<int>& gpus, const BackwardTask& task) {
  return std::make_unique<GpuBackward>(device, gpus, task);
}

}  // namespace gluon_syncbn
