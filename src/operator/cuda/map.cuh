// The kernel that writes y, or dx and the gradient of a residual. Small kernels before it
// (finish.cuh) compute the coefficients of each channel once, so that little arithmetic is left for
// each value. By one thread, for y:
//
//   for (int64_t i = 0; i < size; ++i) y[i] = coefficients[i / S % C](x[i]);
#ifndef GLUON_SYNCBN_CUDA_MAP_CUH_
#define GLUON_SYNCBN_CUDA_MAP_CUH_

#include "cuda/launch.cuh"

namespace gluon_syncbn {

// The coefficients of formulas.h for each channel, as 16-byte vectors in memory.
template <typename F>
constexpr int kCoefficientWords = static_cast<int>((sizeof(F) + 15) / 16);

template <typename F>
SBN_DEVICE F load_affine(const void* coefficients, int64_t c) {
  const char* const from = static_cast<const char*>(coefficients) + c * kCoefficientWords<F> * 16;
  uint32_t words[4 * kCoefficientWords<F>];
#pragma unroll
  for (int i = 0; i < kCoefficientWords<F>; ++i) load_words(from + 16 * i, words + 4 * i);
  F affine;
  memcpy(&affine, words, sizeof(affine));
  return affine;
}

template <typename F>
SBN_DEVICE void store_affine(const F& affine, void* coefficients, int64_t c) {
  char* const to = static_cast<char*>(coefficients) + c * kCoefficientWords<F> * 16;
  uint32_t words[4 * kCoefficientWords<F>] = {};
  memcpy(words, &affine, sizeof(affine));
#pragma unroll
  for (int i = 0; i < kCoefficientWords<F>; ++i) store_words(to + 16 * i, words + 4 * i);
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

// The arguments of the kernel. Operands and results:
//
// - Normalize: x; y
// - NormalizeSum: x, residual; y
// - InputGradient: dy, x; dx
// - GatedGradient: dy, x, v; dx, dresidual, either of which may be null
struct MapTask {
  const void *a, *b;
  void* to;
  const void* coefficients;
  bool add;
  // In vectors: all, and those of a row: of all channels, or of a plane.
  int vectors;
  Divider by_row, by_C;
  // From one vector of a thread to the next. Rows: a multiple of by_row, so that a thread always
  // has the same channels, and keeps their coefficients.
  int threads;
};

// The result for one value, and that of dresidual in `second`, given the operands.
template <typename T, typename F>
SBN_DEVICE Arithmetic<T> evaluate(const EpilogueTask<Arithmetic<T>>& epilogue, const F& f,
                                  Arithmetic<T> a, Arithmetic<T> b, Arithmetic<T> v,
                                  Arithmetic<T>* second) {
  using A = Arithmetic<T>;
  if constexpr (std::is_same<F, GatedGradient<A>>::value) {
    const auto gates = Gates<A, true>::of(epilogue, f.sign, f.threshold);
    *second = gates.dy(a, v);
    return f.input(*second, gates.x(b, v));
  } else if constexpr (std::is_same<F, InputGradient<A>>::value) {
    return f(a, b);
  } else {
    A result;
    if constexpr (std::is_same<F, NormalizeSum<A>>::value) {
      // As if another operator had added them.
      T rounded;
      narrow(f.normalize(a), &rounded);
      result = widen(rounded) + b;
    } else {
      result = f(a);
    }
    if (epilogue.activation == Activation::kNone) return result;
    // Preserves NaN, and relu gives no negative zero.
    const A rest = epilogue.activation == Activation::kRelu ? A{0} : result * epilogue.slope;
    return result <= 0 ? rest : result;
  }
}

// Vectors of a thread that are loaded before the first is used, and resident blocks of a
// multiprocessor, both limited by registers.
template <typename F>
constexpr int kMapInFlight = kOperands<F> == 3                     ? 1
                             : kOperands<F> == 2 || sizeof(F) > 16 ? 2
                                                                   : 4;
template <typename F, bool kRows>
constexpr int kMapBlocks = kRows              ? 2
                           : kOperands<F> < 3 ? 4
                                              : 3;
// Rows: threads of a large array, enough for the largest GPUs.
constexpr int64_t kMapThreads = 1 << 17;

template <typename T, typename F, int kWidth, bool kRows>
__global__ void __launch_bounds__(kThreads, kMapBlocks<F, kRows>)
    map(MapTask task, EpilogueTask<Arithmetic<T>> epilogue) {
  using A = Arithmetic<T>;
  constexpr int kInFlight = kMapInFlight<F>, kChannels = kRows ? kWidth : 1, kArrays = kOperands<F>;
  const int thread = blockIdx.x * kThreads + threadIdx.x, step = task.threads;
  if (thread >= step) return;
  const auto from = [](const void* array, int64_t i) { return static_cast<const T*>(array) + i; };
  const auto to = [](void* array, int64_t i) { return static_cast<T*>(array) + i; };
  // From the end, which the sums have read last.
  int left = task.vectors - thread;
  F f[kRows ? 1 : kInFlight][kChannels];
  const auto load_coefficients = [&](int k, int vector) {
    const int row = task.by_row(vector), c = row - task.by_C(row) * task.by_C.divisor;
    const int column = vector - row * task.by_row.divisor;
#pragma unroll
    for (int j = 0; j < kChannels; ++j) {
      f[k][j] = load_affine<F>(task.coefficients, kRows ? column * kWidth + j : c);
    }
  };
  if (kRows && left > 0) load_coefficients(0, left - 1);
  for (; left > 0; left -= kInFlight * step) {
    Vector<T, kWidth> as[kInFlight], bs[kInFlight], vs[kInFlight];
    Vector<T, kWidth> sums[kInFlight], residuals[kInFlight];
#pragma unroll
    for (int k = 0; k < kInFlight; ++k) {
      const int vector = left - 1 - k * step;
      const int64_t i = int64_t{vector} * kWidth;
      if (vector < 0) break;
      as[k].load(from(task.a, i));
      if constexpr (kArrays > 1) bs[k].load(from(task.b, i));
      if constexpr (kArrays > 2) vs[k].load(from(epilogue.v, i));
      if (task.add) sums[k].load(from(task.to, i));
      if (kArrays > 2 && epilogue.add_dresidual) residuals[k].load(from(epilogue.dresidual, i));
      if (!kRows) load_coefficients(k, vector);
    }
#pragma unroll
    for (int k = 0; k < kInFlight; ++k) {
      const int vector = left - 1 - k * step;
      const int64_t i = int64_t{vector} * kWidth;
      if (vector < 0) break;
      Vector<T, kWidth> sum, residual;
#pragma unroll
      for (int j = 0; j < kWidth; ++j) {
        const A b = kArrays > 1 ? bs[k][j] : A{0}, v = kArrays > 2 ? vs[k][j] : A{0};
        A second = 0;
        const A first =
            evaluate<T>(epilogue, f[kRows ? 0 : k][kRows ? j : 0], as[k][j], b, v, &second);
        const auto rounded = [j](A value, bool add, const Vector<T, kWidth>& old) {
          T result;
          narrow(value, &result);
          return add ? added(old.get(j), result) : result;
        };
        sum.set(j, rounded(first, task.add, sums[k]));
        if constexpr (kArrays > 2) {
          residual.set(j, rounded(second, epilogue.add_dresidual, residuals[k]));
        }
      }
      if (kArrays < 3 || task.to) sum.store(to(task.to, i));
      if (kArrays > 2 && epilogue.dresidual) residual.store(to(epilogue.dresidual, i));
    }
  }
}

template <typename T, typename F, int kWidth>
int launch_map(const View& view, MapTask task, const EpilogueTask<Arithmetic<T>>& epilogue,
               Stream stream) {
  const bool is_rows = view.S == 1;
  const int64_t row = (is_rows ? view.C : view.S) / kWidth, vectors = view.size() / kWidth;
  task.by_row = Divider::by(row);
  task.by_C = Divider::by(view.C);
  int64_t threads = divide_up(vectors, kMapInFlight<F>);
  if (is_rows) {
    threads = std::max(std::min(threads, kMapThreads) / row, int64_t{1}) * row;
  }
  task.vectors = static_cast<int>(vectors);
  task.threads = static_cast<int>(threads);
  auto* const kernel = is_rows ? map<T, F, kWidth, true> : map<T, F, kWidth, false>;
  SBN_LAUNCH(kernel, blocks_for(threads), stream, task, epilogue);
  return cudaGetLastError();
}

template <typename T, typename F>
int launch_map(View view, MapTask task, EpilogueTask<Arithmetic<T>> epilogue, Stream stream) {
  constexpr int kSize = static_cast<int>(sizeof(T));
  constexpr int64_t kMost = (int64_t{1} << 29) - 1;
  if (view.size() == 0) return 0;
  int width = width_for(view.S > 1 ? view.S : view.C, kSize);
  while (width > 1 &&
         !is_aligned({task.a, task.b, task.to, epilogue.v, epilogue.dresidual}, width * kSize)) {
    width = width > kHalfWidth<T> ? kHalfWidth<T> : 1;
  }
  // In parts, as indices of vectors are of type int, and a thread takes steps of several.
  const int64_t sample = view.C * view.S / width, all = view.N, most = kMost / sample;
  if (most == 0) return cudaErrorInvalidValue;
  for (int64_t n = 0; n < all; n += most) {
    view.N = std::min(most, all - n);
    const int error = with_width<T>(width, [&](auto constant) {
      return launch_map<T, F, constant>(view, task, epilogue, stream);
    });
    if (error) return error;
    const auto skip = [&](auto* array) {
      const auto next = reinterpret_cast<uintptr_t>(array) + view.size() * sizeof(T);
      return array ? reinterpret_cast<decltype(array)>(next) : array;
    };
    task.a = skip(task.a), task.b = skip(task.b), task.to = skip(task.to);
    epilogue.v = skip(epilogue.v), epilogue.dresidual = skip(epilogue.dresidual);
  }
  return 0;
}

template <typename T>
int launch_normalize(const ForwardShard& p, const void* coefficients, Stream stream) {
  using A = Arithmetic<T>;
  MapTask task{};
  task.a = p.x;
  task.b = p.residual;
  task.to = p.y;
  task.add = p.mode == WriteMode::kAdd;
  task.coefficients = coefficients;
  EpilogueTask<A> epilogue{};
  epilogue.activation = p.epilogue.activation;
  epilogue.slope = static_cast<A>(p.epilogue.slope);
  const auto launch = p.residual ? launch_map<T, NormalizeSum<A>> : launch_map<T, Normalize<A>>;
  return launch(p.view, task, epilogue, stream);
}

template <typename T>
int launch_input_gradient(const BackwardShard& p, const void* coefficients, Stream stream) {
  using A = Arithmetic<T>;
  MapTask task{};
  task.a = p.dy;
  task.b = p.from_y() ? p.y : p.x;
  task.to = p.dx;
  task.add = p.dx && p.mode == WriteMode::kAdd;
  task.coefficients = coefficients;
  EpilogueTask<A> epilogue = epilogue_of<A>(p);
  if (!is_gated(p)) epilogue.v = nullptr;
  const auto launch =
      is_gated(p) ? launch_map<T, GatedGradient<A>> : launch_map<T, InputGradient<A>>;
  return launch(p.view, task, epilogue, stream);
}

// Enough for each kind of coefficients.
template <typename A>
int64_t coefficients_size(int64_t C) {
  return C * 16 * kCoefficientWords<GatedGradient<A>>;
}

}  // namespace gluon_syncbn

#endif  // GLUON_SYNCBN_CUDA_MAP_CUH_
