// Sums over rows (S = 1): of data with channels last, and of (N, C) data. Threads side by side read
// neighbouring channels, and those below one another share the rows. Also adds the slices of a
// channel from several blocks.
#ifndef GLUON_SYNCBN_CUDA_SUMS_ROWS_CUH_
#define GLUON_SYNCBN_CUDA_SUMS_ROWS_CUH_

#include "cuda/sums/chunks.cuh"

namespace gluon_syncbn {

// From compute capability 10.0 on, nvcc uses more registers.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
constexpr bool kFewerLeft = true;
#else
constexpr bool kFewerLeft = false;
#endif
// Vectors of each array that a thread loads before it uses the first, limited by registers; divides
// kRunRows.
template <typename T, int kArrays, bool kAligned>
constexpr int kRowsInFlight =
    (kArrays > 2 ? 2 : 4) / (sizeof(T) == 2 && (!kAligned || (kArrays > 2 && kFewerLeft)) ? 2 : 1);

// The sums of a thread's share of a chunk of rows, in shared memory: numbers of A in planes of one
// for each thread, padded, so that threads that read neighbouring channels use different banks.
template <typename T>
struct SharedShares {
  using A = Arithmetic<T>;
  static constexpr int kPlane = kThreads + 16 / kPack<T>;
  static constexpr int kNumbers = static_cast<int>(sizeof(Share<A>) / sizeof(A));
  A numbers[kNumbers][kPack<T> * kPlane];

  // A plain first sum is exact enough for 16-bit data, whose kernels need many registers.
  SBN_DEVICE static void add_run(A first, A second, Share<A>* share) {
    if (sizeof(T) == 2) {
      share->first.high += first;
    } else {
      share->first.add(first);
    }
    share->second.add(second);
  }

  // The share of a thread in column j of its vector.
  SBN_DEVICE void put(int j, int thread, const Share<A>& share) {
    A values[kNumbers];
    memcpy(values, &share, sizeof(share));
#pragma unroll
    for (int i = 0; i < kNumbers; ++i) numbers[i][j * kPlane + thread] = values[i];
  }
  SBN_DEVICE Share<A> get(int j, int thread) const {
    A values[kNumbers];
#pragma unroll
    for (int i = 0; i < kNumbers; ++i) values[i] = numbers[i][j * kPlane + thread];
    Share<A> share;
    memcpy(static_cast<void*>(&share), values, sizeof(share));
    return share;
  }
};

// S = 1, R > 1: a block has `lanes` vectors of channels side by side, and several chunks of the
// samples' rows.
template <typename T, int kArrays, bool kAligned>
__global__ void __launch_bounds__(kThreads, kRowBlocks)
    sum_rows(SumsTask task, EpilogueTask<Arithmetic<T>> epilogue) {
  using A = Arithmetic<T>;
  constexpr bool kBackward = kArrays > 1, kGated = kArrays > 2;
  constexpr int kSize = kPack<T>, kBatch = kRowsInFlight<T, kArrays, kAligned>;
  // Whether loads never pause: once a vector is used, a later row's takes its place, and the first
  // rows of a chunk are loaded while the one before it is reduced.
  constexpr bool kStreams = kAligned && !(kGated && sizeof(T) == 2);
  // The last rows of threads are added sequentially.
  constexpr int kLast = kThreads / kWarp;
  __shared__ SharedShares<T> shared;
  // In shared memory, as they are needed only once per chunk.
  __shared__ double own_sums[kThreads * kOwnWords];

  const int split = kSize < kRowRuns ? 1 : task.split, across = task.lanes, down = task.down;
  // Used here only: below, the logarithms would take registers that the kernel does not have.
  const auto by_across = PowerOf2::of(across), by_down = PowerOf2::of(down);
  const auto by_run = PowerOf2::of(kThreads / PowerOf2::of(split));
  const int per_run = by_run, groups = per_run / by_across / by_down;
  const int column = threadIdx.x % by_across, line = threadIdx.x % by_run / by_across;
  const int group = line / by_down, row = line % by_down + threadIdx.x / by_run * down * kRunRows;
  const int64_t tile = static_cast<int64_t>(blockIdx.x) * across * kSize;
  const int64_t c = tile + column * kSize;
  const int width = c + kSize <= task.C ? kSize : c < task.C ? static_cast<int>(task.C - c) : 0;
  const T *x = static_cast<const T*>(task.x), *dy = static_cast<const T*>(task.dy);
  const T* const v = static_cast<const T*>(epilogue.v);
  const bool reads_v = kGated && epilogue.v != task.x;

  // The first threads have one channel each, for the work per chunk.
  const int own = threadIdx.x;
  const bool owns = own < across * kSize && tile + own < task.C;
  ChannelTotal<A, kBackward> total(own_sums + own * kOwnWords);
  Center<A> own_center{0, 0};
  if (kBackward && owns) own_center = Center<A>::of(task.statistics[tile + own]);
  // In shared memory, as three arrays leave no registers for them. Those of column k are at k, k +
  // kWarp, ...
  struct Column {
    A sign, threshold, mean;
  };
  __shared__ Column columns[kGated ? kSize * kWarp : 1];
  if constexpr (kGated) {
    if (owns) {
      const Gate<A> gate = epilogue.gates[tile + own];
      columns[own % kSize * kWarp + own / kSize] = {gate.sign, gate.threshold, own_center.mean};
    }
    __syncthreads();
  }
  // The subtracted values of the columns.
  A origins[kSize];
  if (kBackward && !kGated) {
#pragma unroll
    for (int j = 0; j < kSize; ++j) {
      origins[j] = j < width ? Center<A>::of(task.statistics[c + j]).mean : A{0};
    }
  }

  // The chunk whose first rows are being loaded while the one before it is reduced. The three rows
  // of `pivots` give its origins.
  int64_t base = task.unit_of_slice(blockIdx.y), at = 0;
  int left = static_cast<int>(task.unit_of_slice(blockIdx.y + 1) - base);
  int n = 0;
  bool inside = true;
  Words xs[kBatch], dys[kBatch], vs[kBatch], pivots[3];
  // Loads vectors of an array; address(i) is that of vector i.
  const auto load = [&](auto& vectors, const auto& address) {
    constexpr int kVectors = sizeof(vectors) / sizeof(Words);
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
  // Rows r, r + down, ...; rows after the last repeat the first.
  const int64_t below = down * task.C;
  const auto load_batch = [&](int r) {
    const int64_t first = at + c + r * task.C;
    const bool is_full = kBatch == 1 || r + (kBatch - 1) * down < n;
    const auto of = [&](const T* from, auto& vectors) {
      if (is_full) {
        load(vectors, [&](int i) { return from + first + i * below; });
      } else {
        load(vectors, [&](int i) { return from + first + (r + i * down < n ? i * below : 0); });
      }
    };
    of(x, xs);
    if constexpr (kArrays > 1) of(dy, dys);
    if constexpr (kArrays > 2) {
      if (reads_v) {
        of(v, vs);
      } else {
#pragma unroll
        for (int i = 0; i < kBatch; ++i) vs[i] = xs[i];
      }
    }
  };
  // Row r, if it exists, takes the place of a vector.
  const auto load_next = [&](int i, int r) {
    if (r >= n) return;
    const int64_t next = at + c + r * task.C;
    xs[i] = load_words(x + next);
    if constexpr (kArrays > 1) dys[i] = load_words(dy + next);
    if constexpr (kArrays > 2) vs[i] = reads_v ? load_words(v + next) : xs[i];
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
    if (width == 0) return;
    if (kStreams && row < n) load_batch(row);
    if (!kBackward) {
      load(pivots, [&](int i) { return x + at + c + i * (n - 1) / 2 * task.C; });
    }
  };

  if (kStreams && left > 0) begin_chunk();
  while (left > 0) {
    if (!kStreams) begin_chunk();
    Share<A> shares[kSize];
    if (!kBackward) {
#pragma unroll
      for (int j = 0; j < kSize; ++j) {
        origins[j] = origin_of(value_at<T>(pivots[0], j), value_at<T>(pivots[1], j),
                               value_at<T>(pivots[2], j));
      }
    }
    for (int r = row; r < n && width > 0; r += split * down * kRunRows) {
      Run<A, kSize> run;
#pragma unroll
      for (int part = 0; part < kRunRows; part += kBatch) {
        const int from = r + part * down;
        if (part > 0 && from >= n) break;
        if (!kStreams) load_batch(from);
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
          if (i > 0 && from + i * down >= n) break;
          if constexpr (kGated) {
#pragma unroll
            for (int j = 0; j < kSize; ++j) {
              const Column& of_j = columns[j * kWarp + column];
              const A decisive = value_at<T>(vs[i], j);
              const Gate<A> gate{of_j.sign, of_j.threshold, epilogue.slope};
              const InverseGate<A> inverse{of_j.sign, of_j.threshold, epilogue.inverse};
              run.add(j, part + i == 0, gate(value_at<T>(dys[i], j), decisive),
                      inverse(value_at<T>(xs[i], j), decisive) - of_j.mean);
            }
          } else {
            const Values<T> values(xs[i]), gradients(kBackward ? dys[i] : xs[i]);
#pragma unroll
            for (int j = 0; j < kSize; ++j) {
              const A value = values(j) - origins[j];
              run.add(j, part + i == 0, kBackward ? gradients(j) : value, value);
            }
          }
          if (kStreams && (split == 1 || part + kBatch < kRunRows)) {
            load_next(i, from + (kBatch + i) * down);
          }
        }
      }
#pragma unroll
      for (int j = 0; j < kSize; ++j) {
        SharedShares<T>::add_run(run.first[j], run.second[j], &shares[j]);
      }
    }
    const int rows = n, chunks = left;
    // Several groups have a whole sample each.
    const int64_t start = groups == 1 ? at : base * task.R * task.C;
    base += groups;
    left -= groups;
    if (kStreams && left > 0) begin_chunk();

    // Computed again, so that no register holds them meanwhile.
    const int thread = thread_read_again(), place = thread & (per_run - 1);
    // All threads have read the sums of the previous chunk.
    __syncthreads();
#pragma unroll
    for (int j = 0; j < kSize; ++j) shared.put(j, thread, shares[j]);
    if (split > 1) {
      // Adds the runs in the order in which one thread would, so that the bits are the same.
      __syncthreads();
#pragma unroll 1
      for (int j = thread / PowerOf2::of(per_run); j < kSize; j += split) {
        Share<A> share = shared.get(j, place);
#pragma unroll 1
        for (int i = 1; i < split; ++i) {
          const Share<A> run = shared.get(j, place + i * per_run);
          SharedShares<T>::add_run(run.first.high, run.second.high, &share);
        }
        shared.put(j, place, share);
      }
    }
    for (int lines = down; lines > kLast;) {
      lines /= 2;
      __syncthreads();
      if (place / across % down < lines) {
#pragma unroll
        for (int j = 0; j < kSize; ++j) {
          Share<A> share = shared.get(j, thread);
          share.add(shared.get(j, thread + lines * across));
          shared.put(j, thread, share);
        }
      }
    }
    __syncthreads();
    // Read again, so that no register holds it meanwhile.
    if (kGated && owns) own_center.mean = columns[own % kSize * kWarp + own / kSize].mean;
    for (int g = 0; g < groups && g < chunks && owns; ++g) {
      Chunk<A> chunk;
      chunk.n = rows;
      const int first = own / kSize + g * down * across;
      chunk.sums = shared.get(own % kSize, first);
      for (int i = 1; i < kLast && i < down; ++i) {
        chunk.sums.add(shared.get(own % kSize, first + i * across));
      }
      // The index of the channel's first value.
      const int64_t values = start + g * task.R * task.C + tile + own;
      const auto value_of = [&](int i) { return widen(x[values + i * task.C]); };
      if constexpr (kBackward) {
        own_center.correct(&chunk.sums);
      } else {
        chunk.origin = origin_of(value_of(0), value_of((rows - 1) / 2), value_of(rows - 1));
      }
      if (ChannelTotal<A, kBackward>::is_narrow(chunk.origin, chunk.sums)) {
        total.add(chunk);
        continue;
      }
      double sum = 0, second = 0;
#pragma unroll 1
      for (int i = 0; i < rows; ++i) {
        double value = value_of(i), factor;
        if constexpr (kBackward) factor = widen(dy[values + i * task.C]);
        if constexpr (kGated) {
          const auto gates = Gates<A, kGated>::of(epilogue, tile + own);
          const A decisive = widen(v[values + i * task.C]);
          factor = gates.dy(static_cast<A>(factor), decisive);
          value = gates.x(static_cast<A>(value), decisive);
        }
        value = kBackward ? (value - own_center.mean) - own_center.mean_low : value - chunk.origin;
        if constexpr (!kBackward) factor = value;
        sum += factor;
        second = fma(factor, value, second);
      }
      total.add_wide(rows, chunk.origin, sum, second);
    }
  }
  if (owns) task.store(tile + own, blockIdx.y, total.value());
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
  put_sums(sums, shared + threadIdx.x * 6);
  __syncthreads();
  if (warp == 0 && c < task.C) {
    for (int i = 1; i < kWarps; ++i) sums.add(get_sums(shared + (i * kWarp + lane) * 6));
    task.store(c, blockIdx.y, sums);
  }
}

// sums[c] = the sum over the slices of channel c. `lanes` threads, a power of 2, for each of its
// two sums.
template <typename = void>  // A template, as several files include it.
__global__ void __launch_bounds__(kThreads) add_slices(Slices from, int lanes, ChannelSums* sums) {
  __shared__ double shared[kWarps * 3];
  const auto share = PowerOf2::of(lanes);
  const int lane = threadIdx.x % share;
  const int64_t i = static_cast<int64_t>(blockIdx.x) * (kThreads / share) + threadIdx.x / share;
  const int64_t c = i / 2;
  const bool is_second = i % 2 != 0;
  Sum3 total;
  if (c < from.C) {
#pragma unroll 4
    for (int k = lane; k < from.slices; k += lanes) total.add(from.load(c, k, is_second));
  }
  add_lanes(&total, lanes < kWarp ? lanes : kWarp, threadIdx.x % kWarp);
  if (lanes > kWarp) {
    // All threads have the same sum.
    double* const own = shared + threadIdx.x / kWarp * 3;
    if (threadIdx.x % kWarp == 0) own[0] = total.high, own[1] = total.middle, own[2] = total.low;
    __syncthreads();
    const double* const of = shared + threadIdx.x % kWarps * 3;
    total = threadIdx.x < kWarps ? Sum3{of[0], of[1], of[2]} : Sum3();
    add_lanes(&total, kWarps, threadIdx.x % kWarp);
  }
  if (c < from.C && lane == 0) (is_second ? sums[c].second : sums[c].first) = total;
}

}  // namespace gluon_syncbn

#endif  // GLUON_SYNCBN_CUDA_SUMS_ROWS_CUH_
