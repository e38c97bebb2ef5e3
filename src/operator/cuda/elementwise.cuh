// The kernels that write y and dx, and the small kernels that compute their coefficients.
#ifndef GLUON_SYNCBN_CUDA_ELEMENTWISE_CUH_
#define GLUON_SYNCBN_CUDA_ELEMENTWISE_CUH_

#include "cuda/backend.h"
#include "cuda/sums/runs.cuh"

namespace gluon_syncbn {

// The coefficients of formulas.h for each channel, as 16-byte vectors in memory.
template <typename F>
constexpr int kCoefficientWords = static_cast<int>((sizeof(F) + 15) / 16);

template <typename F>
SBN_DEVICE F load_affine(const void* coefficients, int64_t c) {
  const char* const from = static_cast<const char*>(coefficients) + c * kCoefficientWords<F> * 16;
  Words words[kCoefficientWords<F>];
#pragma unroll
  for (int i = 0; i < kCoefficientWords<F>; ++i) words[i] = load_words(from + 16 * i);
  F affine;
  memcpy(&affine, words, sizeof(affine));
  return affine;
}

template <typename F>
SBN_DEVICE void store_affine(const F& affine, void* coefficients, int64_t c) {
  char* const to = static_cast<char*>(coefficients) + c * kCoefficientWords<F> * 16;
  Words words[kCoefficientWords<F>] = {};
  memcpy(words, &affine, sizeof(affine));
#pragma unroll
  for (int i = 0; i < kCoefficientWords<F>; ++i) store_words(to + 16 * i, words[i]);
}

// Divides integers below 2^31 by a constant: a product and a shift.
struct Divider {
  uint32_t divisor, multiplier, shift;

  static Divider by(int64_t divisor) {
    Divider d{static_cast<uint32_t>(divisor), 0, 0};
    while ((uint64_t{1} << d.shift) < d.divisor) ++d.shift;
    // 2^(31 + shift) / divisor, rounded up, which is exact for n < 2^31.
    d.multiplier =
        static_cast<uint32_t>(((uint64_t{1} << (31 + d.shift)) + d.divisor - 1) / d.divisor);
    return d;
  }

  SBN_DEVICE uint32_t operator()(uint32_t n) const {
    return static_cast<uint32_t>((static_cast<uint64_t>(n) * multiplier) >> (31 + shift));
  }
};

// The arguments of an elementwise kernel: to = affine(a) or affine(a, b).
struct MapTask {
  int64_t C, S, size;
  const void *a, *b;
  void* to;
  const void* coefficients;
  bool add;
  // The first value at a multiple of 16 bytes in `to`, and the number of vectors from there for
  // which Fetched stays inside of the other arrays.
  int64_t head, vectors;
  // Value i belongs to plane i / S and channel i / S % C. For fewer than 2^31 values.
  Divider by_S, by_C;

  SBN_DEVICE uint32_t plane_of(uint32_t i) const { return by_S(i); }
  SBN_DEVICE int64_t plane_of(int64_t i) const { return i / S; }
  SBN_DEVICE uint32_t channel_of(uint32_t plane) const {
    return plane - by_C(plane) * static_cast<uint32_t>(C);
  }
  SBN_DEVICE int64_t channel_of(int64_t plane) const { return plane % C; }
};

template <typename A>
SBN_DEVICE A apply(const Normalize<A>& affine, A a, A) {
  return affine(a);
}
template <typename A>
SBN_DEVICE A apply(const InputGradient<A>& affine, A a, A b) {
  return affine(a, b);
}
template <typename F>
constexpr bool kTakesTwo = false;
template <typename A>
constexpr bool kTakesTwo<InputGradient<A>> = true;

template <typename T, typename F>
SBN_DEVICE void map_value(const MapTask& task, int64_t i) {
  using A = Arithmetic<T>;
  const F affine = load_affine<F>(task.coefficients, i / task.S % task.C);
  const A a = widen(static_cast<const T*>(task.a)[i]);
  const A b = kTakesTwo<F> ? widen(static_cast<const T*>(task.b)[i]) : a;
  T* const to = static_cast<T*>(task.to) + i;
  A result = apply(affine, a, b);
  if (task.add) result = widen(*to) + result;
  narrow(result, to);
}

// The values before and after the vectors, fewer than two vectors each: one value per thread.
template <typename T, typename F>
SBN_DEVICE void map_ends(const MapTask& task, int64_t thread) {
  const int64_t behind = task.head + task.vectors * kPack<T>;
  if (thread < task.head) map_value<T, F>(task, thread);
  if (behind + thread < task.size && thread < 2 * kPack<T>) map_value<T, F>(task, behind + thread);
}

// Loads the operands of a vector, and stores its results.
template <typename T, typename F, bool kAligned>
struct Operands {
  using A = Arithmetic<T>;
  static constexpr int kSize = kPack<T>;
  Fetched<kAligned> a, b;
  Words to;

  SBN_DEVICE void load(const MapTask& task, int64_t i) {
    a = Fetched<kAligned>::load(static_cast<const T*>(task.a) + i);
    if (kTakesTwo<F>) b = Fetched<kAligned>::load(static_cast<const T*>(task.b) + i);
    if (task.add) to = load_words(static_cast<const T*>(task.to) + i);
  }

  // affine(j) has the coefficients of value j.
  template <typename Affine>
  SBN_DEVICE void store(const MapTask& task, int64_t i, const Affine& affine) const {
    // The same for all vectors.
    const auto shift = [&](const void* p) { return misalignment(static_cast<const T*>(p) + i); };
    const Words a_words = a.template words<T>(kAligned ? 0 : shift(task.a));
    const Words b_words =
        kTakesTwo<F> ? b.template words<T>(kAligned ? 0 : shift(task.b)) : a_words;
    A results[kSize];
#pragma unroll
    for (int j = 0; j < kSize; ++j) {
      results[j] = apply(affine(j), value_at<T>(a_words, j), value_at<T>(b_words, j));
    }
    if (task.add) {
#pragma unroll
      for (int j = 0; j < kSize; ++j) results[j] = value_at<T>(to, j) + results[j];
    }
    store_words(static_cast<T*>(task.to) + i, words_of<T>(results));
  }
};

template <typename F>
constexpr int kVectorsPerThread = kTakesTwo<F> ? 2 : 4;

// S > 1: a thread has several vectors, and those of a block are contiguous. `I` can index the whole
// array. `kAligned`: a vector has values of at most two planes.
template <typename I, typename T, typename F, bool kAligned>
__global__ void __launch_bounds__(kThreads) map_planes(MapTask task) {
  constexpr int kSize = kPack<T>, kVectors = kVectorsPerThread<F>;
  const I vectors = static_cast<I>(task.vectors), S = static_cast<I>(task.S);
  const I C = static_cast<I>(task.C);
  if (blockIdx.x == 0) map_ends<T, F>(task, threadIdx.x);
  const I start = static_cast<I>(blockIdx.x) * (kThreads * kVectors) + threadIdx.x;
  Operands<T, F, kAligned> operands[kVectors];
  F coefficients[kVectors];
  I channels[kVectors], left[kVectors];
  const auto index = [&](int k) {
    return static_cast<I>(task.head) + (start + k * kThreads) * kSize;
  };
#pragma unroll
  for (int k = 0; k < kVectors; ++k) {
    if (start + k * kThreads < vectors) operands[k].load(task, index(k));
  }
#pragma unroll
  for (int k = 0; k < kVectors; ++k) {
    const I plane = task.plane_of(index(k));
    channels[k] = task.channel_of(plane);
    // Values to the end of the plane.
    left[k] = (plane + 1) * S - index(k);
    if (start + k * kThreads < vectors)
      coefficients[k] = load_affine<F>(task.coefficients, channels[k]);
  }
  const auto next = [&](I c) { return c + 1 == C ? 0 : c + 1; };
  // If most warps have a vector that reaches into the next plane, all take the same branch.
  const bool mixed = S < 64 * kSize;
#pragma unroll
  for (int k = 0; k < kVectors; ++k) {
    if (start + k * kThreads >= vectors) break;
    if (left[k] >= kSize && !mixed) {
      operands[k].store(task, index(k), [&](int) { return coefficients[k]; });
    } else if (kAligned || S >= kSize) {
      const F second = load_affine<F>(task.coefficients, next(channels[k]));
      operands[k].store(task, index(k), [&](int j) {
        return static_cast<I>(j) < left[k] ? coefficients[k] : second;
      });
    } else {
      // Several planes in one vector.
      F affine = coefficients[k];
      I c = channels[k], behind = left[k];
      operands[k].store(task, index(k), [&](int j) {
        if (static_cast<I>(j) == behind) {
          behind += S;
          c = next(c);
          affine = load_affine<F>(task.coefficients, c);
        }
        return affine;
      });
    }
  }
}

// Resident blocks of map_rows per multiprocessor, limited by registers.
template <typename T, typename F, bool kAligned>
constexpr int kMapBlocks = kAligned ? (sizeof(T) == 2 ? 2 : 3) + (kTakesTwo<F> ? 0 : 1) : 2;

// S = 1: the number of threads is such that each of them always has the same channels, and keeps
// their coefficients in registers.
template <typename T, typename F, bool kAligned>
__global__ void __launch_bounds__(kThreads, kMapBlocks<T, F, kAligned>)
    map_rows(MapTask task, int64_t threads) {
  constexpr int kSize = kPack<T>, kUnroll = kAligned || !kTakesTwo<F> ? 2 : 1;
  const int64_t thread = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  map_ends<T, F>(task, thread);
  if (thread >= threads || thread >= task.vectors) return;
  Operands<T, F, kAligned> operands[kUnroll] = {};
  const auto load = [&](int64_t base) {
#pragma unroll
    for (int k = 0; k < kUnroll; ++k) {
      const int64_t v = base + k * threads;
      if (k == 0 || v < task.vectors) operands[k].load(task, task.head + v * kSize);
    }
  };
  // The first loads overlap with those of the coefficients. Not if unaligned, which takes twice the
  // registers.
  if (kAligned) load(thread);
  F coefficients[kSize];
  int64_t c = (task.head + thread * kSize) % task.C;
#pragma unroll
  for (int j = 0; j < kSize; ++j) {
    coefficients[j] = load_affine<F>(task.coefficients, c);
    c = c + 1 == task.C ? 0 : c + 1;
  }
  for (int64_t base = thread; base < task.vectors; base += threads * kUnroll) {
    if (!kAligned || base != thread) load(base);
#pragma unroll
    for (int k = 0; k < kUnroll; ++k) {
      const int64_t v = base + k * threads;
      if (v >= task.vectors) break;
      operands[k].store(task, task.head + v * kSize, [&](int j) { return coefficients[j]; });
    }
  }
}

template <typename P>
SBN_DEVICE void store_parameter(P* to, double value, bool add) {
  if (add) value += static_cast<double>(*to);
  *to = static_cast<P>(value);
}

SBN_DEVICE void deliver(const Delivery& d, int64_t i) {
  if (i >= d.count) return;
  const double value = d.from[i % d.period * d.stride];
  if (d.is_double) {
    store_parameter(static_cast<double*>(d.to) + i, value, d.add);
  } else {
    store_parameter(static_cast<float*>(d.to) + i, value, d.add);
  }
}

SBN_DEVICE int64_t global_thread() {
  return static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
}

// The coefficients of y for each channel of all batches, and the deliveries.
template <typename A>
__global__ void __launch_bounds__(kThreads)
    finish_forward(ForwardFinish task, Deliveries deliveries) {
  const int64_t i = global_thread();
  for (int d = 0; d < deliveries.size; ++d) deliver(deliveries.items[d], i);
  if (i >= task.C * task.batches || !task.coefficients) return;
  const int64_t c = i % task.C;
  void* const coefficients =
      static_cast<char*>(task.coefficients) + i / task.C * task.coefficients_stride;
  const double gamma = task.gamma ? static_cast<double>(static_cast<const A*>(task.gamma)[c]) : 1.0;
  if (task.beta) {
    const double beta = static_cast<const A*>(task.beta)[c];
    store_affine(Normalize<A>::of(task.statistics[i], gamma, beta), coefficients, c);
  } else {
    // dx with constant statistics.
    const Normalize<A> affine{0, 0, static_cast<A>(gamma * task.statistics[i].inv_std), 0};
    store_affine(affine, coefficients, c);
  }
}

template <typename P>
__global__ void __launch_bounds__(kThreads)
    statistics_of_arrays(int64_t C, const void* mean, const void* variance, double epsilon,
                         Statistics* statistics) {
  const int64_t c = global_thread();
  if (c >= C) return;
  statistics[c] =
      given_statistics(static_cast<const P*>(mean)[c], static_cast<const P*>(variance)[c], epsilon);
}

__global__ void __launch_bounds__(kThreads)
    statistics_of_sums(int64_t C, const ChannelSums* sums, double count, double epsilon,
                       Statistics* statistics) {
  const int64_t c = global_thread();
  if (c < C) statistics[c] = batch_statistics(sums[c], count, epsilon);
}

// The coefficients of dx, from the sums of all devices, and the gradients of gamma and beta, from
// those of this one, summed over the batches. Without the 4, CUDA 11.2 takes 48 registers on sm_80
// and spills one.
template <typename A>
__global__ void __launch_bounds__(kThreads, 4) finish_backward(BackwardFinish task) {
  const int64_t c = global_thread();
  if (c >= task.C) return;
  const double gamma = task.gamma ? static_cast<double>(static_cast<const A*>(task.gamma)[c]) : 1.0;
  double dgamma = 0, dbeta = 0;
  for (int64_t b = 0; b < task.batches; ++b) {
    const int64_t i = b * task.C + c;
    const Statistics s = task.statistics[i];
    dgamma += task.own_sums[i].second.value() * s.inv_std;
    dbeta += task.own_sums[i].first.value();
    if (!task.coefficients) continue;
    void* const coefficients = static_cast<char*>(task.coefficients) + b * task.coefficients_stride;
    if (task.sums) {
      const double count = task.counts[b];
      store_affine(InputGradient<A>::of(s, gamma, task.sums[i], count), coefficients, c);
    } else {
      store_affine(Normalize<A>{0, 0, static_cast<A>(gamma * s.inv_std), 0}, coefficients, c);
    }
  }
  if (task.dgamma) {
    store_parameter(static_cast<A*>(task.dgamma) + c, task.gamma ? dgamma : 0, task.add_dgamma);
  }
  if (task.dbeta) store_parameter(static_cast<A*>(task.dbeta) + c, dbeta, task.add_dbeta);
}

}  // namespace gluon_syncbn

#endif  // GLUON_SYNCBN_CUDA_ELEMENTWISE_CUH_
