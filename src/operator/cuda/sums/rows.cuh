// Sums over rows, channels last; over (N, C) data; and of the slices that blocks leave.
#ifndef GLUON_SYNCBN_CUDA_SUMS_ROWS_CUH_
#define GLUON_SYNCBN_CUDA_SUMS_ROWS_CUH_

#include "cuda/sums/runs.cuh"

namespace gluon_syncbn {

// S = 1, R > 1: as many channels a block as its threads side by side, `lanes`, have vectors, and
// some chunks of the samples' rows.
template <typename T, bool kBackward, bool kAligned>
__global__ void __launch_bounds__(kThreads, kRowBlocks) sum_rows(SumsTask task) {
  using A = Arithmetic<T>;
  constexpr int kSize = kPack<T>;
  constexpr int kBatch = kBackward ? kRowPairsInFlight : kRowsInFlight<T>;
  // Padded so that threads that read neighbouring channels meet different banks.
  constexpr int kPlane = kThreads + 16 / kSize;
  // What is left to be added one after the other: the fewest rows of threads.
  constexpr int kLast = kThreads / kWarp, kMostGroups = kLast / kFewestRows;
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
  const int64_t below = down * task.C;

  // The first threads have a channel of the block's each, for what is done once a chunk.
  const int own = threadIdx.x;
  const bool owns = own < across * kSize && tile + own < task.C;
  put(ChannelSums(), own_sums + own * 6);

  // What is subtracted: the means, or origins of a thread's share.
  A about[kSize];
  Center<A> own_center{0, 0};
  if (kBackward) {
#pragma unroll
    for (int j = 0; j < kSize; ++j) {
      about[j] = j < width ? Center<A>::of(task.statistics[c + j]).mean : A{0};
    }
    if (owns) own_center = Center<A>::of(task.statistics[tile + own]);
  }

  // The chunk whose first rows are on their way, while the one before it is reduced.
  int64_t base = task.unit_of_slice(blockIdx.y), at = 0;
  int left = static_cast<int>(task.unit_of_slice(blockIdx.y + 1) - base);
  int n = 0;
  bool inside = true;
  Words xs[kBatch], dys[kBatch];
  // `vectors` of an array, a whole number of rows apart. Behind the last row is the first once
  // more.
  const auto load = [&](const T* from, int r, auto& vectors) {
    constexpr int kVectors = sizeof(vectors) / sizeof(Words);
    const auto place = [&](int i) { return from + (r + i * down < n ? i * below : 0); };
    if (kAligned || inside) {
      Fetched<kAligned> fetched[kVectors];
#pragma unroll
      for (int i = 0; i < kVectors; ++i) fetched[i] = Fetched<kAligned>::load(place(i));
#pragma unroll
      for (int i = 0; i < kVectors; ++i) {
        vectors[i] = fetched[i].template words<T>(kAligned ? 0 : misalignment(place(i)));
      }
    } else {
#pragma unroll
      for (int i = 0; i < kVectors; ++i) vectors[i] = load_some(place(i), width);
    }
  };
  const auto load_batch = [&](int r) {
    const int64_t from = at + c + r * task.C;
    load(x + from, r, xs);
    if constexpr (kBackward) load(dy + from, r, dys);
  };
  const auto begin_chunk = [&] {
    // Of a group that has none, the last once more.
    const int64_t unit = base + (group < left ? group : left - 1);
    const int64_t sample = task.chunks == 1 ? unit : unit / task.chunks;
    const int64_t start = (unit - sample * task.chunks) * task.chunk_size, rows = task.R - start;
    n = rows < task.chunk_size ? static_cast<int>(rows) : task.chunk_size;
    at = (sample * task.R + start) * task.C;
    // A vector at a row's end reaches past it where C is no multiple of its size.
    const int64_t vectors = n * task.C / kSize + 3;
    inside = kAligned || task.holds<kBackward>(dy + (kBackward ? at : 0), x + at, vectors);
    if (kAligned && width > 0 && row < n) load_batch(row);
  };

  double first[kSize] = {}, second[kSize] = {};
  const auto add_batch = [&](auto is_full, int r, bool is_first) {
    constexpr bool kFull = decltype(is_full)::value;
    const auto there = [&](int i) { return kFull || r + i * down < n; };
    const auto add = [&](int j, double a, double b) {
      first[j] += a;
      second[j] += b;
    };
    const auto get = [&](const Words* from, int j, int i, A other) {
      return there(i) ? value_at<T>(from[i], j) : other;
    };
    const auto again = [&](int j, int i, const auto& f) {
      if (!there(i) || j >= width) return;
      const int64_t place = at + c + (r + i * down) * task.C + j;
      if constexpr (kBackward) {
        f(widen(dy[place]), widen(x[place]));
      } else {
        f(widen(x[place]));
      }
    };
    const auto value = [&](int j, int i) { return get(xs, j, i, about[j]); };
    const auto origin = [&](int j) { return about[j]; };
    if (!kBackward && is_first) {
#pragma unroll
      for (int j = 0; j < kSize; ++j) {
        about[j] = value_at<T>(xs[0], j);
        about[j] = origin_of<kBatch>([&](int i) { return value(j, i); }, A{});
      }
    }
    if constexpr (kBackward) {
      add_runs<kSize, kBatch>([&](int j, int i) { return get(dys, j, i, A{0}); }, value, origin,
                              A{}, again, add);
    } else {
      add_runs<kSize, kBatch>(value, origin, A{}, again, add);
    }
  };

  if (left > 0) begin_chunk();
  while (left > 0) {
    int count = 0;
#pragma unroll
    for (int j = 0; j < kSize; ++j) {
      first[j] = second[j] = 0;
      if (!kBackward) about[j] = 0;
    }
    for (int r = row; r < n && width > 0; r += down * kBatch) {
      // Vectors at odd addresses are not asked for before: both halves of each would have to be
      // kept.
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
      // Read again, as registers are few.
      Words nears[1] = {zero_words()};
      if (width > 0) load(x + at + c, 0, nears);
#pragma unroll
      for (int j = 0; j < kSize; ++j) {
        Share<A> share{about[j], count, first[j], second[j]};
        share.move(value_at<T>(nears[0], j));
        first[j] = share.first;
        second[j] = share.second;
      }
    }
    const int chunk_size = n;
    const int chunks = left;
    T chunk_nears[kMostGroups];
    if (!kBackward && owns) {
      // Several groups have a whole sample each.
      const T* const from = x + (groups == 1 ? at : base * task.R * task.C) + tile + own;
#pragma unroll
      for (int g = 0; g < kMostGroups; ++g) {
        if (g < groups && g < chunks) chunk_nears[g] = from[g * task.R * task.C];
      }
    }
    base += groups;
    left -= groups;
    if (left > 0) begin_chunk();

    // All have read what the chunk before left there.
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
          double* const place = shared[j % 2] + j / 2 * kPlane + threadIdx.x;
          *place += place[lines * across];
        }
      }
    }
    __syncthreads();
    if (owns) {
      ChannelSums sums = get_sums(own_sums + own * 6);
#pragma unroll
      for (int g = 0; g < kMostGroups; ++g) {
        // A break takes one register more, and sm_50 has none left.
        if (g >= groups || g >= chunks) continue;
        const int place = own % kSize * kPlane + own / kSize + g * down * across;
        double total[2] = {shared[0][place], shared[1][place]};
#pragma unroll
        for (int i = 1; i < kLast; ++i) {
          if (i >= down) break;
          total[0] += shared[0][place + i * across];
          total[1] += shared[1][place + i * across];
        }
        if (kBackward) {
          sums.first.add(total[0]);
          sums.second.add(own_center.products(total[0], total[1]));
        } else {
          add_about<A>(chunk_size, widen(chunk_nears[g]), total[0], total[1], &sums.first,
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

// S = R = 1: each value is a sample of its own, so each goes into Sum3.
template <typename T, bool kBackward>
__global__ void __launch_bounds__(kThreads, 2) sum_values(SumsTask task) {
  using A = Arithmetic<T>;
  __shared__ double shared[kWarps * kWarp * 6];
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const int64_t c = static_cast<int64_t>(blockIdx.x) * kWarp + lane;
  const T *x = static_cast<const T*>(task.x), *dy = static_cast<const T*>(task.dy);
  ChannelSums sums;
  if (c < task.C) {
    const double mean = kBackward ? task.statistics[c].mean : 0;
    const double mean_low = kBackward ? task.statistics[c].mean_low : 0;
    const int64_t end = task.unit_of_slice(blockIdx.y + 1);
    for (int64_t n = task.unit_of_slice(blockIdx.y) + warp; n < end; n += kWarps) {
      double value = widen(x[n * task.C + c]);
      if (kBackward) {
        const double gradient = widen(dy[n * task.C + c]);
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

// sums[c] = the sum over the slices of channel c, by `lanes` threads, a power of 2.
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
