// Sums over planes (S > 1), read in vectors.
#ifndef GLUON_SYNCBN_CUDA_SUMS_PLANES_CUH_
#define GLUON_SYNCBN_CUDA_SUMS_PLANES_CUH_

#include "cuda/sums/runs.cuh"

namespace gluon_syncbn {

// The sums of one chunk, by `lanes` threads: vector i belongs to lane i % lanes.
template <typename T, int kArrays, bool kAligned>
struct PlaneSums {
  using A = Arithmetic<T>;
  static constexpr bool kBackward = kArrays > 1, kGated = kArrays > 2;
  static constexpr int kSize = kPack<T>;
  // Three unaligned arrays take many registers.
  static constexpr int kInFlight =
      kGated && !kAligned ? gluon_syncbn::kInFlight / 2 : gluon_syncbn::kInFlight;
  // Vectors of one run, and runs of one batch.
  static constexpr int kVectors = kRun / kSize < kInFlight ? kRun / kSize : kInFlight;
  static constexpr int kRuns = kInFlight / kVectors;

  const SumsTask& task;
  const EpilogueTask<A>& epilogue;
  Center<A> center;
  Gates<A, kGated> gates;

  // Vector i begins i * stride values after x, dy and v; `left` values remain in the chunk.
  struct Batch {
    const T *x, *dy, *v;
    int left, stride;
  };

  // Adds the share of `lane` of the n values of a chunk.
  SBN_DEVICE void add_values(const T* dy, const T* x, const T* v, int n, int lane, int lanes,
                             Share<A>* share) const {
    const int vectors = (n + kSize - 1) / kSize;
    // False only at one of the ends of the array.
    const bool inside = kAligned || holds<kArrays>(task, epilogue, dy, x, v, vectors);
    const unsigned x_shift = kAligned || !inside ? 0 : misalignment(x);
    const unsigned dy_shift = kAligned || !inside ? 0 : misalignment(dy);
    const unsigned v_shift = kAligned || !inside ? 0 : misalignment(v);
    for (int first = lane; first < vectors; first += lanes * kInFlight) {
      const int begin = first * kSize;
      const Batch batch{x + begin, dy + (kBackward ? begin : 0), v + (kGated ? begin : 0),
                        n - begin, lanes * kSize};
      Fetched<kAligned> xs[kInFlight], dys[kInFlight], vs[kInFlight];
      // Vectors after the last repeat the last.
      const int last = (vectors - 1 - first) * kSize;
      const auto at = [&](int i) { return i * batch.stride < last ? i * batch.stride : last; };
      if (inside) {
#pragma unroll
        for (int i = 0; i < kInFlight; ++i) {
          xs[i] = Fetched<kAligned>::load(batch.x + at(i));
          if (kBackward) dys[i] = Fetched<kAligned>::load(batch.dy + at(i));
          if constexpr (kGated) {
            if (epilogue.v != task.x) vs[i] = Fetched<kAligned>::load(batch.v + at(i));
          }
        }
      } else {
#pragma unroll
        for (int i = 0; i < kInFlight; ++i) {
          xs[i].low = xs[i].high = load_some(batch.x + at(i), batch.left - at(i));
          if (kBackward) {
            dys[i].low = dys[i].high = load_some(batch.dy + at(i), batch.left - at(i));
          }
          if constexpr (kGated) {
            if (epilogue.v != task.x) {
              vs[i].low = vs[i].high = load_some(batch.v + at(i), batch.left - at(i));
            }
          }
        }
      }
      Words x_words[kInFlight], dy_words[kInFlight], v_words[kInFlight];
#pragma unroll
      for (int i = 0; i < kInFlight; ++i) {
        x_words[i] = xs[i].template words<T>(x_shift);
        if (kBackward) dy_words[i] = dys[i].template words<T>(dy_shift);
        if constexpr (kGated) {
          v_words[i] = epilogue.v != task.x ? vs[i].template words<T>(v_shift) : x_words[i];
        }
      }
      if ((kInFlight - 1) * batch.stride + kSize <= batch.left) {
        add_batch<true>(x_words, dy_words, v_words, batch, first == lane, share);
      } else {
        add_batch<false>(x_words, dy_words, v_words, batch, first == lane, share);
      }
    }
  }

 private:
  // kFull: all vectors are complete.
  template <bool kFull>
  SBN_DEVICE void add_batch(const Words (&x)[kInFlight], const Words (&dy)[kInFlight],
                            const Words (&v)[kInFlight], const Batch& batch, bool is_first,
                            Share<A>* share) const {
    // gate(value, v)
    const auto get = [&](const Words(&from)[kInFlight], int run, int i, A other, const auto& gate) {
      const int vector = run * kVectors + i / kSize, j = i % kSize;
      const bool exists = kFull || j < batch.left - vector * batch.stride;
      if constexpr (kGated) {
        return exists ? gate(value_at<T>(from[vector], j), value_at<T>(v[vector], j)) : other;
      } else {
        return exists ? value_at<T>(from[vector], j) : other;
      }
    };
    const auto reload = [&](int run, int i, const auto& f) {
      const int index = (run * kVectors + i / kSize) * batch.stride + i % kSize;
      if (index >= batch.left) return;
      if constexpr (kGated) {
        const A decisive = widen(batch.v[index]);
        f(gates.dy(widen(batch.dy[index]), decisive), gates.x(widen(batch.x[index]), decisive));
      } else if constexpr (kBackward) {
        f(widen(batch.dy[index]), widen(batch.x[index]));
      } else {
        f(widen(batch.x[index]));
      }
    };
    const auto add = [&](int, double first, double second) {
      share->first += first;
      share->second += second;
    };
    constexpr int kValues = kVectors * kSize;
    if constexpr (kBackward) {
      add_runs<kRuns, kValues>([&](int run, int i) { return get(dy, run, i, A{0}, gates.dy); },
                               [&](int run, int i) { return get(x, run, i, center.mean, gates.x); },
                               [&](int) { return center.mean; }, A{}, reload, add);
    } else {
      if (is_first) {
        const A first = value_at<T>(x[0], 0);
        share->origin =
            origin_of<kValues>([&](int i) { return get(x, 0, i, first, gates.x); }, A{});
      }
      const A origin = share->origin;
      add_runs<kRuns, kValues>([&](int run, int i) { return get(x, run, i, origin, gates.x); },
                               [&](int) { return origin; }, A{}, reload, add);
      if (kFull) {
        share->count += kInFlight * kSize;
      } else {
#pragma unroll
        for (int i = 0; i < kInFlight; ++i) {
          const int rest = batch.left - i * batch.stride;
          share->count += rest >= kSize ? kSize : rest > 0 ? rest : 0;
        }
      }
    }
  }
};

// Buffers the sums of chunks before they are added to the lane's Sum3 in `own`. `lanes` lanes
// reduce a chunk, and one of them keeps its sums. When each of them has the sums of a chunk, all
// add theirs to Sum3 at once.
template <typename A, bool kBackward>
struct BufferedSums {
  double* own;
  int lanes, lane, count = 0, turn = 0;
  A pivot = 0;
  double first = 0, second = 0;

  SBN_DEVICE BufferedSums(double* own_sums, int lanes_of_chunk, int lane_of_warp)
      : own(own_sums), lanes(lanes_of_chunk), lane(lane_of_warp) {
    put(ChannelSums(), own);
  }

  // Adds a lane's share of a chunk of n values.
  SBN_DEVICE void add(Share<A> share, int n, const Center<A>& center) {
    const int lane_of_chunk = lane % lanes;
    A chunk_pivot = 0;
    if constexpr (!kBackward) {
      // The origin of the chunk's first lane.
      chunk_pivot = __shfl_sync(kAllLanes, share.origin, lane - lane_of_chunk);
      share.move(chunk_pivot);
    }
#pragma unroll
    for (int mask = kWarp / 2; mask > 0; mask /= 2) {
      if (mask < lanes) {
        share.first += __shfl_xor_sync(kAllLanes, share.first, mask);
        share.second += __shfl_xor_sync(kAllLanes, share.second, mask);
      }
    }
    if (lane_of_chunk == turn) {
      count = n;
      pivot = chunk_pivot;
      first = share.first;
      second = kBackward ? center.products(first, share.second) : share.second;
    }
    if (++turn == lanes) {
      flush();
      turn = 0;
    }
  }

  // Adds the buffered sums to `own`.
  SBN_DEVICE void flush() {
    ChannelSums sums = get_sums(own);
    if constexpr (kBackward) {
      sums.first.add(first);
      sums.second.add(second);
    } else {
      add_shifted<A>(count, pivot, first, second, &sums.first, &sums.second);
    }
    put(sums, own);
    count = 0;
    pivot = first = second = 0;
  }
};

// S > 1: a block has chunks of one channel, with `lanes` threads per chunk.
template <typename T, int kArrays, bool kAligned>
__global__ void __launch_bounds__(kThreads, plane_blocks<T>(kArrays, kAligned))
    sum_planes(SumsTask task, EpilogueTask<Arithmetic<T>> epilogue) {
  using A = Arithmetic<T>;
  constexpr bool kBackward = kArrays > 1, kGated = kArrays > 2;
  // In shared memory, as they are needed only once in `lanes` chunks.
  __shared__ double own_sums[kThreads * 6];
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const int lanes = task.lanes, lane_of_chunk = lane % lanes, at_once = kWarp / lanes;
  const int64_t c = blockIdx.x;

  PlaneSums<T, kArrays, kAligned> plane{task, epilogue, {0, 0}, Gates<A, kGated>::of(epilogue, c)};
  if constexpr (kBackward) plane.center = Center<A>::of(task.statistics[c]);

  double* const own = own_sums + threadIdx.x * 6;
  BufferedSums<A, kBackward> buffer{own, lanes, lane};

  // The number of chunks left for the warp, a lane's next chunk, and the step to the one after it,
  // in samples and chunks.
  const int64_t begin = task.unit_of_slice(blockIdx.y) + warp * at_once;
  int64_t units = task.unit_of_slice(blockIdx.y + 1) - begin;
  const int64_t unit = begin + lane / lanes, sample_size = task.C * task.S;
  const int chunks = static_cast<int>(task.chunks);
  int64_t sample = unit, sample_step = kWarps * at_once;
  int chunk = 0, chunk_step = 0;
  if (chunks > 1) {
    sample = unit / chunks;
    chunk = static_cast<int>(unit - sample * chunks);
    sample_step = kWarps * at_once / chunks;
    chunk_step = kWarps * at_once % chunks;
  }
  int64_t plane_at = sample * sample_size + c * task.S;
  const int64_t plane_step = sample_step * sample_size;
  const int last_size =
      static_cast<int>(task.S - static_cast<int64_t>(chunks - 1) * task.chunk_size);

  for (; units > 0; units -= kWarps * at_once) {
    Share<A> share;
    int n = 0;
    if (lane / lanes < units) {
      const int64_t at = plane_at + static_cast<int64_t>(chunk) * task.chunk_size;
      n = chunk + 1 == chunks ? last_size : task.chunk_size;
      plane.add_values(
          static_cast<const T*>(task.dy) + (kBackward ? at : 0), static_cast<const T*>(task.x) + at,
          static_cast<const T*>(epilogue.v) + (kGated ? at : 0), n, lane_of_chunk, lanes, &share);
    }
    plane_at += plane_step;
    chunk += chunk_step;
    if (chunk >= chunks) {
      chunk -= chunks;
      plane_at += sample_size;
    }
    buffer.add(share, n, plane.center);
  }
  buffer.flush();

  ChannelSums sums = get_sums(own);
  add_lanes(&sums, kWarp);
  if (lane == 0) put(sums, own);
  __syncthreads();
  if (warp == 0) {
    ChannelSums of_warp;
    if (lane < kWarps) of_warp = get_sums(own_sums + lane * kWarp * 6);
    add_lanes(&of_warp, kWarps);
    if (lane == 0) store_sums(of_warp, task.to + c * task.slices + blockIdx.y);
  }
}

}  // namespace gluon_syncbn

#endif  // GLUON_SYNCBN_CUDA_SUMS_PLANES_CUH_
