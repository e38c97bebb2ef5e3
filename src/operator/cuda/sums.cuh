// The sums of a pass over each channel: of x and x^2, or of dy and dy * (x - mean). By one thread:
//
//   ChannelSums sums;
//   for (int64_t n = 0; n < N; ++n) {
//     for (int64_t s = 0; s < S; ++s) {
//       const double value = x[(n * C + c) * S + s];
//       sums.first.add(value);
//       sums.second.add_product(value, value);
//     }
//   }
//
// Sum3 makes the order of the terms immaterial, to the last bit, and takes some fifty
// instructions for double, which are slow on most GPUs, for each value. So a sample is cut into
// *chunks*, and only their sums are added in Sum3. Within a chunk the order is fixed:
//
// 1. A thread adds at most kRun vectors, a *run*, in the arithmetic of the data, relative to the
//    chunk's *origin*, a number near its values (backward: to the mean).
// 2. It adds its runs in double, and the threads of a chunk add theirs by shuffles.
// 3. The chunk's two sums, its origin and its size become a record. `fold` adds the records of a
//    channel in Sum3: sum(x) = sum(x - origin) + size * origin, and likewise sum(x^2).
//
// Why the bits are the same however a batch is split, and on every GPU: chunks, runs and threads
// follow from the shape of a sample (plans.h), and the records are added in Sum3. Why it is exact
// enough: a run has at most eight vectors, whose terms are small, as they are relative to the
// origin; the rest has 53 bits or more. The figures are in docs/precision.md.
//
// The chunks of all samples are *units*; `per_warp` of them are a *slice*. A warp has a slice of a
// *tile* of channels: its threads are a grid, of `across` columns and `lanes` lines. A column has a
// vector of channels, whose chunk its lines share. Planes (S > 1): a vector has values of one
// channel. Rows (S = 1): of neighbouring channels, each with sums of its own.
#ifndef GLUON_SYNCBN_CUDA_SUMS_CUH_
#define GLUON_SYNCBN_CUDA_SUMS_CUH_

#include "cuda/launch.cuh"

namespace gluon_syncbn {

constexpr unsigned kAllLanes = 0xffffffffu;

// The sums of a chunk of one channel: of `size` values. A sector of memory. Backward does not need
// the origin.
struct alignas(32) ChunkSums {
  double first, second, origin, size;
};

struct SumsTask {
  SumsPlan plan;
  const void *dy, *x;
  const Statistics* statistics;
  // Whether vectors of all arrays are at multiples of their size.
  bool aligned;
  // C x plan.records: ChunkSums, or ChannelSums of (N, C) data.
  void* records;
};

// A number near the others, so that rounding errors depend on their spread and not on their offset,
// even if one of them is an outlier.
template <typename A>
SBN_DEVICE A median(A a, A b, A c) {
  const A low = a < b ? a : b, high = a < b ? b : a;
  return c < low ? low : c > high ? high : c;
}

// Two lanes add up two numbers: the upper one gets the sum of `high`, the other that of `low`.
SBN_DEVICE double add_halves(double low, double high, bool upper, int mask) {
  return (upper ? high : low) + __shfl_xor_sync(kAllLanes, upper ? low : high, mask);
}

template <typename T, int kArrays, int kWidth, bool kRows>
__global__ void __launch_bounds__(kThreads, 2)
    sum_chunks(SumsTask task, EpilogueTask<Arithmetic<T>> epilogue) {
  using A = Arithmetic<T>;
  constexpr bool kBackward = kArrays > 1, kGated = kArrays > 2;
  // Channels of a thread; vectors that are loaded before the first is used, limited by registers.
  constexpr int kChannels = kRows ? kWidth : 1, kInFlight = kArrays * kWidth > 16 ? 2 : 4;
  const SumsPlan& plan = task.plan;
  const int lanes = plan.lanes, across = kWarp / lanes, lane = threadIdx.x % kWarp;
  const int line = lane >> plan.log_across, column = lane & (across - 1);
  const uint32_t warp = blockIdx.x * kWarps + threadIdx.x / kWarp;
  if (warp >= plan.warps) return;
  const uint32_t slice = plan.by_tiles(warp), tile = warp - slice * plan.by_tiles.divisor;
  int64_t c = (static_cast<int64_t>(tile) * across + column) * kChannels;
  // A thread without a channel sums the first one for nobody.
  const bool exists = c < plan.C;
  if (!exists) c = 0;

  A origins[kChannels];
  Gates<A, kGated> gates[kChannels];
#pragma unroll
  for (int j = 0; j < kChannels; ++j) {
    if constexpr (kBackward) origins[j] = static_cast<A>(task.statistics[c + j].mean);
    gates[j] = Gates<A, kGated>::of(epilogue, c + j);
  }

  const int64_t step = kRows ? plan.C : kWidth, between = lanes * step;
  const auto end = static_cast<uint32_t>(min(int64_t{slice + 1} * plan.per_warp, plan.units));
  for (uint32_t unit = slice * plan.per_warp; unit < end; ++unit) {
    const uint32_t sample = plan.by_chunks(unit);
    const int begin = static_cast<int>(unit - sample * plan.by_chunks.divisor) * plan.chunk;
    const int vectors = min(plan.chunk, plan.vectors - begin);
    const int64_t at = sample * plan.sample + begin * step + (kRows ? c : c * plan.S);
    const T* const x = static_cast<const T*>(task.x) + at;
    const T* const dy = static_cast<const T*>(task.dy) + at;
    const T* const v = static_cast<const T*>(epilogue.v) + at;
    if constexpr (!kBackward) {
      Vector<T, kChannels> first, middle, last;
      first.load(x, task.aligned);
      middle.load(x + vectors / 2 * step, task.aligned);
      last.load(x + (vectors - 1) * step, task.aligned);
#pragma unroll
      for (int j = 0; j < kChannels; ++j) origins[j] = median(first[j], middle[j], last[j]);
    }

    double firsts[kChannels] = {}, seconds[kChannels] = {};
    for (int i = line; i < vectors; i += kRun * lanes) {
      A run[kWidth] = {}, products[kWidth] = {};
#pragma unroll
      for (int part = 0; part < kRun; part += kInFlight) {
        const int left = vectors - (i + part * lanes);
        const int64_t from = (i + part * lanes) * step;
        Vector<T, kWidth> xs[kInFlight], dys[kInFlight], vs[kInFlight];
#pragma unroll
        for (int k = 0; k < kInFlight; ++k) {
          if (k * lanes >= left) continue;  // With break, nvcc generates more instructions.
          xs[k].load(x + from + k * between, task.aligned);
          if constexpr (kBackward) dys[k].load(dy + from + k * between, task.aligned);
          if constexpr (kGated) vs[k].load(v + from + k * between, task.aligned);
        }
#pragma unroll
        for (int k = 0; k < kInFlight; ++k) {
          if (k * lanes >= left) break;
#pragma unroll
          for (int j = 0; j < kWidth; ++j) {
            const auto& gate = gates[kRows ? j : 0];
            const A decisive = kGated ? vs[k][j] : A{0};
            const A value = gate.x(xs[k][j], decisive) - origins[kRows ? j : 0];
            const A factor = kBackward ? gate.dy(dys[k][j], decisive) : value;
            run[j] += factor;
            products[j] = fma(factor, value, products[j]);
          }
        }
      }
#pragma unroll
      for (int half = kRows ? 0 : kWidth / 2; half > 0; half /= 2) {
#pragma unroll
        for (int j = 0; j < half; ++j) run[j] += run[j + half], products[j] += products[j + half];
      }
#pragma unroll
      for (int j = 0; j < kChannels; ++j) firsts[j] += run[j], seconds[j] += products[j];
    }

    // Rows: line i gets channel i % kChannels.
#pragma unroll
    for (int half = kChannels / 2; half > 0; half /= 2) {
      const bool upper = line & half;
#pragma unroll
      for (int j = 0; j < half; ++j) {
        firsts[j] = add_halves(firsts[j], firsts[j + half], upper, half * across);
        seconds[j] = add_halves(seconds[j], seconds[j + half], upper, half * across);
        origins[j] = upper && !kBackward ? origins[j + half] : origins[j];
      }
    }
    // Half of the lines that share a channel add up the first sums, half the second.
    double first = firsts[0], second = seconds[0];
    if (lanes > kChannels) {
      const int half = lanes / 2;
      const bool upper = line & half;
      double sum = add_halves(first, second, upper, half * across);
      for (int mask = kChannels; mask < half; mask *= 2) {
        sum += __shfl_xor_sync(kAllLanes, sum, mask * across);
      }
      const double other = __shfl_xor_sync(kAllLanes, sum, half * across);
      first = upper ? other : sum, second = upper ? sum : other;
    }
    if (!exists || line >= kChannels) continue;
    const double size = kRows ? vectors : vectors * kWidth;
    static_cast<ChunkSums*>(task.records)[(c + line) * plan.records + unit] = {
        first, second, static_cast<double>(origins[0]), size};
  }
}

// S = R = 1: each value is a sample, and is added in Sum3. A thread has plan.per_warp samples of a
// channel, whose sums are a record.
template <typename T, int kArrays>
__global__ void __launch_bounds__(kThreads, 2)
    sum_values(SumsTask task, EpilogueTask<Arithmetic<T>> epilogue) {
  constexpr bool kBackward = kArrays > 1, kGated = kArrays > 2;
  const SumsPlan& plan = task.plan;
  const uint32_t warp = blockIdx.x * kWarps + threadIdx.x / kWarp;
  const uint32_t slice = plan.by_tiles(warp), tile = warp - slice * plan.by_tiles.divisor;
  const int64_t c = static_cast<int64_t>(tile) * kWarp + threadIdx.x % kWarp;
  if (warp >= plan.warps || c >= plan.C) return;
  const T *const x = static_cast<const T*>(task.x), *const dy = static_cast<const T*>(task.dy);
  const T* const v = static_cast<const T*>(epilogue.v);
  const double mean = kBackward ? task.statistics[c].mean : 0;
  const double mean_low = kBackward ? task.statistics[c].mean_low : 0;
  const auto gate = Gates<Arithmetic<T>, kGated>::of(epilogue, c);
  const int64_t begin = int64_t{slice} * plan.per_warp;
  const int64_t end = min(begin + plan.per_warp, plan.units);
  ChannelSums sums;
#pragma unroll 4
  for (int64_t n = begin; n < end; ++n) {
    const int64_t i = n * plan.C + c;
    const auto decisive = kGated ? widen(v[i]) : 0;
    const double value = gate.x(widen(x[i]), decisive);
    if constexpr (kBackward) {
      const double gradient = gate.dy(widen(dy[i]), decisive);
      sums.first.add(gradient);
      sums.second.add(gradient *
                      (sizeof(T) == sizeof(double) ? (value - mean) - mean_low : value - mean));
    } else {
      sums.first.add(value);
      double error;
      sums.second.add(two_product(value, value, &error));
      if (sizeof(T) == sizeof(double)) sums.second.add(error);  // the square of a float is exact
    }
  }
  static_cast<ChannelSums*>(task.records)[c * plan.records + slice] = sums;
}

// Adds a record to one of the sums of a channel. low: the mean without what A holds of it.
template <typename A, bool kBackward, bool kSecond>
SBN_DEVICE void add_record(const ChunkSums& record, double low, Sum3* sum) {
  if constexpr (kBackward) {
    sum->add(kSecond ? record.second - low * record.first : record.first);
  } else {
    Sum3 other;
    add_shifted<A>(record.size, record.origin, record.first, record.second, kSecond ? &other : sum,
                   kSecond ? sum : &other);
  }
}
template <typename A, bool kBackward, bool kSecond>
SBN_DEVICE void add_record(const ChannelSums& record, double, Sum3* sum) {
  sum->add(kSecond ? record.second : record.first);
}

SBN_DEVICE Sum3 from_lane(const Sum3& sum, int mask) {
  const auto get = [&](double number) { return __shfl_xor_sync(kAllLanes, number, mask); };
  return {get(sum.high), get(sum.middle), get(sum.low)};
}

// Adds the records of a channel: `lanes` threads, a power of 2, for each of its two sums.
template <typename A, bool kBackward, bool kSecond, typename Record>
SBN_DEVICE void fold_sum(const SumsTask& task, int lanes, ChannelSums* sums) {
  constexpr int kBatch = 4;
  __shared__ double shared[3][kWarps];
  const int thread = threadIdx.x, lane = thread & (lanes - 1);
  const int64_t c = (static_cast<int64_t>(blockIdx.x) * kThreads + thread) / lanes;
  Sum3 total;
  if (c < task.plan.C) {
    double low = 0;
    if constexpr (kBackward) {
      const Statistics s = task.statistics[c];
      low = (s.mean - static_cast<A>(s.mean)) + s.mean_low;
    }
    const auto* const records = static_cast<const Record*>(task.records) + c * task.plan.records;
    for (int64_t i = lane; i < task.plan.records; i += kBatch * lanes) {
      Record batch[kBatch];
#pragma unroll
      for (int k = 0; k < kBatch; ++k) {
        if (i + k * lanes < task.plan.records) batch[k] = records[i + k * lanes];
      }
#pragma unroll
      for (int k = 0; k < kBatch; ++k) {
        if (i + k * lanes >= task.plan.records) break;
        add_record<A, kBackward, kSecond>(batch[k], low, &total);
      }
    }
  }
  for (int mask = 1; mask < min(lanes, kWarp); mask *= 2) total.add(from_lane(total, mask));
  if (lanes > kWarp) {
    if (thread % kWarp == 0) {
      shared[0][thread / kWarp] = total.high;
      shared[1][thread / kWarp] = total.middle;
      shared[2][thread / kWarp] = total.low;
    }
    __syncthreads();
    const int i = thread % kWarps;
    total = {shared[0][i], shared[1][i], shared[2][i]};
    for (int mask = 1; mask < kWarps; mask *= 2) total.add(from_lane(total, mask));
  }
  if (c < task.plan.C && lane == 0) (kSecond ? sums[c].second : sums[c].first) = total;
}

template <typename A, bool kBackward, typename Record>
__global__ void __launch_bounds__(kThreads) fold(SumsTask task, int lanes, ChannelSums* sums) {
  if (blockIdx.y == 0) {
    fold_sum<A, kBackward, false, Record>(task, lanes, sums);
  } else {
    fold_sum<A, kBackward, true, Record>(task, lanes, sums);
  }
}

template <typename T, int kArrays, int kWidth>
auto kernel_of_sums(const SumsPlan& plan) -> void (*)(SumsTask, EpilogueTask<Arithmetic<T>>) {
  if (plan.kind == SumsPlan::kValues) return sum_values<T, kArrays>;
  return plan.kind == SumsPlan::kRows ? sum_chunks<T, kArrays, kWidth, true>
                                      : sum_chunks<T, kArrays, kWidth, false>;
}

template <typename T>
int64_t work_size(const View& view) {
  return SumsPlan(view, sizeof(T)).work_size();
}

// Launches the kernels of sums, given what is read.
template <typename T, int kArrays>
int launch_sums(const View& view, SumsTask task, const EpilogueTask<Arithmetic<T>>& epilogue,
                ChannelSums* work, ChannelSums* sums, Stream stream) {
  using A = Arithmetic<T>;
  constexpr bool kBackward = kArrays > 1;
  constexpr int kSize = static_cast<int>(sizeof(T));
  const SumsPlan& plan = task.plan = SumsPlan(view, kSize);
  if (!plan.fits) return cudaErrorInvalidValue;
  task.records = work;
  task.aligned = is_aligned({task.x, task.dy, epilogue.v}, plan.width * kSize);
  auto* const kernel = with_width<T>(
      plan.width, [&](auto width) { return kernel_of_sums<T, kArrays, width>(plan); });
  SBN_LAUNCH(kernel, blocks_for(int64_t{plan.warps} * kWarp), stream, task, epilogue);
  if (const int error = cudaGetLastError()) return error;
  auto* const fold_records = plan.kind == SumsPlan::kValues ? fold<A, kBackward, ChannelSums>
                                                            : fold<A, kBackward, ChunkSums>;
  dim3 grid = blocks_for(plan.C * plan.fold_lanes());
  grid.y = 2;
  SBN_LAUNCH(fold_records, grid, stream, task, plan.fold_lanes(), sums);
  return cudaGetLastError();
}

template <typename T>
int launch_forward_sums(const View& view, const void* x, ChannelSums* work, ChannelSums* sums,
                        Stream stream) {
  SumsTask task{};
  task.x = x;
  return launch_sums<T, 1>(view, task, {}, work, sums, stream);
}

template <typename T>
int launch_backward_sums(const BackwardShard& p, const ForBackward& kept, int64_t batch,
                         ChannelSums* work, ChannelSums* sums, Stream stream) {
  using A = Arithmetic<T>;
  const int64_t first = batch * p.view.C;
  SumsTask task{};
  task.dy = p.dy;
  task.x = p.from_y() ? p.y : p.x;
  task.statistics = kept.used() + first;
  auto epilogue = epilogue_of<A>(p);
  if (kept.gates) epilogue.gates = static_cast<const Gate<A>*>(kept.gates) + first;
  if (p.epilogue.activation != Activation::kNone) {
    return launch_sums<T, 3>(p.view, task, epilogue, work, sums, stream);
  }
  epilogue.v = nullptr;
  return launch_sums<T, 2>(p.view, task, epilogue, work, sums, stream);
}

}  // namespace gluon_syncbn

#endif  // GLUON_SYNCBN_CUDA_SUMS_CUH_
