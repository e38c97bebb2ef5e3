// The loops of sums.inc, map.inc and rows.inc, compiled for several instruction sets, and the
// choice among these at run time. For kernels.cc alone.
#ifndef GLUON_SYNCBN_CPU_LOOPS_H_
#define GLUON_SYNCBN_CPU_LOOPS_H_

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#endif

#include <algorithm>
#include <cstring>
#include <numeric>
#include <vector>

#include "numerics/shards.h"

#define SBN_INLINE inline __attribute__((always_inline))
// The next loop has independent iterations.
#if defined(__clang__)
#define SBN_INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#else
#define SBN_INDEPENDENT _Pragma("GCC ivdep")
#endif

namespace gluon_syncbn {
namespace {

// Values of a channel in a sample that are summed in double before they enter a Sum3.
constexpr int64_t kChunk = 2048;
// Channels whose sums are added to Sum3 at a time: planes (S > 1), and the most with S = 1.
constexpr int64_t kPlanes = 8, kBlock = 512;

// The chunks of a channel. In each sample it has `length` values, `step` apart, and the samples are
// `sample` values apart. begin..end is a range of chunks, counted through all samples.
struct Chunks {
  int64_t length, step, sample, chunks, begin, end;

  static Chunks of(View view) {
    const int64_t length = view.S * view.R, chunks = (length + kChunk - 1) / kChunk;
    return {length, view.S > 1 ? 1 : view.C, view.C * length, chunks, 0, view.N / view.R * chunks};
  }
};

// The arrays that backward reads.
template <typename T>
struct Sources {
  const T *dy, *x;
  // x or y, which determines the derivative of the activation. Null without an activation.
  const T* gate;
  // The inverse of the slope if z is found from y, otherwise 0.
  Arithmetic<T> recovery;
};

// The arrays that backward writes; null if not wanted.
template <typename T>
struct Results {
  T* dx;
  WriteMode mode;
  T* dresidual;
  WriteMode residual_mode;
};

// S = 1: the coefficients of the channels of a row, or of several short rows, for vectors across
// channels. Each number of K has an array of its own.
template <typename K, typename A>
class Columns {
  static constexpr int64_t kNumbers = sizeof(K) / sizeof(A);

 public:
  // At most n rows.
  Columns(const std::vector<K>& of_channels, int64_t n) {
    const auto C = static_cast<int64_t>(of_channels.size());
    size_ = C * std::clamp<int64_t>(kBlock / C, 1, std::max<int64_t>(n, 1));
    numbers_.resize(kNumbers * size_);
    for (int64_t i = 0; i < size_; ++i) {
      A numbers[kNumbers];
      std::memcpy(numbers, &of_channels[i % C], sizeof(numbers));
      for (int64_t k = 0; k < kNumbers; ++k) numbers_[k * size_ + i] = numbers[k];
    }
  }

  // Values in the rows.
  int64_t size() const { return size_; }

  // Number k of the coefficients of each value.
  const A* operator[](int64_t k) const { return &numbers_[k * size_]; }

 private:
  int64_t size_;
  std::vector<A> numbers_;
};

template <typename T>
using NormalizeColumns = Columns<Normalize<Arithmetic<T>>, Arithmetic<T>>;
template <typename T>
using GradientColumns = Columns<InputGradient<Arithmetic<T>>, Arithmetic<T>>;
template <typename T>
using GateColumns = Columns<Gate<Arithmetic<T>>, Arithmetic<T>>;

template <typename T>
struct Loops {
  using A = Arithmetic<T>;
  // Adds the sums of `width` channels, the first of which begins at `at`. Forward reads x alone.
  using Sum = void (*)(const Sources<T>&, int64_t at, const Chunks&, int64_t width,
                       const Statistics*, const Gate<A>*, ChannelSums*);
  Sum forward_planes, backward_planes, forward_rows, backward_rows;
  void (*normalize)(const T* x, const T* residual, int64_t n, const Normalize<A>&, const Epilogue&,
                    T* y, WriteMode);
  void (*normalize_rows)(const T* x, const T* residual, int64_t n, const NormalizeColumns<T>&,
                         const Epilogue&, T* y, WriteMode);
  void (*input_gradient)(const Sources<T>&, int64_t at, int64_t n, const InputGradient<A>&,
                         const Gate<A>&, const Results<T>&);
  void (*input_gradient_rows)(const Sources<T>&, int64_t at, int64_t n, const GradientColumns<T>&,
                              const GateColumns<T>&, const Results<T>&);
};

namespace baseline {
#include "cpu/loops.inc"
}  // namespace baseline

#if defined(__x86_64__)
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
#endif
#define SBN_F16C
namespace avx2 {
#include "cpu/loops.inc"
}  // namespace avx2
#if defined(__clang__)
#pragma clang attribute pop
#pragma clang attribute push(                                                    \
    __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c"))), \
    apply_to = function)
#else
#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")
#endif
namespace avx512 {
#include "cpu/loops.inc"
}  // namespace avx512
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

bool has_avx2() {
  // g++ before version 11 does not know "f16c". The check for "avx2" includes that the system saves
  // the registers.
  unsigned a, b, c = 0, d;
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
         __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
}

bool has_avx512() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}
#endif

template <typename T>
const Loops<T>& loops() {
#if defined(__x86_64__)
  static const Loops<T>& best = has_avx512() ? avx512::kLoops<T>
                                : has_avx2() ? avx2::kLoops<T>
                                             : baseline::kLoops<T>;
  return best;
#else
  return baseline::kLoops<T>;
#endif
}

}  // namespace
}  // namespace gluon_syncbn

#endif  // GLUON_SYNCBN_CPU_LOOPS_H_
