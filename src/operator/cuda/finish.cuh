// The kernels of one thread per channel: between the sums and y or dx, they compute the statistics,
// the coefficients of map.cuh and all small arrays.
#ifndef GLUON_SYNCBN_CUDA_FINISH_CUH_
#define GLUON_SYNCBN_CUDA_FINISH_CUH_

#include "cuda/map.cuh"

namespace gluon_syncbn {

template <typename P>
SBN_DEVICE void store_parameter(P* to, double value, bool add) {
  const auto rounded = static_cast<P>(value);
  *to = add ? *to + rounded : rounded;
}

SBN_DEVICE int64_t global_thread() {
  return static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
}

// The effective gamma of channel c.
template <typename A, typename Task>
SBN_DEVICE double gamma_of(const Task& task, int64_t c) {
  return task.gamma ? effective_gamma(static_cast<const A*>(task.gamma)[c], task.epilogue) : 1.0;
}

// In rank order, as on the host.
SBN_DEVICE ChannelSums sum_of(const SumsOfDevices& devices, int64_t i) {
  ChannelSums sums;
  for (int d = 0; d < devices.size; ++d) sums.add(devices.each[d][i]);
  return sums;
}

// The statistics of channel i % C in batch b = i / C.
SBN_DEVICE Statistics statistics_of(const ForwardFinish& task, int64_t i, int64_t b) {
  return batch_statistics(sum_of(task.sums, i), task.counts.of(b), task.epsilon);
}

// Of channel c. The thread has written the statistics of the first batch, and computes those of
// the others again, which other threads write.
template <typename P>
SBN_DEVICE void update_running(const ForwardFinish& task, int64_t c) {
  const RunningUpdate& running = task.running;
  double momentum = running.momentum;
  if (running.num_batches) {
    momentum = cumulative_momentum(*static_cast<const P*>(running.num_batches) + 1);
  }
  const auto batch = BatchMeans::of(task.batches, task.counts, running.unbiased, [&](int64_t b) {
    return b == 0 ? task.kept.statistics[c] : statistics_of(task, b * task.C + c, b);
  });
  const auto update = [&](void* values, double batch_value) {
    P* const value = static_cast<P*>(values) + c;
    *value = static_cast<P>(moving_average(*value, batch_value, momentum));
  };
  update(running.mean, batch.mean);
  update(running.variance, batch.variance);
}

// The statistics of all devices, the running statistics, the coefficients of y and what backward
// needs for each channel of all batches. `zero` as in Gate.
template <typename A>
__global__ void __launch_bounds__(kThreads) finish_forward(ForwardFinish task, A zero) {
  const int64_t i = global_thread(), size = task.C * task.batches;
  if (i >= size) return;
  // GPUs divide slowly, and there is mostly one batch.
  const int64_t batch = task.batches == 1 ? 0 : i / task.C, c = i - batch * task.C;
  const ForBackward& kept = task.kept;
  // The thread reads the statistics again below.
  if (task.sums.size > 0) {
    kept.statistics[i] = statistics_of(task, i, batch);
    if (task.running.mean && i < task.C) update_running<A>(task, i);
  } else if (task.mean) {
    kept.statistics[i] = given_statistics(static_cast<const A*>(task.mean)[i],
                                          static_cast<const A*>(task.variance)[i], task.epsilon);
  }
  const SavedStatistics& saved = task.saved;
#pragma unroll 1  // There is mostly one.
  for (int64_t k = i; k < saved.size; k += size) {
    if (saved.mean) store_parameter(saved.mean + k, kept.statistics[i].mean, saved.add_mean);
    if (saved.inv_std) {
      store_parameter(saved.inv_std + k, kept.statistics[i].inv_std, saved.add_inv_std);
    }
  }
  const double gamma = gamma_of<A>(task, c);
  const double beta = static_cast<const A*>(task.beta)[c];
  const auto normalize = Normalize<A>::of(kept.statistics[i], gamma, beta);
  if (task.coefficients) {
    char* const to = static_cast<char*>(task.coefficients) + batch * task.coefficients_stride;
    store_affine(normalize, to, c);
  }
  if (kept.gates) {
    const double slope = task.epilogue.slope;
    static_cast<Gate<A>*>(kept.gates)[i] =
        task.reads_y ? Gate<A>::of_y(slope) : Gate<A>::of_x(normalize, zero, slope);
  }
  if (kept.of_z) kept.of_z[i] = statistics_of_normalized(gamma, beta);
}

template <typename P>
__global__ void count_batch(P* num_batches) {
  if (threadIdx.x == 0) *num_batches += 1;
}

// The coefficients of dx, from the sums of all devices, and the gradients of gamma and beta, from
// those of this one, summed over the batches. Without the 4, CUDA 11.2 uses 48 registers on sm_80
// and spills one.
template <typename A>
__global__ void __launch_bounds__(kThreads, 4) finish_backward(BackwardFinish task) {
  const int64_t c = global_thread();
  if (c >= task.C) return;
  double dgamma = 0, dbeta = 0;
  for (int64_t b = 0; b < task.batches; ++b) {
    const int64_t i = b * task.C + c;
    const Statistics s = task.kept.used()[i];
    double first = task.own_sums[i].first.value(), second = task.own_sums[i].second.value();
    dgamma += second * s.inv_std;
    dbeta += first;
    if (!task.coefficients) continue;
    // Not rounded again if there are no other devices, as that takes long.
    if (task.sums.size != 1 || task.sums.each[0] != task.own_sums) {
      const ChannelSums all = sum_of(task.sums, i);
      first = all.first.value();
      second = all.second.value();
    }
    void* const coefficients = static_cast<char*>(task.coefficients) + b * task.coefficients_stride;
    const double factor = gamma_of<A>(task, c) * task.kept.statistics[i].inv_std;
    const double count = task.sums.size > 0 ? task.counts.of(b) : 0;
    const auto affine = InputGradient<A>::of(s, factor, first, second, count);
    if (task.gated) {
      // Without an activation, the gate is always open.
      Gate<A> gate{0, -1, 1};
      if (task.kept.gates) gate = static_cast<const Gate<A>*>(task.kept.gates)[i];
      store_affine(GatedGradient<A>{gate.sign, gate.threshold, affine}, coefficients, c);
    } else {
      store_affine(affine, coefficients, c);
    }
  }
  if (task.dgamma) {
    store_parameter(static_cast<A*>(task.dgamma) + c, task.gamma ? dgamma : 0, task.add_dgamma);
  }
  if (task.dbeta) store_parameter(static_cast<A*>(task.dbeta) + c, dbeta, task.add_dbeta);
}

template <typename T>
int launch_finish_forward(const ForwardFinish& task, Stream stream) {
  SBN_LAUNCH(finish_forward<Arithmetic<T>>, blocks_for(task.C * task.batches), stream, task,
             kLargestZero<T>);
  return cudaGetLastError();
}

template <typename P>
int launch_count_batch(void* num_batches, Stream stream) {
  SBN_LAUNCH(count_batch<P>, 1, stream, static_cast<P*>(num_batches));
  return cudaGetLastError();
}

template <typename A>
int launch_finish_backward(const BackwardFinish& task, Stream stream) {
  SBN_LAUNCH(finish_backward<A>, blocks_for(task.C), stream, task);
  return cudaGetLastError();
}

}  // namespace gluon_syncbn

#endif  // GLUON_SYNCBN_CUDA_FINISH_CUH_
