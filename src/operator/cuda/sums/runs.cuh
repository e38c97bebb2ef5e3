// Shared by the kernels of sums, which read x, or dy and x, once.
//
// The result depends neither on the number of blocks nor on the split of a batch. What is added in
// Arithmetic<T>, and in what order, depends only on the shape of a sample: the values of a run, the
// runs of a thread's share of a chunk, and the shares of a chunk. Chunks are added exactly
// (chunks.cuh), where the order is immaterial.
#ifndef GLUON_SYNCBN_CUDA_SUMS_RUNS_CUH_
#define GLUON_SYNCBN_CUDA_SUMS_RUNS_CUH_

#include "cuda/vectors.cuh"
#include "numerics/formulas.h"

namespace gluon_syncbn {

constexpr int kThreads = 256, kWarp = 32, kWarps = kThreads / kWarp;
constexpr unsigned kAllLanes = 0xffffffffu;

// threadIdx.x, which the compiler does not know to be the same.
SBN_DEVICE int thread_read_again() {
  int thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return thread;
}

// A power of 2. It divides in one instruction: a number known only at run time would take thirty.
struct PowerOf2 {
  int value, log;

  SBN_DEVICE static PowerOf2 of(int value) { return {value, 31 - __clz(value)}; }
  SBN_DEVICE operator int() const { return value; }
};
template <typename N>
SBN_DEVICE auto operator/(N n, PowerOf2 divisor) {
  return n >> divisor.log;
}
template <typename N>
SBN_DEVICE auto operator%(N n, PowerOf2 divisor) {
  return n & (divisor.value - 1);
}

// The maximum number of values of a chunk per thread, for planes. The work per chunk takes as long
// as several vectors.
template <typename T>
constexpr int kPlaneShare = sizeof(T) == sizeof(double) ? 32 : 64;
// Vectors of a run of a plane: value j of each is in chain j.
constexpr int kRunVectors = 4;
// S = 1: rows of a run, which are one chain for each channel; runs of a thread's share of a chunk;
// rows of threads for a chunk, at least.
constexpr int kRunRows = 8, kRowRuns = 4, kFewestRows = 2;

// Resident blocks of each kernel of sums per multiprocessor, limited by registers. The kernels read
// kArrays arrays: 1: x. 2: dy and x. 3: dy, x, and v, on which the gradient of an activation
// depends.
constexpr int plane_blocks(int arrays, bool aligned) { return aligned && arrays == 1 ? 3 : 2; }
constexpr int kRowBlocks = 2;

// The unevaluated sum of two floats: about 48 bits, without instructions for double, at which most
// GPUs are slow. For double, a plain sum.
template <typename A>
struct Partial;
template <>
struct Partial<float> {
  float high = 0, low = 0;

  SBN_DEVICE static Partial choose(bool condition, const Partial& a, const Partial& b) {
    return {condition ? a.high : b.high, condition ? a.low : b.low};
  }
  SBN_DEVICE void add(float term) {
    const float sum = high + term, part = sum - high;
    low += (high - (sum - part)) + (term - part);
    high = sum;
  }
  // Commutative, so that lanes that add each other's sums get the same bits.
  SBN_DEVICE void add(const Partial& other) {
    const float sum = high + other.high, part = sum - high;
    low = (low + other.low) + ((high - (sum - part)) + (other.high - part));
    high = sum;
  }
  // After terms that cancel, all bits may be in `low`.
  SBN_DEVICE bool is_zero() const { return high == 0 && low == 0; }
  SBN_DEVICE Partial from_lane(int mask) const {
    return {__shfl_xor_sync(kAllLanes, high, mask), __shfl_xor_sync(kAllLanes, low, mask)};
  }
};
template <>
struct Partial<double> {
  double high = 0;

  SBN_DEVICE static Partial choose(bool condition, const Partial& a, const Partial& b) {
    return {condition ? a.high : b.high};
  }
  SBN_DEVICE void add(double term) { high += term; }
  SBN_DEVICE void add(const Partial& other) { high += other.high; }
  SBN_DEVICE Partial from_lane(int mask) const { return {__shfl_xor_sync(kAllLanes, high, mask)}; }
};

// The two sums of a thread's share of a chunk. Forward: x - origin, and its square. Backward: dy,
// and dy * (x - origin).
template <typename A>
struct Share {
  Partial<A> first, second;

  SBN_DEVICE void add(const Share& other) {
    first.add(other.first);
    second.add(other.second);
  }

  // Adds up the shares of `lanes` lanes, a power of 2. All of them get the sums. Half of them
  // reduce the first sum, half the second.
  SBN_DEVICE void add_lanes(int lanes, int lane) {
    if (lanes == 1) return;
    const bool upper = lane & (lanes / 2);
    Partial<A> own = Partial<A>::choose(upper, second, first);
    own.add(Partial<A>::choose(upper, first, second).from_lane(lanes / 2));
#pragma unroll
    for (int mask = kWarp / 4; mask > 0; mask /= 2) {
      if (mask < lanes / 2) own.add(own.from_lane(mask));
    }
    const Partial<A> other = own.from_lane(lanes / 2);
    first = Partial<A>::choose(upper, other, own);
    second = Partial<A>::choose(upper, own, other);
  }
};

// The sums of a run, in chains.
template <typename A, int kChains>
struct Run {
  A first[kChains], second[kChains];

  // Adds a, and a * b.
  SBN_DEVICE void add(int chain, bool is_first, A a, A b) {
    first[chain] = is_first ? a : first[chain] + a;
    second[chain] = is_first ? a * b : fma(a, b, second[chain]);
  }

  // For chains of one channel.
  SBN_DEVICE void add_to(Share<A>* share) {
#pragma unroll
    for (int half = kChains / 2; half > 0; half /= 2) {
#pragma unroll
      for (int i = 0; i < half; ++i) {
        first[i] += first[i + half];
        second[i] += second[i + half];
      }
    }
    add_chain_to(0, share);
  }
  SBN_DEVICE void add_chain_to(int chain, Share<A>* share) const {
    share->first.add(first[chain]);
    share->second.add(second[chain]);
  }
};

// The median of three values of a chunk: a number close to the others, so that rounding errors
// depend on their spread and not on their offset, even if one value is an outlier.
template <typename A>
SBN_DEVICE A origin_of(A a, A b, A c) {
  const A low = a < b ? a : b, high = a < b ? b : a;
  return c < low ? low : c > high ? high : c;
}

// The mean of a channel, as the sum of two numbers of A.
template <typename A>
struct Center {
  A mean, mean_low;

  SBN_DEVICE static Center of(const Statistics& s) {
    const A mean = static_cast<A>(s.mean);
    return {mean, static_cast<A>((s.mean - static_cast<double>(mean)) + s.mean_low)};
  }

  // Corrects sum(dy * (x - mean)), given sum(dy), for the lower part of the mean.
  SBN_DEVICE void correct(Share<A>* share) const {
    share->second.add(-mean_low * share->first.high);
  }
};

// ChannelSums in device memory are aligned to 16 bytes.
SBN_DEVICE void store_sums(const ChannelSums& sums, ChannelSums* to) {
  const double numbers[6] = {sums.first.high,  sums.first.middle,  sums.first.low,
                             sums.second.high, sums.second.middle, sums.second.low};
#pragma unroll
  for (int i = 0; i < 3; ++i) {
    Words words;
    set_value(&words, 0, numbers[2 * i]);
    set_value(&words, 1, numbers[2 * i + 1]);
    store_words(reinterpret_cast<char*>(to) + 16 * i, words);
  }
}

// The sums of a channel over the blocks that share it: C x slices. As six arrays, one for each
// double, so that the lanes that read the slices of a channel read contiguous memory.
struct Slices {
  double* arrays;
  int64_t C;
  int slices;

  SBN_DEVICE double* at(int64_t c, int slice, int i) const {
    return arrays + (i * C + c) * slices + slice;
  }
  SBN_DEVICE void store(int64_t c, int slice, const ChannelSums& sums) const {
    const double numbers[6] = {sums.first.high,  sums.first.middle,  sums.first.low,
                               sums.second.high, sums.second.middle, sums.second.low};
#pragma unroll
    for (int i = 0; i < 6; ++i) *at(c, slice, i) = numbers[i];
  }
  // The first or second sum.
  SBN_DEVICE Sum3 load(int64_t c, int slice, bool is_second) const {
    const auto number = [&](int i) { return *at(c, slice, is_second ? i + 3 : i); };
    return {number(0), number(1), number(2)};
  }
};

// The arguments of a kernel of sums.
struct SumsTask {
  // N samples of C channels of S values, or, with S = 1, of R rows of C values.
  int64_t N, C, S, R;
  // x, or y, from which z is found (from_y), with the statistics of either.
  const void *dy, *x;
  const Statistics* statistics;
  // If each channel has one block, the block writes to `sums`. Several blocks write to `work`.
  ChannelSums *sums, *work;
  // Chunks per sample, and units (usually chunks) of all samples; chunk_size in values of a plane,
  // or in rows.
  int64_t chunks, units;
  int chunk_size, slices, lanes;
  // S > 1: threads for a channel. A block has several channels if a channel has few units.
  int across;
  // S = 1: rows of threads for a chunk. The others of a block have other chunks.
  int down;
  // Threads for the kRowRuns runs of a share: 1, or one for each.
  int split;
  // The ends of dy and x.
  const void *dy_end, *x_end;

  SBN_DEVICE int64_t unit_of_slice(int slice) const { return units * slice / slices; }
  SBN_DEVICE void store(int64_t c, int slice, const ChannelSums& result) const {
    if (slices == 1) {
      store_sums(result, sums + c);
    } else {
      Slices{reinterpret_cast<double*>(work), C, slices}.store(c, slice, result);
    }
  }
};

// The arguments of a kernel for an activation and a residual. They are a separate parameter, as
// nvcc generates slower code for a struct of more than 128 bytes.
template <typename A>
struct EpilogueTask {
  Activation activation;
  // The slope of the activation, and that of its inverse if z is found from y, otherwise 1.
  A slope, inverse;
  // The array that determines the gates, x or y, and its end.
  const void *v, *v_end;
  const Gate<A>* gates;
  void* dresidual;
  bool add_dresidual;
};

// Whether Fetched stays inside the arrays.
template <int kArrays, typename A>
SBN_DEVICE bool holds(const SumsTask& task, const EpilogueTask<A>& epilogue, const void* dy,
                      const void* x, const void* v, int64_t vectors) {
  return Extent{task.x, task.x_end}.holds(x, vectors) &&
         (kArrays < 2 || Extent{task.dy, task.dy_end}.holds(dy, vectors)) &&
         (kArrays < 3 || Extent{epilogue.v, epilogue.v_end}.holds(v, vectors));
}

// Recovers x from y by the inverse of the activation, whose slope is not 0.
template <typename A>
struct InverseGate {
  A sign, threshold, slope;

  SBN_DEVICE A of(A x, bool open) const { return open ? x : x * slope; }
  SBN_DEVICE A operator()(A x, A v) const { return of(x, v * sign > threshold); }
};

// Turns values of dy and x, given that of v, into those that are summed.
template <typename A, bool kGated>
struct Gates {
  Gate<A> dy;
  InverseGate<A> x;

  SBN_DEVICE static Gates of(const EpilogueTask<A>& epilogue, A sign, A threshold) {
    return {{sign, threshold, epilogue.slope}, {sign, threshold, epilogue.inverse}};
  }
  SBN_DEVICE static Gates of(const EpilogueTask<A>& epilogue, int64_t c) {
    return of(epilogue, epilogue.gates[c].sign, epilogue.gates[c].threshold);
  }
};
template <typename A>
struct Gates<A, false> {
  struct Open {
    SBN_DEVICE A operator()(A value, A) const { return value; }
  } dy, x;

  SBN_DEVICE static Gates of(const EpilogueTask<A>&, int64_t) { return {}; }
};

}  // namespace gluon_syncbn

#endif  // GLUON_SYNCBN_CUDA_SUMS_RUNS_CUH_
