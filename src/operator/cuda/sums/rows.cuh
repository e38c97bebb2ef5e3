// Sums over rows (S = 1): of data with channels last, and of (N, C) data. Also adds the slices of a
// channel from several blocks.
#ifndef GLUON_SYNCBN_CUDA_SUMS_ROWS_CUH_
#define GLUON_SYNCBN_CUDA_SUMS_ROWS_CUH_

#include "cuda/sums/runs.cuh"

namespace gluon_syncbn {

// S = 1, R > 1: a block has `lanes` vectors of channels side by side, and several chunks of the
// samples' rows.
template <typename T, int kArrays, bool kAligned>
__global__ void __launch_bounds__(kThreads, kRowBlocks)
    sum_rows(SumsTask task, EpilogueTask<Arithmetic<T>> epilogue) {
  using A = Arithmetic<T>;
  constexpr bool kBackward = kArrays > 1, kGated = kArrays > 2;
  constexpr int kSize = kPack<T>;
  constexpr int kBatch = kGated      ? kRowTriplesInFlight<T>
                         : kBackward ? kRowPairsInFlight
                                     : kRowsInFlight<T>;
  // Padded, so that threads that read neighbouring channels use different banks.
  constexpr int kPlane = kThreads + 16 / kSize;
  // The last rows of threads are added sequentially.
  constexpr int kLast = kThreads / kWarp, kMaxGroups = kLast / kFewestRows;
  __shared__ double shared[2][kSize * kPlane];
  // In shared memory, as they are needed once a chunk.
  __shared__ double own_sums[kThreads * 6];

  const int across = task.lanes, down = task.down, groups = kThreads / across / down;
  const int column = threadIdx.x % across, line = threadIdx.x / across;
  const int row = line % down, group = line / down;
  const int64_t tile = static_cast<int64_t>(blockIdx.x) * across * kSize;
  const int64_t c = tile + column * kSize;
  const int width = c + kSize <= task.C ? kSize : c < task.C ? static_cast<int>(task.C - c) : 0;
  const T *x = static_cast<const T*>(task.x), *dy = static_cast<const T*>(task.dy);
  const T* const v = static_cast<const T*>(epilogue.v);
  [[maybe_unused]] const bool reads_v = kGated && epilogue.v != task.x;
  const int64_t below = down * task.C;

  // The first threads have one channel each, for the work per chunk.
  const int own = threadIdx.x;
  const bool owns = own < across * kSize && tile + own < task.C;
  put(ChannelSums(), own_sums + own * 6);
  Center<A> own_center{0, 0};
  if (kBackward && owns) own_center = Center<A>::of(task.statistics[tile + own]);
  // Three arrays leave no registers for these: those of column k are at k, k + kWarp, ...
  struct Column {
    A sign, threshold, mean;
  };
  __shared__ Column columns[kGated ? kSize * kWarp : 1];
  if constexpr (kGated) {
    if (owns) {
      const Gate<A> gate = Gates<A, kGated>::of(epilogue, tile + own).dy;
      columns[own % kSize * kWarp + own / kSize] = {gate.sign, gate.threshold, own_center.mean};
    }
    __syncthreads();
  }
  // The subtracted values: the means, or the origins of a thread's share.
  A origins[kSize];
  if (kBackward && !kGated) {
#pragma unroll
    for (int j = 0; j < kSize; ++j) {
      origins[j] = j < width ? Center<A>::of(task.statistics[c + j]).mean : A{0};
    }
  }
  const auto origin = [&](int j) { return kGated ? columns[j * kWarp + column].mean : origins[j]; };

  // The chunk whose first rows are being loaded while the one before it is reduced.
  int64_t base = task.unit_of_slice(blockIdx.y), at = 0;
  int left = static_cast<int>(task.unit_of_slice(blockIdx.y + 1) - base);
  int n = 0;
  bool inside = true;
  Words xs[kBatch], dys[kBatch];
  // Loads vectors of several rows of an array. Rows after the last repeat the first.
  const auto load = [&](const T* from, int r, auto& vectors) {
    constexpr int kVectors = sizeof(vectors) / sizeof(Words);
    const auto address = [&](int i) { return from + (r + i * down < n ? i * below : 0); };
    if (kAligned || inside) {
      Fetched<kAligned> fetched[kVectors];
#pragma unroll
      for (int i = 0; i < kVectors; ++i) fetched[i] = Fetched<kAligned>::load(address(i));
#pragma unroll
      for (int i = 0; i < kVectors; ++i) {
        vectors[i] = fetched[i].template words<T>(kAligned ? 0 : misalignment(address(i)));
      }
    } else {
#pragma unroll
      for (int i = 0; i < kVectors; ++i) vectors[i] = load_some(address(i), width);
    }
  };
  const auto load_batch = [&](int r) {
    const int64_t from = at + c + r * task.C;
    load(x + from, r, xs);
    if constexpr (kBackward) load(dy + from, r, dys);
  };
  const auto begin_chunk = [&] {
    // A group without a chunk repeats the last one.
    const int64_t unit = base + (group < left ? group : left - 1);
    const int64_t sample = task.chunks == 1 ? unit : unit / task.chunks;
    const int64_t start = (unit - sample * task.chunks) * task.chunk_size, rows = task.R - start;
    n = rows < task.chunk_size ? static_cast<int>(rows) : task.chunk_size;
    at = (sample * task.R + start) * task.C;
    // A vector may reach past the end of a row.
    const int64_t vectors = n * task.C / kSize + 3;
    inside = kAligned || holds<kArrays>(task, epilogue, dy + (kBackward ? at : 0), x + at,
                                        v + (kGated ? at : 0), vectors);
    if (kAligned && width > 0 && row < n) load_batch(row);
  };

  double first[kSize] = {}, second[kSize] = {};
  const auto add_batch = [&](auto is_full, int r, bool is_first) {
    constexpr bool kFull = decltype(is_full)::value;
    const auto exists = [&](int i) { return kFull || r + i * down < n; };
    const auto add = [&](int j, double a, double b) {
      first[j] += a;
      second[j] += b;
    };
    // Bit j * kBatch + i is 1 where the gates of column j, row i are open.
    [[maybe_unused]] uint32_t open = 0;
    if constexpr (kGated) {
      Words vs[kBatch];
      if (reads_v) {
        load(v + at + c + r * task.C, r, vs);
      } else {
#pragma unroll
        for (int i = 0; i < kBatch; ++i) vs[i] = xs[i];
      }
#pragma unroll
      for (int j = 0; j < kSize; ++j) {
        const Column& of_j = columns[j * kWarp + column];
        const Gate<A> gate{of_j.sign, of_j.threshold, 0};
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
          open |= (gate(A{1}, value_at<T>(vs[i], j)) > 0 ? 1u : 0u) << (j * kBatch + i);
        }
      }
    }
    const auto gated = [&](A value, int j, int i, A slope) {
      const A bit = open >> (j * kBatch + i) & 1 ? A{1} : A{0};
      return kGated ? Gate<A>{1, 0, slope}(value, bit) : value;
    };
    const auto get = [&](const Words* from, int j, int i, A other, A slope) {
      return exists(i) ? gated(value_at<T>(from[i], j), j, i, slope) : other;
    };
    const auto reload = [&](int j, int i, const auto& f) {
      if (!exists(i) || j >= width) return;
      const int64_t index = at + c + (r + i * down) * task.C + j;
      if constexpr (kBackward) {
        f(gated(widen(dy[index]), j, i, epilogue.slope),
          gated(widen(x[index]), j, i, epilogue.inverse));
      } else {
        f(widen(x[index]));
      }
    };
    const auto value = [&](int j, int i) { return get(xs, j, i, origin(j), epilogue.inverse); };
    if (!kBackward && is_first) {
#pragma unroll
      for (int j = 0; j < kSize; ++j) {
        origins[j] = value_at<T>(xs[0], j);
        origins[j] = origin_of<kBatch>([&](int i) { return value(j, i); }, A{});
      }
    }
    if constexpr (kBackward) {
      add_runs<kSize, kBatch>([&](int j, int i) { return get(dys, j, i, A{0}, epilogue.slope); },
                              value, origin, A{}, reload, add);
    } else {
      add_runs<kSize, kBatch>(value, origin, A{}, reload, add);
    }
  };

  if (left > 0) begin_chunk();
  while (left > 0) {
    int count = 0;
#pragma unroll
    for (int j = 0; j < kSize; ++j) {
      first[j] = second[j] = 0;
      if (!kBackward) origins[j] = 0;
    }
    for (int r = row; r < n && width > 0; r += down * kBatch) {
      // Unaligned vectors are not loaded ahead, as they would take twice the registers.
      if (!kAligned || r != row) load_batch(r);
      if (r + (kBatch - 1) * down < n) {
        add_batch(True(), r, r == row);
        count += kBatch;
      } else {
        add_batch(False(), r, r == row);
#pragma unroll
        for (int i = 0; i < kBatch; ++i) count += r + i * down < n ? 1 : 0;
      }
    }
    if (!kBackward) {
      // Loaded again to save registers.
      Words pivots[1] = {zero_words()};
      if (width > 0) load(x + at + c, 0, pivots);
#pragma unroll
      for (int j = 0; j < kSize; ++j) {
        Share<A> share{origins[j], count, first[j], second[j]};
        share.move(value_at<T>(pivots[0], j));
        first[j] = share.first;
        second[j] = share.second;
      }
    }
    const int chunk_size = n;
    const int chunks = left;
    T chunk_pivots[kMaxGroups];
    if (!kBackward && owns) {
      // Several groups have a whole sample each.
      const T* const from = x + (groups == 1 ? at : base * task.R * task.C) + tile + own;
#pragma unroll
      for (int g = 0; g < kMaxGroups; ++g) {
        if (g < groups && g < chunks) chunk_pivots[g] = from[g * task.R * task.C];
      }
    }
    base += groups;
    left -= groups;
    if (left > 0) begin_chunk();

    // All threads have read the sums of the chunk before.
    __syncthreads();
#pragma unroll
    for (int j = 0; j < kSize; ++j) {
      shared[0][j * kPlane + threadIdx.x] = first[j];
      shared[1][j * kPlane + threadIdx.x] = second[j];
    }
    for (int lines = down; lines > kLast;) {
      lines /= 2;
      __syncthreads();
      if (row < lines) {
#pragma unroll
        for (int j = 0; j < 2 * kSize; ++j) {
          double* const sum = shared[j % 2] + j / 2 * kPlane + threadIdx.x;
          *sum += sum[lines * across];
        }
      }
    }
    __syncthreads();
    if (owns) {
      ChannelSums sums = get_sums(own_sums + own * 6);
#pragma unroll
      for (int g = 0; g < kMaxGroups; ++g) {
        // Not a break, which takes one more register; sm_50 has none left.
        if (g >= groups || g >= chunks) continue;
        const int index = own % kSize * kPlane + own / kSize + g * down * across;
        double total[2] = {shared[0][index], shared[1][index]};
#pragma unroll
        for (int i = 1; i < kLast; ++i) {
          if (i >= down) break;
          total[0] += shared[0][index + i * across];
          total[1] += shared[1][index + i * across];
        }
        if (kBackward) {
          sums.first.add(total[0]);
          sums.second.add(own_center.products(total[0], total[1]));
        } else {
          add_shifted<A>(chunk_size, widen(chunk_pivots[g]), total[0], total[1], &sums.first,
                         &sums.second);
        }
      }
      put(sums, own_sums + own * 6);
    }
  }
  if (owns) {
    store_sums(get_sums(own_sums + own * 6), task.to + (tile + own) * task.slices + blockIdx.y);
  }
}

// S = R = 1: each value is a sample and is added to Sum3.
template <typename T, int kArrays>
__global__ void __launch_bounds__(kThreads, 2)
    sum_values(SumsTask task, EpilogueTask<Arithmetic<T>> epilogue) {
  using A = Arithmetic<T>;
  constexpr bool kBackward = kArrays > 1, kGated = kArrays > 2;
  __shared__ double shared[kWarps * kWarp * 6];
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const int64_t c = static_cast<int64_t>(blockIdx.x) * kWarp + lane;
  const T *x = static_cast<const T*>(task.x), *dy = static_cast<const T*>(task.dy);
  ChannelSums sums;
  if (c < task.C) {
    const double mean = kBackward ? task.statistics[c].mean : 0;
    const double mean_low = kBackward ? task.statistics[c].mean_low : 0;
    const auto gates = Gates<A, kGated>::of(epilogue, c);
    const int64_t end = task.unit_of_slice(blockIdx.y + 1);
    for (int64_t n = task.unit_of_slice(blockIdx.y) + warp; n < end; n += kWarps) {
      const int64_t i = n * task.C + c;
      const A decisive = kGated ? widen(static_cast<const T*>(epilogue.v)[i]) : A{0};
      double value = gates.x(widen(x[i]), decisive);
      if (kBackward) {
        const double gradient = gates.dy(widen(dy[i]), decisive);
        value -= mean;
        if (sizeof(A) == sizeof(double)) value -= mean_low;
        sums.first.add(gradient);
        sums.second.add(gradient * value);
      } else {
        double error;
        sums.first.add(value);
        sums.second.add(two_product(value, value, &error));
        if (sizeof(A) == sizeof(double)) sums.second.add(error);
      }
    }
  }
  put(sums, shared + threadIdx.x * 6);
  __syncthreads();
  if (warp == 0 && c < task.C) {
    for (int i = 1; i < kWarps; ++i) sums.add(get_sums(shared + (i * kWarp + lane) * 6));
    store_sums(sums, task.to + c * task.slices + blockIdx.y);
  }
}

// sums[c] = the sum over the slices of channel c. `lanes` threads per channel, a power of 2.
__global__ void __launch_bounds__(kThreads)
    add_slices(int64_t C, int slices, int lanes, const ChannelSums* parts, ChannelSums* sums) {
  __shared__ double shared[kWarps * 6];
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % lanes;
  const int64_t c = static_cast<int64_t>(blockIdx.x) * (kThreads / lanes) + threadIdx.x / lanes;
  ChannelSums total;
  if (c < C) {
#pragma unroll 4
    for (int i = lane; i < slices; i += lanes) total.add(load_sums(parts + c * slices + i));
  }
  add_lanes(&total, lanes < kWarp ? lanes : kWarp);
  if (lanes > kWarp) {
    // All threads have the same channel.
    if (threadIdx.x % kWarp == 0) put(total, shared + warp * 6);
    __syncthreads();
    total = ChannelSums();
    if (threadIdx.x < kWarps) total = get_sums(shared + threadIdx.x * 6);
    add_lanes(&total, kWarps);
  }
  if (c < C && lane == 0) store_sums(total, sums + c);
}

}  // namespace gluon_syncbn

#endif  // GLUON_SYNCBN_CUDA_SUMS_ROWS_CUH_
