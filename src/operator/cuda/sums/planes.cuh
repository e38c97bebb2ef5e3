// Sums over planes (S > 1), read in vectors. Neighbouring lanes read neighbouring vectors, so the
// loads of a warp are contiguous.
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

  // The sums about the origin.
  SBN_DEVICE Share<A> sums(A origin) const {
    // False only at one of the ends of the array.
    const bool inside =
        kAligned || holds<kArrays>(task, epilogue, dy, x, v, (n + kSize - 1) / kSize);
    const int stride = lanes * kSize;
    Share<A> share;
    for (int begin = lane * kSize; begin < n; begin += stride * kRunVectors) {
      Run<A, kSize> run;
#pragma unroll
      for (int part = 0; part < kRunVectors; part += kInFlight) {
        const int first = begin + part * stride, left = n - first;
        if (part > 0 && left <= 0) break;
        Batch batch;
        if (left >= (kInFlight - 1) * stride + kSize && inside) {
          batch.load(*this, first, [&](int i) { return i * stride; });
          add<true>(batch, part == 0, left, stride, origin, &run);
        } else {
          // Vectors after the last repeat the first.
          const auto at = [&](int i) { return i * stride < left ? i * stride : 0; };
          if (inside) {
            batch.load(*this, first, at);
          } else {
            batch.load_some(*this, first, left, at);
          }
          add<false>(batch, part == 0, left, stride, origin, &run);
        }
      }
      run.add_to(&share);
    }
    return share;
  }

 private:
  // The vectors that are loaded before the first is used.
  struct Batch {
    Words x[kInFlight], dy[kInFlight], v[kInFlight];

    template <typename At>
    SBN_DEVICE void load(const PlaneShare& from, int first, const At& at) {
      load(from.x + first, at, x);
      if constexpr (kBackward) load(from.dy + first, at, dy);
      if constexpr (kGated) {
        if (from.reads_v()) {
          load(from.v + first, at, v);
        } else {
#pragma unroll
          for (int i = 0; i < kInFlight; ++i) v[i] = x[i];
        }
      }
    }
    // Loads values one by one, as vectors would reach out of the array.
    template <typename At>
    SBN_DEVICE void load_some(const PlaneShare& from, int first, int left, const At& at) {
#pragma unroll
      for (int i = 0; i < kInFlight; ++i) {
        const auto some = [&](const T* p) {
          return gluon_syncbn::load_some(p + first + at(i), left - at(i));
        };
        x[i] = some(from.x);
        if constexpr (kBackward) dy[i] = some(from.dy);
        if constexpr (kGated) {
          v[i] = from.reads_v() ? some(from.v) : Words(x[i]);
        }
      }
    }

   private:
    template <typename At>
    SBN_DEVICE static void load(const T* from, const At& at, Words (&words)[kInFlight]) {
      Fetched<kAligned> fetched[kInFlight];
#pragma unroll
      for (int i = 0; i < kInFlight; ++i)
        fetched[i] = kAligned ? Fetched<kAligned>::load(from + at(i))
                              : Fetched<kAligned>::load_whole(from + at(i));
      // The same for all vectors.
      const unsigned shift = kAligned ? 0 : misalignment(from);
#pragma unroll
      for (int i = 0; i < kInFlight; ++i) words[i] = fetched[i].template words<T>(shift);
    }
  };

  SBN_DEVICE bool reads_v() const { return epilogue.v != task.x; }

  // kFull: all vectors are complete.
  template <bool kFull>
  SBN_DEVICE void add(const Batch& batch, bool is_first, int left, int stride, A origin,
                      Run<A, kSize>* run) const {
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      const Values<T> xs(batch.x[i]), dys(kBackward ? batch.dy[i] : batch.x[i]);
      const Values<T> vs(kGated ? batch.v[i] : batch.x[i]);
#pragma unroll
      for (int j = 0; j < kSize; ++j) {
        const bool exists = kFull || j < left - i * stride;
        A value = xs(j), factor = dys(j);
        if constexpr (kGated) {
          const A decisive = vs(j);
          value = gates.x(value, decisive);
          factor = gates.dy(factor, decisive);
        }
        value = exists ? value - origin : A{0};
        factor = !kBackward ? value : exists ? factor : A{0};
        run->add(j, is_first && i == 0, factor, value);
      }
    }
  }
};

// S > 1: `across` threads have the chunks of a channel, `lanes` of them each chunk.
template <typename T, int kArrays, bool kAligned>
__global__ void __launch_bounds__(kThreads, plane_blocks(kArrays, kAligned))
    sum_planes(SumsTask task, EpilogueTask<Arithmetic<T>> epilogue) {
  using A = Arithmetic<T>;
  constexpr bool kBackward = kArrays > 1, kGated = kArrays > 2;
  // In shared memory, as they are needed only once every `lanes` chunks.
  __shared__ double own_sums[kThreads * kOwnWords];
  const int lane = threadIdx.x % kWarp;
  const auto lanes = PowerOf2::of(task.lanes), across = PowerOf2::of(task.across);
  const int64_t c = static_cast<int64_t>(blockIdx.x) * (kThreads / across) + threadIdx.x / across;
  const int64_t readable = c < task.C ? c : 0;

  Center<A> center{0, 0};
  if constexpr (kBackward) center = Center<A>::of(task.statistics[readable]);
  const auto gates = Gates<A, kGated>::of(epilogue, readable);
  ChunkBuffer<A, kBackward> buffer(own_sums + threadIdx.x * kOwnWords, lanes, lane);

  // The number of chunks left for the warp, a lane's next chunk, and the step to the one after it,
  // in samples and chunks.
  const int at_once = across / lanes, group = static_cast<int>(threadIdx.x) % across / lanes;
  const int first = across > kWarp ? group - lane / lanes : 0;
  const int64_t begin = task.unit_of_slice(blockIdx.y), sample_size = task.C * task.S;
  int units = static_cast<int>(task.unit_of_slice(blockIdx.y + 1) - begin) - first;
  const int64_t unit = begin + group;
  const int chunks = static_cast<int>(task.chunks);
  int64_t sample = unit, sample_step = at_once;
  const auto lanes_of_channel = PowerOf2::of(min(task.across, kWarp));
  int chunk = 0, chunk_step = 0;
  if (chunks > 1) {
    sample = unit / chunks;
    chunk = static_cast<int>(unit - sample * chunks);
    sample_step = at_once / chunks;
    chunk_step = at_once % chunks;
  }
  int64_t plane_at = sample * sample_size + c * task.S;
  const int64_t plane_step = sample_step * sample_size;
  const int last_size =
      static_cast<int>(task.S - static_cast<int64_t>(chunks - 1) * task.chunk_size);

  for (; units > 0; units -= at_once) {
    const int64_t at = plane_at + static_cast<int64_t>(chunk) * task.chunk_size;
    const bool exists = group - first < units && c < task.C;
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
      // The origin of the plane, as then the chunks of a warp read the same three values.
      const T* const plane = static_cast<const T*>(task.x) + plane_at;
      const auto value_of = [&](int64_t i) { return widen(plane[i]); };
      sums.origin = kBackward ? center.mean
                              : origin_of(value_of(0), value_of(task.S / 2), value_of(task.S - 1));
      sums.sums = share.sums(sums.origin);
    }
    plane_at += plane_step;
    chunk += chunk_step;
    if (chunk >= chunks) {
      chunk -= chunks;
      plane_at += sample_size;
    }
    buffer.add(sums, center, lanes_of_channel, units <= at_once,
               [&](const auto& f) { share.each(f); });
  }

  buffer.finish(lanes_of_channel, PowerOf2::of(max(across / kWarp, 1)), task, c);
}

}  // namespace gluon_syncbn

#endif  // GLUON_SYNCBN_CUDA_SUMS_PLANES_CUH_
