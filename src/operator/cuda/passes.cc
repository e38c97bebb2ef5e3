#include "cuda/passes.h"

#include <algorithm>
#include <cstring>
#include <exception>
#include <memory>

namespace gluon_syncbn {
namespace {

constexpr int64_t kDoubles = sizeof(Statistics) / sizeof(double);
constexpr int kArrays = 3;

template <typename Shard>
double count_of(const Shard& part) {
  return static_cast<double>(part.view.N * part.view.S);
}

// The sizes of the running arrays: mean, variance, and number of batches.
int64_t running_size(int array, int64_t C) { return array < 2 ? C : 1; }

// Writes all running arrays, from contiguous doubles.
void deliver_running(const GpuForward& task, const double* from, Deliveries* deliveries) {
  const int64_t C = task.parts[0].view.C;
  const bool is_double = has_double_parameters(task.dtype);
  for (int i = 0; i < kArrays; ++i) {
    const int64_t size = running_size(i, C);
    if (!task.running[i]) continue;
    deliveries->items[deliveries->size++] = {from + i * C, size,      1,    task.running[i],
                                             size,         is_double, false};
  }
}

// Memory for what backward needs, and, if the statistics come from the host, for the running
// statistics before and after the update.
KeptOnGpu room_for(CudaPass* pass, const GpuForward& task) {
  static_assert(sizeof(Gate<double>) <= sizeof(Statistics), "Gates have the room of statistics.");
  const int64_t C = task.parts[0].view.C, size = static_cast<int64_t>(task.parts.size()) * C;
  const int64_t running = task.update_on_host ? 2 * C : 0;
  const Epilogue& epilogue = task.parts[0].epilogue;
  const bool activates = epilogue.activation != Activation::kNone;
  const bool recovers_x = epilogue.least_gamma > 0;
  KeptOnGpu kept;
  kept.memory = pass->keep<Statistics>(size + running + (activates + recovers_x) * size);
  kept.statistics = kept.memory.get();
  Statistics* const behind = kept.statistics + size + running;
  kept.gates = activates ? behind : nullptr;
  kept.of_z = recovers_x ? behind + size : nullptr;
  return kept;
}

// The statistics of each part, over all devices if they synchronize. Copies the running arrays to
// the host.
std::vector<BatchPtr> batches_on_host(CudaPass* pass, const GpuForward& task,
                                      void* (&running)[kArrays]) {
  const int64_t C = task.parts[0].view.C, count = static_cast<int64_t>(task.parts.size());
  ChannelSums* const on_device = pass->on_device<ChannelSums>(count * C);
  for (int64_t i = 0; i < count; ++i) {
    pass->forward_sums(task.parts[i].view, task.parts[i].x, on_device + i * C);
  }
  ChannelSums* sums = pass->fetch(on_device, count * C);
  // Queued after the kernels, which small copies would delay.
  const size_t value_size = has_double_parameters(task.dtype) ? sizeof(double) : sizeof(float);
  for (int i = 0; i < kArrays; ++i) {
    const auto* const from = static_cast<const char*>(task.running[i]);
    if (from) running[i] = pass->fetch(from, running_size(i, C) * value_size);
  }
  pass->wait();
  std::vector<BatchPtr> batches;
  for (const ForwardShard& part : task.parts) {
    Batch batch{std::vector<Statistics>(static_cast<size_t>(C))};
    batch.count = count_of(part);
    if (task.together.reduce) {
      pass->outside([&] { task.together.reduce(sums, &batch.count); });
    }
    for (int64_t c = 0; c < C; ++c) {
      batch.channels[c] = batch_statistics(sums[c], batch.count, task.epsilon);
    }
    batches.push_back(std::make_shared<const Batch>(std::move(batch)));
    sums += C;
  }
  return batches;
}

// Sends the statistics, and the running statistics before and after the update, to the device in
// one copy. Returns the running statistics before it, or null without an update.
const double* from_host(CudaPass* pass, const GpuForward& task, Statistics* statistics,
                        Deliveries* deliveries) {
  const int64_t C = task.parts[0].view.C, all_running = 2 * C + 1;
  void* running[kArrays] = {};
  const std::vector<BatchPtr> batches = batches_on_host(pass, task, running);
  const int64_t size = static_cast<int64_t>(batches.size()) * C * kDoubles;
  double* const values = pass->on_host<double>(size + 2 * all_running);
  for (size_t i = 0; i < batches.size(); ++i) {
    std::memcpy(values + i * C * kDoubles, batches[i]->channels.data(), C * sizeof(Statistics));
  }
  const auto write_running = [&](double* to) {
    for (int i = 0; i < kArrays; ++i) {
      for (int64_t c = 0; running[i] && c < running_size(i, C); ++c) {
        to[i * C + c] = parameter(task.dtype, running[i], c);
      }
    }
  };
  write_running(values + size);
  const bool update = task.update_on_host(batches, running);
  write_running(values + size + all_running);
  double* const copy = &statistics->mean;
  pass->upload(copy, values, size + 2 * all_running);
  if (!update) return nullptr;
  deliver_running(task, copy + size + all_running, deliveries);
  return copy + size;
}

// The sums of all devices, for kernels queued later. Adds the counts of the others to *count.
SumsOfDevices sums_of_all(CudaPass* pass, const Together& together, const ChannelSums* own,
                          int64_t C, double* count) {
  if (!together.meet) return {1, {own}};
  const SharedSums mine = pass->share(own, C, *count, together.gpus);
  *count = 0;
  SumsOfDevices all;
  for (const SharedSums& each : pass->outside([&] { return together.meet(mine); })) {
    pass->wait_for(each);
    all.each[all.size++] = each.owner == mine.owner ? own : each.sums;
    *count += each.count;
  }
  return all;
}

}  // namespace

KeptOnGpu forward_on_gpu(const GpuForward& task) {
  CudaPass pass(task.device, task.dtype, task.what);
  const ForwardShard& first = task.parts[0];
  const int64_t C = first.view.C, count = static_cast<int64_t>(task.parts.size());
  const int64_t size = pass.coefficients_size(C);
  const KeptOnGpu kept = room_for(&pass, task);
  char* const coefficients = first.y ? pass.on_device<char>(count * size) : nullptr;
  const bool reads_y = first.residual || kept.of_z;
  ForwardFinish finish{C,       count,        kept, first.gamma, first.beta, first.epilogue,
                       reads_y, coefficients, size, task.epsilon};
  const bool is_double = has_double_parameters(task.dtype);
  Deliveries deliveries, counted;
  const double* before = nullptr;
  if (!task.from_batch) {
    finish.mean = task.running[0];
    finish.variance = task.running[1];
  } else if (task.update_on_host) {
    before = from_host(&pass, task, kept.statistics, &deliveries);
  } else {
    ChannelSums* const own = pass.on_device<ChannelSums>(C);
    pass.forward_sums(first.view, first.x, own);
    finish.count = count_of(first);
    finish.sums = sums_of_all(&pass, task.together, own, C, &finish.count);
    if (task.updates) {
      double* const kept = pass.on_device<double>(2 * C + 2);
      finish.running = {task.running[0],    task.running[1],    task.running[2],
                        task.rule.momentum, task.rule.unbiased, kept};
      if (task.running[2]) {
        counted = {1, {{kept + 2 * C + 1, 1, 1, task.running[2], 1, is_double, false}}};
      }
      before = kept;
    }
  }

  const auto deliver = [&](const Result& result, const double* from) {
    if (!result.to) return;
    deliveries.items[deliveries.size++] = {from,          count * C, kDoubles,  result.to,
                                           task.rows * C, true,      result.add};
  };
  deliver(task.mean, &kept.statistics->mean);
  deliver(task.inv_std, &kept.statistics->inv_std);
  pass.finish_forward(finish, deliveries);
  try {
    if (counted.size > 0) pass.finish_forward({}, counted);
    for (int64_t i = 0; i < count && coefficients; ++i) {
      pass.normalize(task.parts[i], coefficients + i * size);
    }
    // MXNet reads the results as soon as this call returns.
    pass.finish();
  } catch (const std::exception&) {
    if (!before) throw;
    Deliveries restored;
    deliver_running(task, before, &restored);
    try {
      pass.finish_forward({}, restored);
      pass.finish();
    } catch (const std::exception&) {
      // The device and its memory are lost.
    }
    throw;
  }
  return kept;
}

void backward_on_gpu(const GpuBackward& task) {
  CudaPass pass(task.device, task.dtype, task.what);
  const BackwardShard& first = task.parts[0];
  const int64_t C = first.view.C, count = static_cast<int64_t>(task.parts.size());
  const bool wanted = first.dx || first.dresidual;
  const int64_t size = pass.coefficients_size(C);
  char* const coefficients = wanted ? pass.on_device<char>(count * size) : nullptr;
  ChannelSums* const own = pass.on_device<ChannelSums>(count * C);
  for (int64_t i = 0; i < count; ++i) {
    pass.backward_sums(task.parts[i], task.kept, i, own + i * C);
  }

  SumsOfDevices all;
  BatchCounts counts{count_of(first), count_of(task.parts.back()), 0};
  while (counts.firsts < count && count_of(task.parts[counts.firsts]) == counts.first) {
    ++counts.firsts;
  }
  if (task.from_batch && task.together.reduce) {
    ChannelSums* const sums = pass.fetch(own, C);
    pass.wait();
    pass.outside([&] { task.together.reduce(sums, &counts.first); });
    ChannelSums* const reduced = pass.on_device<ChannelSums>(C);
    pass.upload(reduced, sums, C);
    all = {1, {reduced}};
  } else if (task.from_batch) {
    all = sums_of_all(&pass, task.together, own, C, &counts.first);
  }

  pass.finish_backward({C, count, task.kept, first.gamma, first.epilogue, own, all, counts,
                        is_gated(first), coefficients, size, task.dgamma.to, task.dbeta.to,
                        task.dgamma.add, task.dbeta.add});
  for (int64_t i = 0; i < count && wanted; ++i) {
    pass.input_gradient(task.parts[i], coefficients + i * size);
  }
  pass.finish();
}

}  // namespace gluon_syncbn
