// The kernels that write y and dx, mostly in vectors of 16 bytes. Small kernels before them compute
// the coefficients of each channel once, so that little arithmetic is left for each value.
#ifndef GLUON_SYNCBN_CUDA_ELEMENTWISE_CUH_
#define GLUON_SYNCBN_CUDA_ELEMENTWISE_CUH_

#include <type_traits>

#include "cuda/backend.h"
#include "cuda/plans.h"
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

// The coefficients of dx of one channel, with an activation or a gradient of the residual.
template <typename A>
struct GatedGradient {
  // Of Gate.
  A sign, threshold;
  InputGradient<A> input;
};

// The coefficients of y with a residual.
template <typename A>
struct NormalizeSum {
  Normalize<A> normalize;
};

// The number of operands of a set of coefficients.
template <typename F>
constexpr int kOperands = 1;
template <typename A>
constexpr int kOperands<NormalizeSum<A>> = 2;
template <typename A>
constexpr int kOperands<InputGradient<A>> = 2;
template <typename A>
constexpr int kOperands<GatedGradient<A>> = 3;

// The arguments of an elementwise kernel. Operands and results:
//
// - Normalize: x; y
// - NormalizeSum: x, residual; y
// - InputGradient: dy, x; dx
// - GatedGradient: dy, x, v; dx, dresidual, either of which may be null
struct MapTask {
  int64_t C, S, size;
  const void *a, *b;
  void* to;
  const void* coefficients;
  bool add;
  // S > 1: the vectors of a block, at most kVectorsPerThread for each thread. A small array has
  // one, to have more blocks.
  uint32_t per_block;
  // The first value at a multiple of 16 bytes, and the number of vectors from there.
  int64_t head, vectors;
  // Value i belongs to plane i / S and channel i / S % C. The dividers are zero for 2^31 values or
  // more.
  Divider by_S, by_C;

  SBN_DEVICE uint32_t channel_of(uint32_t plane) const {
    return plane - by_C(plane) * static_cast<uint32_t>(C);
  }
};

// The results of kCount values, those of dresidual in `seconds`. f(j) has the coefficients of value
// j; a(j), b(j) and v(j) are its operands.
template <typename T, typename F, int kCount, typename Coefficients, typename Value>
SBN_DEVICE void evaluate(const EpilogueTask<Arithmetic<T>>& epilogue, const Coefficients& f,
                         const Value& a, const Value& b, const Value& v,
                         Arithmetic<T> (&results)[kCount], Arithmetic<T> (&seconds)[kCount]) {
  using A = Arithmetic<T>;
#pragma unroll
  for (int j = 0; j < kCount; ++j) {
    const F affine = f(j);
    if constexpr (std::is_same<F, GatedGradient<A>>::value) {
      const auto gates = Gates<A, true>::of(epilogue, affine.sign, affine.threshold);
      seconds[j] = gates.dy(a(j), v(j));
      results[j] = affine.input(seconds[j], gates.x(b(j), v(j)));
    } else if constexpr (std::is_same<F, InputGradient<A>>::value) {
      results[j] = affine(a(j), b(j));
    } else if constexpr (std::is_same<F, NormalizeSum<A>>::value) {
      // As if another operator had added them.
      T rounded;
      narrow(affine.normalize(a(j)), &rounded);
      results[j] = widen(rounded) + b(j);
    } else {
      results[j] = affine(a(j));
    }
  }
  if constexpr (std::is_same<F, Normalize<A>>::value || std::is_same<F, NormalizeSum<A>>::value) {
    if (epilogue.activation == Activation::kNone) return;
    const bool is_relu = epilogue.activation == Activation::kRelu;
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
      // Preserves NaN, and relu gives no negative zero.
      const A rest = is_relu ? A{0} : results[j] * epilogue.slope;
      results[j] = results[j] <= 0 ? rest : results[j];
    }
  }
}

template <typename T, typename F>
SBN_DEVICE void map_value(const MapTask& task, const EpilogueTask<Arithmetic<T>>& epilogue,
                          int64_t i, int64_t c) {
  using A = Arithmetic<T>;
  constexpr int kArrays = kOperands<F>;
  const F affine = load_affine<F>(task.coefficients, c);
  const auto operand = [&](const void* from, bool exists) {
    return exists ? widen(static_cast<const T*>(from)[i]) : A{0};
  };
  const A a = operand(task.a, true), b = operand(task.b, kArrays > 1);
  const A v = operand(epilogue.v, kArrays > 2);
  A results[1], seconds[1];
  const auto value = [](A x) { return [=](int) { return x; }; };
  evaluate<T, F>(
      epilogue, [&](int) { return affine; }, value(a), value(b), value(v), results, seconds);
  const auto store = [&](A result, void* array, bool add) {
    T* const to = static_cast<T*>(array) + i;
    T rounded;
    narrow(result, &rounded);
    *to = add ? added(*to, rounded) : rounded;
  };
  if (kArrays < 3 || task.to) store(results[0], task.to, task.add);
  if constexpr (kArrays == 3) {
    if (epilogue.dresidual) store(seconds[0], epilogue.dresidual, epilogue.add_dresidual);
  }
}

// The values before and after the vectors, fewer than one vector each: one value per thread.
template <typename T, typename F, typename ChannelOf>
SBN_DEVICE void map_ends(const MapTask& task, const EpilogueTask<Arithmetic<T>>& epilogue,
                         int64_t thread, const ChannelOf& channel_of) {
  const int64_t behind = task.head + task.vectors * kPack<T> + thread;
  if (thread < task.head) map_value<T, F>(task, epilogue, thread, channel_of(thread));
  if (behind < task.size && thread < kPack<T>) {
    map_value<T, F>(task, epilogue, behind, channel_of(behind));
  }
}

// Loads the operands of a vector, and stores its results.
template <typename T, typename F>
struct Operands {
  using A = Arithmetic<T>;
  static constexpr int kSize = kPack<T>, kArrays = kOperands<F>;
  Words a, b, v, to, second;

  SBN_DEVICE void load(const MapTask& task, const EpilogueTask<A>& epilogue, int64_t i) {
    a = load_words(static_cast<const T*>(task.a) + i);
    if (kArrays > 1) b = load_words(static_cast<const T*>(task.b) + i);
    if (task.add) to = load_words(static_cast<const T*>(task.to) + i);
    if constexpr (kArrays > 2) {
      if (epilogue.v != task.b) v = load_words(static_cast<const T*>(epilogue.v) + i);
      if (epilogue.add_dresidual) {
        second = load_words(static_cast<const T*>(epilogue.dresidual) + i);
      }
    }
  }

  // f(j) has the coefficients of value j.
  template <typename Coefficients>
  SBN_DEVICE void store(const MapTask& task, const EpilogueTask<A>& epilogue, int64_t i,
                        const Coefficients& f) const {
    const Words b_words = kArrays > 1 ? b : a;
    const Words v_words = kArrays > 2 && epilogue.v != task.b ? v : b_words;
    A results[kSize], seconds[kSize];
    evaluate<T, F>(epilogue, f, Values<T>(a), Values<T>(b_words), Values<T>(v_words), results,
                   seconds);
    if (kArrays < 3 || task.to) put(results, to, static_cast<T*>(task.to) + i, task.add);
    if constexpr (kArrays > 2) {
      if (epilogue.dresidual) {
        put(seconds, second, static_cast<T*>(epilogue.dresidual) + i, epilogue.add_dresidual);
      }
    }
  }

 private:
  SBN_DEVICE static void put(const A (&results)[kSize], const Words& before, T* to, bool add) {
    const Words rounded = words_of<T>(results);
    if (!add) return store_words(to, rounded);
    Words sums = zero_words();
#pragma unroll
    for (int j = 0; j < kSize; ++j) {
      T a, b;
      get_value(before, j, &a);
      get_value(rounded, j, &b);
      set_value(&sums, j, added(a, b));
    }
    store_words(to, sums);
  }
};

template <typename F>
constexpr int kVectorsPerThread = kOperands<F> == 1 ? 4
                                  : sizeof(F) > 48  ? 1
                                                    : 2;

// For any arrays: one value per thread.
template <typename T, typename F>
__global__ void __launch_bounds__(kThreads)
    map_values(MapTask task, EpilogueTask<Arithmetic<T>> epilogue) {
  const int64_t i = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (i >= task.size) return;
  const bool divides = task.by_S.divisor != 0;
  map_value<T, F>(
      task, epilogue, i,
      divides ? task.channel_of(task.by_S(static_cast<uint32_t>(i))) : i / task.S % task.C);
}

// S > 1: a thread has several vectors, and those of a block are contiguous. A vector has values of
// at most two planes.
template <typename T, typename F>
__global__ void __launch_bounds__(kThreads)
    map_planes(MapTask task, EpilogueTask<Arithmetic<T>> epilogue) {
  constexpr int kSize = kPack<T>, kVectors = kVectorsPerThread<F>;
  const auto S = static_cast<uint32_t>(task.S);
  const auto C = static_cast<uint32_t>(task.C);
  if (blockIdx.x == 0) {
    map_ends<T, F>(task, epilogue, threadIdx.x,
                   [&](int64_t i) { return task.channel_of(task.by_S(static_cast<uint32_t>(i))); });
  }
  // From the end, which the sums have read last.
  const unsigned block = gridDim.x - 1 - blockIdx.x;
  const uint32_t first = block * task.per_block, start = first + threadIdx.x;
  // The vectors left for this thread and those after it.
  const auto rest =
      static_cast<int>(min(first + task.per_block, static_cast<uint32_t>(task.vectors)) - start);
  Operands<T, F> operands[kVectors];
  // If most warps have a vector that reaches into the next plane, all take the same branch.
  const bool mixed = S < 64 * kSize;
  F coefficients[kVectors];
  uint32_t channels[kVectors], left[kVectors];
  const auto index = [&](int k) {
    return static_cast<uint32_t>(task.head) + (start + k * kThreads) * kSize;
  };
#pragma unroll
  for (int k = 0; k < kVectors; ++k) {
    if (k * kThreads < rest) operands[k].load(task, epilogue, index(k));
  }
#pragma unroll
  for (int k = 0; k < kVectors; ++k) {
    const uint32_t plane = task.by_S(index(k));
    channels[k] = task.channel_of(plane);
    // Values to the end of the plane.
    left[k] = (plane + 1) * S - index(k);
    if (k * kThreads < rest) coefficients[k] = load_affine<F>(task.coefficients, channels[k]);
  }
#pragma unroll
  for (int k = 0; k < kVectors; ++k) {
    if (k * kThreads >= rest) break;
    if (left[k] >= kSize && !mixed) {
      operands[k].store(task, epilogue, index(k), [&](int) { return coefficients[k]; });
    } else {
      const uint32_t next = channels[k] + 1 == C ? 0 : channels[k] + 1;
      const F second = load_affine<F>(task.coefficients, next);
      operands[k].store(task, epilogue, index(k), [&](int j) {
        return static_cast<uint32_t>(j) < left[k] ? coefficients[k] : second;
      });
    }
  }
}

// Resident blocks of map_rows per multiprocessor, limited by registers, and vectors per thread.
template <typename T, typename F>
constexpr int kMapBlocks =
    kOperands<F> < 3 ? (sizeof(T) == 2 ? 2 : 3) + (kOperands<F> == 1 ? 1 : 0) : 2;
template <typename F>
constexpr int kRowVectors = kOperands<F> < 3 ? 2 : 1;

// S = 1: the number of threads is chosen so that each of them always has the same channels, and
// keeps their coefficients in registers.
template <typename T, typename F>
__global__ void __launch_bounds__(kThreads, kMapBlocks<T, F>)
    map_rows(MapTask task, EpilogueTask<Arithmetic<T>> epilogue, int64_t threads) {
  constexpr int kSize = kPack<T>, kUnroll = kRowVectors<F>;
  const int64_t thread = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  map_ends<T, F>(task, epilogue, thread, [&](int64_t i) { return i % task.C; });
  if (thread >= threads || thread >= task.vectors) return;
  Operands<T, F> operands[kUnroll] = {};
  const auto load = [&](int64_t base) {
#pragma unroll
    for (int k = 0; k < kUnroll; ++k) {
      const int64_t v = base + k * threads;
      if (k == 0 || v < task.vectors) operands[k].load(task, epilogue, task.head + v * kSize);
    }
  };
  // The first loads overlap with those of the coefficients.
  load(thread);
  F coefficients[kSize];
  // In 32 bits where that is enough, as GPUs divide slowly.
  const int64_t first = task.head + thread * kSize;
  int64_t c = task.by_C.divisor ? task.channel_of(static_cast<uint32_t>(first)) : first % task.C;
#pragma unroll
  for (int j = 0; j < kSize; ++j) {
    coefficients[j] = load_affine<F>(task.coefficients, c);
    c = c + 1 == task.C ? 0 : c + 1;
  }
  for (int64_t base = thread; base < task.vectors; base += threads * kUnroll) {
    if (base != thread) load(base);
#pragma unroll
    for (int k = 0; k < kUnroll; ++k) {
      const int64_t v = base + k * threads;
      if (v >= task.vectors) break;
      operands[k].store(task, epilogue, task.head + v * kSize,
                        [&](int j) { return coefficients[j]; });
    }
  }
}

}  // namespace gluon_syncbn

#endif  // GLUON_SYNCBN_CUDA_ELEMENTWISE_CUH_
