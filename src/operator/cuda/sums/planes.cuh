// Sums over planes (S > 1), read in vectors.
#ifndef GLUON_SYNCBN_CUDA_SUMS_PLANES_CUH_
#define GLUON_SYNCBN_CUDA_SUMS_PLANES_CUH_

#include "cuda/sums/chunks.cuh"

namespace gluon_syncbn {

// A lane's share of a chunk of n values, of which vector i belongs to lane i % lanes.
template <typename T, int kArrays, bool kAligned>
struct PlaneShare {
  using A = Arithmetic<T>;
  static constexpr bool kBackward = kArrays > 1, kGated = kArrays > 2;
  static constexpr int kSize = kPack<T>;
  // Vectors of each array that are loaded before the first is used. Three unaligned arrays take
  // many registers.
  static constexpr int kInFlight = kGated && !kAligned ? kRunVectors / 2 : kRunVectors;

  const SumsTask& task;
  const EpilogueTask<A>& epilogue;
  const Gates<A, kGated>& gates;
  const T *x, *dy, *v;
  int n, lane, lanes;

  // Calls f with each value, or gradient and value.
  template <typename F>
  SBN_DEVICE void each(const F& f) const {
#pragma unroll 1
    for (int i = lane; i < n; i += lanes) {
      if constexpr (kGated) {
        const A decisive = widen(v[i]);
        f(gates.dy(widen(dy[i]), decisive), gates.x(widen(x[i]), decisive));
      } else if constexpr (kBackward) {
        f(widen(dy[i]), widen(x[i]));
      } else {
        f(widen(x[i]));
      }
    }
  }

  // About the origin.
  SBN_DEVICE Share<A> sums(A origin) const {
    const int vectors = (n + kSize - 1) / kSize;
    // False only at one of the ends of the array.
    const bool inside = kAligned || holds<kArrays>(task, epilogue, dy, x, v, vectors);
    const auto shift = [&](const T* from) { return kAligned || !inside ? 0 : misalignment(from); };
    const unsigned x_shift = shift(x), dy_shift = kBackward ? shift(dy) : 0;
    const unsigned v_shift = kGated ? shift(v) : 0;
    const int stride = lanes * kSize;
    Share<A> share;
    for (int begin = lane * kSize; begin < n; begin += stride * kRunVectors) {
      Run<A, kSize> run;
#pragma unroll
      for (int part = 0; part < kRunVectors; part += kInFlight) {
        const int first = begin + part * stride;
        if (part > 0 && first >= n) break;
        Fetched<kAligned> xs[kInFlight], dys[kInFlight], vs[kInFlight];
        // Vectors after the last repeat the first.
        const auto at = [&](int i) { return first + i * stride < n ? first + i * stride : first; };
        if (inside) {
#pragma unroll
          for (int i = 0; i < kInFlight; ++i) {
            xs[i] = Fetched<kAligned>::load(x + at(i));
            if (kBackward) dys[i] = Fetched<kAligned>::load(dy + at(i));
            if constexpr (kGated) {
              if (epilogue.v != task.x) vs[i] = Fetched<kAligned>::load(v + at(i));
            }
          }
        } else {
          const auto load = [&](const T* from, int i) {
            return load_some(from + at(i), n - at(i));
          };
#pragma unroll
          for (int i = 0; i < kInFlight; ++i) {
            xs[i].low = xs[i].high = load(x, i);
            if (kBackward) dys[i].low = dys[i].high = load(dy, i);
            if constexpr (kGated) {
              if (epilogue.v != task.x) vs[i].low = vs[i].high = load(v, i);
            }
          }
        }
        const bool is_full = first + (kInFlight - 1) * stride + kSize <= n;
#pragma unroll
        for (int i = 0; i < kInFlight; ++i) {
          const Words x_words = xs[i].template words<T>(x_shift);
          const Words dy_words = kBackward ? dys[i].template words<T>(dy_shift) : x_words;
          const Words v_words =
              kGated && epilogue.v != task.x ? vs[i].template words<T>(v_shift) : x_words;
          const auto add = [&](int j, bool exists) {
            A value = value_at<T>(x_words, j), factor;
            if constexpr (kBackward) factor = value_at<T>(dy_words, j);
            if constexpr (kGated) {
              const A decisive = value_at<T>(v_words, j);
              value = gates.x(value, decisive);
              factor = gates.dy(factor, decisive);
            }
            value = exists ? value - origin : A{0};
            if constexpr (kBackward) {
              factor = exists ? factor : A{0};
            } else {
              factor = value;
            }
            run.add(j, part + i == 0, factor, value);
          };
          if (is_full) {
#pragma unroll
            for (int j = 0; j < kSize; ++j) add(j, true);
          } else {
            const int left = n - first - i * stride;
#pragma unroll
            for (int j = 0; j < kSize; ++j) add(j, j < left);
          }
        }
      }
      run.add_to(&share);
    }
    return share;
  }
};

// S > 1: a block has chunks of one channel, with `lanes` threads per chunk.
template <typename T, int kArrays, bool kAligned>
__global__ void __launch_bounds__(kThreads, plane_blocks<T>(kArrays, kAligned))
    sum_planes(SumsTask task, EpilogueTask<Arithmetic<T>> epilogue) {
  using A = Arithmetic<T>;
  constexpr bool kBackward = kArrays > 1, kGated = kArrays > 2;
  // In shared memory, as they are needed only once in `lanes` chunks.
  __shared__ double own_sums[kThreads * kOwnWords];
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const int lanes = task.lanes, at_once = kWarp / lanes;
  const int64_t c = blockIdx.x;

  Center<A> center{0, 0};
  if constexpr (kBackward) center = Center<A>::of(task.statistics[c]);
  const auto gates = Gates<A, kGated>::of(epilogue, c);
  double* const own = own_sums + threadIdx.x * kOwnWords;
  ChunkBuffer<A, kBackward> buffer(own, lanes, lane);

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
    const int64_t at = plane_at + static_cast<int64_t>(chunk) * task.chunk_size;
    const bool exists = lane / lanes < units;
    const int n = !exists ? 0 : chunk + 1 == chunks ? last_size : task.chunk_size;
    const T* const x = static_cast<const T*>(task.x) + at;
    const PlaneShare<T, kArrays, kAligned> share{
        task,
        epilogue,
        gates,
        x,
        static_cast<const T*>(task.dy) + (kBackward ? at : 0),
        static_cast<const T*>(epilogue.v) + (kGated ? at : 0),
        n,
        lane % lanes,
        lanes};
    Chunk<A> sums;
    if (exists) {
      sums.n = n;
      sums.origin =
          kBackward ? center.mean : origin_of(widen(x[0]), widen(x[n / 2]), widen(x[n - 1]));
      sums.sums = share.sums(sums.origin);
    }
    plane_at += plane_step;
    chunk += chunk_step;
    if (chunk >= chunks) {
      chunk -= chunks;
      plane_at += sample_size;
    }
    buffer.add(sums, center, kWarp, [&](const auto& f) { share.each(f); });
  }

  const ChannelSums sums = buffer.finish(kWarp);
  if (lane == 0) put_sums(sums, own);
  __syncthreads();
  if (warp == 0) {
    ChannelSums of_warp;
    if (lane < kWarps) of_warp = get_sums(own_sums + lane * kWarp * kOwnWords);
    add_lanes(&of_warp, kWarps, lane);
    if (lane == 0) task.store(c, blockIdx.y, of_warp);
  }
}

}  // namespace gluon_syncbn

#endif  // GLUON_SYNCBN_CUDA_SUMS_PLANES_CUH_
