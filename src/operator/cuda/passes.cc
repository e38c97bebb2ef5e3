#include "cuda/passes.h"

#include <algorithm>
#include <cstring>
#include <memory>

namespace gluon_syncbn {
namespace {

constexpr int64_t kDoubles = sizeof(Statistics) / sizeof(double);
constexpr int64_t kSumsDoubles = sizeof(ChannelSums) / sizeof(double);
constexpr int kArrays = 3;

// The running arrays, and copies of them on the host.
struct Running {
  void* device[kArrays];
  void* host[kArrays] = {};
  int64_t sizes[kArrays], value_size;

  Running(const GpuForward& task, int64_t C)
      : sizes{C, C, 1},
        value_size(has_double_parameters(task.dtype) ? sizeof(double) : sizeof(float)) {
    std::copy_n(task.running, kArrays, device);
  }

  // The copies are valid after the next wait. To be called after queueing kernels, which small
  // copies would delay.
  void fetch(CudaPass* pass) {
    for (int i = 0; i < kArrays; ++i) {
      const auto* const from = static_cast<const char*>(device[i]);
      if (from) host[i] = pass->fetch(from, sizes[i] * value_size);
    }
  }
};

// The statistics of each part, over all devices if they synchronize.
std::vector<BatchPtr> batches_of(CudaPass* pass, const GpuForward& task, Running* running) {
  const int64_t C = task.parts[0].view.C, count = static_cast<int64_t>(task.parts.size());
  ChannelSums* const on_device = pass->on_device<ChannelSums>(count * C);
  for (int64_t i = 0; i < count; ++i) {
    pass->forward_sums(task.parts[i].view, task.parts[i].x, on_device + i * C);
  }
  ChannelSums* sums = pass->fetch(on_device, count * C);
  running->fetch(pass);
  pass->wait();
  std::vector<BatchPtr> batches;
  for (const ForwardShard& part : task.parts) {
    Batch batch{std::vector<Statistics>(static_cast<size_t>(C))};
    batch.count = static_cast<double>(part.view.N * part.view.S);
    if (task.all_reduce) task.all_reduce(sums, &batch.count);
    for (int64_t c = 0; c < C; ++c) {
      batch.channels[c] = batch_statistics(sums[c], batch.count, task.epsilon);
    }
    batches.push_back(std::make_shared<const Batch>(std::move(batch)));
    sums += C;
  }
  return batches;
}

// Uploads the statistics and the updated running statistics in one copy.
const Statistics* upload(CudaPass* pass, const GpuForward& task,
                         const std::vector<BatchPtr>& batches, const Running& running,
                         Deliveries* deliveries) {
  const int64_t C = task.parts[0].view.C, count = static_cast<int64_t>(batches.size());
  const bool update = task.update(batches, running.host);
  double* const values = pass->on_host<double>(count * C * kDoubles + 2 * C + 1);
  double* next = values;
  for (const BatchPtr& batch : batches) {
    std::memcpy(next, batch->channels.data(), batch->channels.size() * sizeof(Statistics));
    next += C * kDoubles;
  }
  for (int i = 0; i < kArrays && update; ++i) {
    for (int64_t c = 0; running.host[i] && c < running.sizes[i]; ++c) {
      *next++ = parameter(task.dtype, running.host[i], c);
    }
  }
  const double* const copy = pass->upload(values, next - values);
  const double* from = copy + count * C * kDoubles;
  for (int i = 0; i < kArrays && update; ++i) {
    if (!running.host[i]) continue;
    const int64_t size = running.sizes[i];
    deliveries->items[deliveries->size++] = {
        from, size, 1, running.device[i], size, has_double_parameters(task.dtype), false};
    from += size;
  }
  return reinterpret_cast<const Statistics*>(copy);
}

}  // namespace

std::vector<BatchPtr> forward_on_gpu(const GpuForward& task) {
  CudaPass pass(task.device, task.dtype, task.what);
  const ForwardShard& first = task.parts[0];
  const int64_t C = first.view.C, count = static_cast<int64_t>(task.parts.size());
  Running running(task, C);
  std::vector<BatchPtr> batches;
  Deliveries deliveries;
  const Statistics* statistics;
  if (task.from_batch) {
    batches = batches_of(&pass, task, &running);
    statistics = upload(&pass, task, batches, running, &deliveries);
  } else {
    statistics = pass.given_statistics(C, task.running[0], task.running[1], task.epsilon);
  }

  const auto deliver = [&](const Result& result, const double* from) {
    if (!result.to) return;
    deliveries.items[deliveries.size++] = {from,          count * C, kDoubles,  result.to,
                                           task.rows * C, true,      result.add};
  };
  deliver(task.mean, &statistics->mean);
  deliver(task.inv_std, &statistics->inv_std);
  const int64_t size = pass.coefficients_size(C);
  char* const coefficients = first.y ? pass.on_device<char>(count * size) : nullptr;
  pass.finish_forward(
      {C, count, statistics, first.gamma, first.beta, first.epilogue, coefficients, size},
      deliveries);
  for (int64_t i = 0; i < count && coefficients; ++i) {
    pass.normalize(task.parts[i], coefficients + i * size);
  }
  if (!task.from_batch) running.fetch(&pass);
  // MXNet reads the results as soon as this call returns.
  pass.finish();

  if (!task.from_batch) {
    Batch batch{std::vector<Statistics>(static_cast<size_t>(C))};
    for (int64_t c = 0; c < C; ++c) {
      batch.channels[c] = given_statistics(parameter(task.dtype, running.host[0], c),
                                           parameter(task.dtype, running.host[1], c), task.epsilon);
    }
    batches.push_back(std::make_shared<const Batch>(std::move(batch)));
  }
  return batches;
}

void backward_on_gpu(const GpuBackward& task) {
  CudaPass pass(task.device, task.dtype, task.what);
  const BackwardShard& first = task.parts[0];
  const int64_t C = first.view.C, count = static_cast<int64_t>(task.parts.size());
  // The statistics and the counts of this device, for one copy.
  double* const known = pass.on_host<double>(count * (C * kDoubles + 1));
  double* const known_counts = known + count * C * kDoubles;
  for (int64_t i = 0; i < count; ++i) {
    const std::vector<Statistics>& channels = task.batches[i]->channels;
    std::memcpy(known + i * C * kDoubles, channels.data(), channels.size() * sizeof(Statistics));
    known_counts[i] = static_cast<double>(task.parts[i].view.N * task.parts[i].view.S);
  }
  const double* const known_on_device = pass.upload(known, count * (C * kDoubles + 1));
  const auto* const statistics = reinterpret_cast<const Statistics*>(known_on_device);
  const bool wanted = first.dx || first.dresidual, gated = is_gated(first);
  const int64_t size = pass.coefficients_size(C);
  char* const coefficients = wanted || gated ? pass.on_device<char>(count * size) : nullptr;
  Statistics* const recovered =
      first.recovers_x() ? pass.on_device<Statistics>(count * C) : nullptr;
  if (gated) {
    pass.start_backward({C, count, statistics, first.gamma, first.beta, first.epilogue,
                         first.y != nullptr, coefficients, size, recovered});
  }
  const Statistics* const used = recovered ? recovered : statistics;
  ChannelSums* const own = pass.on_device<ChannelSums>(count * C);
  for (int64_t i = 0; i < count; ++i) {
    pass.backward_sums(task.parts[i], used + i * C, coefficients + i * size, own + i * C);
  }

  // Null if statistics are constants.
  const ChannelSums* all = nullptr;
  const double* counts = nullptr;
  if (task.from_batch) {
    all = own;
    counts = known_on_device + count * C * kDoubles;
    if (task.all_reduce) {
      // The sums and counts of all devices, for one copy.
      double* const reduced = pass.on_host<double>(count * (C * kSumsDoubles + 1));
      double* const reduced_counts = reduced + count * C * kSumsDoubles;
      auto* const sums = reinterpret_cast<ChannelSums*>(reduced);
      pass.fetch_to(sums, own, count * C);
      pass.wait();
      std::copy_n(known_counts, count, reduced_counts);
      for (int64_t i = 0; i < count; ++i) task.all_reduce(sums + i * C, reduced_counts + i);
      const double* const reduced_on_device = pass.upload(reduced, count * (C * kSumsDoubles + 1));
      all = reinterpret_cast<const ChannelSums*>(reduced_on_device);
      counts = reduced_on_device + count * C * kSumsDoubles;
    }
  }

  pass.finish_backward({C, count, statistics, used, first.gamma, first.epilogue, own, all, counts,
                        gated, coefficients, size, task.dgamma.to, task.dbeta.to, task.dgamma.add,
                        task.dbeta.add});
  for (int64_t i = 0; i < count && wanted; ++i) {
    pass.input_gradient(task.parts[i], coefficients + i * size);
  }
  pass.finish();
}

}  // namespace gluon_syncbn
