// The CPU kernels: distributes planes and rows over threads.
#include "cpu/kernels.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include <unistd.h>

#include <algorithm>
#include <initializer_list>
#include <vector>

#include "cpu/loops.h"
#include "cpu/thread_pool.h"

namespace gluon_syncbn {
namespace {

// Work per unit of the thread pool: some tens of microseconds.
constexpr int64_t kValuesPerUnit = 1 << 15;

// How to write an array. One too large to stay in the caches until it is read again is written
// past them, as normal stores would read each line from memory first. Exceptions: an array that the
// pass also reads, which is in a cache, and short planes, whose first and last lines are shared.
template <typename T>
WriteMode write_mode_of(WriteMode mode, View view, const void* to,
                        std::initializer_list<const void*> read) {
#if defined(__x86_64__)
  constexpr int64_t kSize = sizeof(T), kShortest = 1 << 10, kShare = 8 << 20;
  // Other processes use the last cache too, and a virtual machine may report all of its host's.
  static const int64_t last_cache = sysconf(_SC_LEVEL3_CACHE_SIZE);
  const int64_t share = kShare * thread_pool().threads();
  const int64_t cached = last_cache > 0 ? std::min(last_cache, share) : share;
  if (mode == WriteMode::kWrite && view.size() * kSize >= cached &&
      (view.S == 1 || view.S * kSize >= kShortest) &&
      std::find(read.begin(), read.end(), to) == read.end()) {
    return WriteMode::kStream;
  }
#endif
  return mode;
}

// Calls f(begin, end) for ranges that cover 0..items, which have `values` values.
template <typename F>
void for_ranges(int64_t items, int64_t values, const F& f) {
  const int64_t units =
      std::clamp<int64_t>(values / kValuesPerUnit, 1, std::max<int64_t>(items, 1));
  thread_pool().parallel_for(units, [&](int64_t unit) {
    f(items * unit / units, items * (unit + 1) / units);
#if defined(__x86_64__)
    _mm_sfence();  // Shows other threads what was written past the caches.
#endif
  });
}

// Channels begin..end: all of them, with values for all threads, or, with S > 1, some that one
// thread has for itself.
struct Range {
  int64_t begin, end, shared_values;

  static Range all(View view) { return {0, view.C, view.size()}; }
  int64_t size() const { return end - begin; }
};

// Calls f(range) for ranges of channels that a thread each sums and writes, or for all of them.
// Forward then accesses memory twice instead of three times, which is worth it as long as threads
// idle for at most a third of the time.
template <typename F>
void for_channels(View view, const F& f) {
  const int64_t units = view.size() / kValuesPerUnit;
  const int64_t threads = std::clamp<int64_t>(units, 1, thread_pool().threads());
  const int64_t most = (view.C + threads - 1) / threads;
  if (view.S == 1 || 3 * view.C < 2 * most * threads) return f(Range::all(view));
  for_ranges(view.C, view.size(), [&](int64_t begin, int64_t end) { f(Range{begin, end, 0}); });
}

// Sums of the channels of a range: f(c, chunks, width, sums) adds those of some chunks of channels
// c..c + width. If there are few such groups of channels, their chunks are divided into pieces, so
// that there are about two units for each thread.
template <typename F>
void sum_channels(View view, Range range, ChannelSums* sums, const F& f) {
  const Chunks all = Chunks::of(view);
  int64_t width = kPlanes;
  if (view.S == 1) {
    // Blocks of about the same width, in whole vectors.
    const int64_t blocks = (view.C + kBlock - 1) / kBlock;
    width = blocks == 1 ? view.C : ((view.C + blocks - 1) / blocks + 7) / 8 * 8;
  }
  const int64_t groups = (range.size() + width - 1) / width;
  const int64_t threads = thread_pool().threads();
  const int64_t units = std::min(2 * threads, range.shared_values / kValuesPerUnit);
  const int64_t pieces =
      groups % threads == 0
          ? 1
          : std::clamp<int64_t>((units + groups - 1) / groups, 1, std::max<int64_t>(all.end, 1));
  std::fill(sums, sums + range.size(), ChannelSums());
  std::vector<ChannelSums> more((pieces - 1) * range.size());
  for_ranges(groups * pieces, range.shared_values, [&](int64_t begin, int64_t end) {
    for (int64_t unit = begin; unit < end; ++unit) {
      const int64_t first = unit / pieces * width, piece = unit % pieces;
      Chunks part = all;
      part.begin = all.end * piece / pieces;
      part.end = all.end * (piece + 1) / pieces;
      f(range.begin + first, part, std::min(width, range.size() - first),
        first + (piece == 0 ? sums : &more[(piece - 1) * range.size()]));
    }
  });
  for (size_t i = 0; i < more.size(); ++i) sums[i % range.size()].add(more[i]);
}

// Calls f(offset, c) for the planes of a range.
template <typename F>
void for_planes(View view, Range range, const F& f) {
  for_ranges(view.N * range.size(), range.shared_values, [&](int64_t begin, int64_t end) {
    for (int64_t plane = begin; plane < end; ++plane) {
      const int64_t c = range.begin + plane % range.size();
      f((plane / range.size() * view.C + c) * view.S, c);
    }
  });
}

// S = 1: calls f(offset, n) for the n values of groups of rows.
template <typename F>
void for_rows(View view, const F& f) {
  for_ranges(view.N, view.size(),
             [&](int64_t begin, int64_t end) { f(begin * view.C, (end - begin) * view.C); });
}

// Adds an offset. Null stays null.
template <typename T>
const T* at_offset(const void* values, int64_t offset) {
  return values ? static_cast<const T*>(values) + offset : nullptr;
}

// The effective gamma of channel c of a shard.
template <typename T, typename Part>
double gamma_of(const Part& p, int64_t c) {
  if (!p.gamma) return 1;
  return effective_gamma(static_cast<const Arithmetic<T>*>(p.gamma)[c], p.epilogue);
}

template <typename T, typename Part>
Normalize<Arithmetic<T>> normalize_of(const Part& p, const Statistics& s, int64_t c) {
  return Normalize<Arithmetic<T>>::of(s, gamma_of<T>(p, c),
                                      static_cast<const Arithmetic<T>*>(p.beta)[c]);
}

// The sums of a range's first channel and those after it.
template <typename T>
void forward_sums(View view, Range range, const void* x, ChannelSums* sums) {
  const Sources<T> from{nullptr, static_cast<const T*>(x), nullptr, 0};
  const auto add = view.S == 1 ? loops<T>().forward_rows : loops<T>().forward_planes;
  sum_channels(view, range, sums, [&](int64_t c, const Chunks& chunks, int64_t width, auto* to) {
    add(from, c * view.S, chunks, width, nullptr, nullptr, to);
  });
}

template <typename T>
void forward(const ForwardShard& p, Range range, const Statistics* s) {
  const View& view = p.view;
  const WriteMode mode = write_mode_of<T>(p.mode, view, p.y, {p.x, p.residual});
  std::vector<Normalize<Arithmetic<T>>> coefficients;
  for (int64_t c = range.begin; c < range.end; ++c) {
    coefficients.push_back(normalize_of<T>(p, s[c], c));
  }
  const T* const x = static_cast<const T*>(p.x);
  T* const y = static_cast<T*>(p.y);
  if (view.S == 1) {
    const NormalizeColumns<T> columns(coefficients, view.N);
    for_rows(view, [&](int64_t at, int64_t n) {
      loops<T>().normalize_rows(x + at, at_offset<T>(p.residual, at), n, columns, p.epilogue,
                                y + at, mode);
    });
  } else {
    for_planes(view, range, [&](int64_t at, int64_t c) {
      loops<T>().normalize(x + at, at_offset<T>(p.residual, at), view.S,
                           coefficients[c - range.begin], p.epilogue, y + at, mode);
    });
  }
}

template <typename T>
void forward_alone(const ForwardShard& p, double epsilon, Statistics* s) {
  const double count = static_cast<double>(p.view.N * p.view.S);
  for_channels(p.view, [&](Range range) {
    std::vector<ChannelSums> sums(range.size());
    forward_sums<T>(p.view, range, p.x, sums.data());
    for (int64_t c = range.begin; c < range.end; ++c) {
      s[c] = batch_statistics(sums[c - range.begin], count, epsilon);
    }
    if (p.y) forward<T>(p, range, s);
  });
}

// Backward for a range of channels.
template <typename T>
class Backward {
 public:
  using A = Arithmetic<T>;

  Backward(const BackwardShard& p, Range range, const Statistics* s)
      : shard_(p),
        range_(range),
        statistics_(s),
        sources_{static_cast<const T*>(p.dy), static_cast<const T*>(p.x),
                 static_cast<const T*>(p.epilogue.activation == Activation::kNone ? nullptr
                                       : p.y                                      ? p.y
                                                                                  : p.x),
                 p.from_y() ? static_cast<A>(1 / p.epilogue.slope) : A{0}} {
    for (int64_t c = range.begin; c < range.end; ++c) {
      if (p.from_y()) {
        of_z_.push_back(
            statistics_of_normalized(gamma_of<T>(p, c), static_cast<const A*>(p.beta)[c]));
      }
      if (!sources_.gate) {
        gates_.emplace_back();
      } else if (p.y) {
        gates_.push_back(Gate<A>::of_y(p.epilogue.slope));
      } else {
        gates_.push_back(
            Gate<A>::of_x(normalize_of<T>(p, s[c], c), kLargestZero<T>, p.epilogue.slope));
      }
    }
  }

  void sum() const {
    const View& view = shard_.view;
    const auto add = view.S == 1 ? loops<T>().backward_rows : loops<T>().backward_planes;
    const auto sum = [&](int64_t c, const Chunks& chunks, int64_t width, ChannelSums* to) {
      add(sources_, c * view.S, chunks, width, statistics(c), gates(c), to);
    };
    sum_channels(view, range_, shard_.sums + range_.begin, sum);
  }

  // The input gradient, and that of the residual.
  void write(const ChannelSums* sums, double count) const {
    const BackwardShard& p = shard_;
    const View& view = p.view;
    const auto mode_of = [&](WriteMode mode, const void* to) {
      return write_mode_of<T>(mode, view, to, {p.dy, p.x, p.y});
    };
    const Results<T> results{static_cast<T*>(p.dx), mode_of(p.mode, p.dx),
                             static_cast<T*>(p.dresidual), mode_of(p.residual_mode, p.dresidual)};
    std::vector<InputGradient<A>> coefficients;
    for (int64_t c = range_.begin; c < range_.end; ++c) {
      const double factor = gamma_of<T>(p, c) * statistics_[c].inv_std;
      coefficients.push_back(InputGradient<A>::of(*statistics(c), factor, sums[c].first.value(),
                                                  sums[c].second.value(), count));
    }
    if (view.S == 1) {
      const GradientColumns<T> columns(coefficients, view.N);
      const GateColumns<T> gates(gates_, view.N);
      for_rows(view, [&](int64_t at, int64_t n) {
        loops<T>().input_gradient_rows(sources_, at, n, columns, gates, results);
      });
    } else {
      for_planes(view, range_, [&](int64_t at, int64_t c) {
        loops<T>().input_gradient(sources_, at, view.S, coefficients[c - range_.begin], *gates(c),
                                  results);
      });
    }
  }

 private:
  // For channel c and the channels after it.
  const Statistics* statistics(int64_t c) const {
    return of_z_.empty() ? statistics_ + c : &of_z_[c - range_.begin];
  }
  const Gate<A>* gates(int64_t c) const { return &gates_[c - range_.begin]; }

  const BackwardShard& shard_;
  const Range range_;
  const Statistics* const statistics_;
  const Sources<T> sources_;
  std::vector<Statistics> of_z_;
  std::vector<Gate<A>> gates_;
};

template <typename T>
void backward_alone(const BackwardShard& p, const Statistics* s) {
  for_channels(p.view, [&](Range range) {
    const Backward<T> channels(p, range, s);
    channels.sum();
    if (p.dx || p.dresidual) channels.write(p.sums, static_cast<double>(p.view.N * p.view.S));
  });
}

template <typename T>
constexpr Kernels kCpuKernels{
    [](View view, const void* x, ChannelSums* sums) {
      forward_sums<T>(view, Range::all(view), x, sums);
    },
    [](const ForwardShard& p, const Statistics* s) { forward<T>(p, Range::all(p.view), s); },
    [](const BackwardShard& p, const Statistics* s) {
      Backward<T>(p, Range::all(p.view), s).sum();
    },
    [](const BackwardShard& p, const Statistics* s, const ChannelSums* sums, double count) {
      Backward<T>(p, Range::all(p.view), s).write(sums, count);
    },
    forward_alone<T>,
    backward_alone<T>};

}  // namespace

const Kernels& cpu_kernels(DType dtype) {
  return with_dtype(dtype, [](auto zero) -> const Kernels& { return kCpuKernels<decltype(zero)>; });
}

}  // namespace gluon_syncbn
