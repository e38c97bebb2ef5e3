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

// Calls f(begin, end) for ranges that cover 0..items. An item has `values` values.
template <typename F>
void for_ranges(int64_t items, int64_t values, const F& f) {
  const int64_t units =
      std::clamp<int64_t>(items * values / kValuesPerUnit, 1, std::max<int64_t>(items, 1));
  thread_pool().parallel_for(units, [&](int64_t unit) {
    f(items * unit / units, items * (unit + 1) / units);
#if defined(__x86_64__)
    _mm_sfence();  // Shows other threads what was written past the caches.
#endif
  });
}

// sums[c] = the sum over the parts of channel c. f(c, c_end, begin, end, sums) adds the parts
// begin..end of channels c..c_end, where c is a multiple of `width`. If there are few groups of
// `width` channels, they are divided into pieces, so that there are about two units for each
// thread.
template <typename F>
void sum_channels(View view, int64_t width, int64_t parts, ChannelSums* sums, const F& f) {
  const int64_t groups = (view.C + width - 1) / width;
  const int64_t threads = thread_pool().threads();
  const int64_t units = std::min(2 * threads, view.size() / kValuesPerUnit);
  const int64_t pieces =
      groups % threads == 0
          ? 1
          : std::clamp<int64_t>((units + groups - 1) / groups, 1, std::max<int64_t>(parts, 1));
  std::fill(sums, sums + view.C, ChannelSums());
  std::vector<ChannelSums> more((pieces - 1) * view.C);
  const auto end_of = [&](int64_t group) { return std::min(group * width, view.C); };
  if (pieces == 1) {
    for_ranges(groups, view.size() / groups, [&](int64_t begin, int64_t end) {
      f(begin * width, end_of(end), int64_t{0}, parts, sums);
    });
  } else {
    thread_pool().parallel_for(groups * pieces, [&](int64_t unit) {
      const int64_t group = unit / pieces, piece = unit % pieces;
      f(group * width, end_of(group + 1), parts * piece / pieces, parts * (piece + 1) / pieces,
        piece == 0 ? sums : &more[(piece - 1) * view.C]);
    });
  }
  for (size_t i = 0; i < more.size(); ++i) sums[i % view.C].add(more[i]);
}

// Calls f(c, width) for groups of kPlanes channels of begin..end.
template <typename F>
void for_groups(int64_t begin, int64_t end, const F& f) {
  for (int64_t c = begin; c < end; c += kPlanes) f(c, std::min(kPlanes, end - c));
}

// S > 1: calls f(c, chunks, width, sums) for groups of channels.
template <typename F>
void sum_planes(View view, ChannelSums* sums, const F& f) {
  PlaneChunks all = PlaneChunks::of(view);
  sum_channels(view, kPlanes, all.end, sums,
               [&](int64_t c_begin, int64_t c_end, int64_t begin, int64_t end, ChannelSums* to) {
                 PlaneChunks part = all;
                 part.begin = begin, part.end = end;
                 for_groups(c_begin, c_end,
                            [&](int64_t c, int64_t width) { f(c, part, width, to + c); });
               });
}

// S = 1: calls f(c, offset, rows, width, sums) for blocks of channels.
template <typename F>
void sum_rows(View view, ChannelSums* sums, const F& f) {
  sum_channels(view, kRow, view.N, sums,
               [&](int64_t c_begin, int64_t c_end, int64_t begin, int64_t end, ChannelSums* to) {
                 for (int64_t c = c_begin; c < c_end; c += kRow) {
                   f(c, begin * view.C + c, end - begin, std::min(kRow, c_end - c), to + c);
                 }
               });
}

// S = 1, R > 1: calls f(c, parts, width, sums) for blocks of channels and parts of the samples.
template <typename F>
void sum_samples(View view, ChannelSums* sums, const F& f) {
  // Blocks of about the same width, in whole vectors.
  const int64_t blocks = (view.C + kBlock - 1) / kBlock;
  const int64_t width = blocks == 1 ? view.C : ((view.C + blocks - 1) / blocks + 7) / 8 * 8;
  const int64_t chunks = (view.R + kChunk - 1) / kChunk;
  sum_channels(view, width, view.N / view.R * chunks, sums,
               [&](int64_t c_begin, int64_t c_end, int64_t begin, int64_t end, ChannelSums* to) {
                 const SampleRows parts{view.R, view.C, chunks, begin, end};
                 for (int64_t c = c_begin; c < c_end; c += width) {
                   f(c, parts, std::min(width, c_end - c), to + c);
                 }
               });
}

// Calls f(offset, c) for all planes.
template <typename F>
void for_each_plane(View view, const F& f) {
  for_ranges(view.N * view.C, view.S, [&](int64_t begin, int64_t end) {
    for (int64_t plane = begin; plane < end; ++plane) f(plane * view.S, plane % view.C);
  });
}

// S = 1: calls f(offset, n) for the n values of groups of rows.
template <typename F>
void for_rows(View view, const F& f) {
  for_ranges(view.N, view.C,
             [&](int64_t begin, int64_t end) { f(begin * view.C, (end - begin) * view.C); });
}

template <typename T>
void forward_sums(View view, const void* data, ChannelSums* sums) {
  const T* x = static_cast<const T*>(data);
  if (view.S == 1 && view.R > 1) {
    sum_samples(view, sums,
                [&](int64_t c, const SampleRows& parts, int64_t width, ChannelSums* to) {
                  loops<T>().forward_samples(x + c, parts, width, to);
                });
  } else if (view.S == 1) {
    sum_rows(view, sums, [&](int64_t, int64_t at, int64_t n, int64_t width, ChannelSums* to) {
      loops<T>().forward_rows(x + at, n, view.C, width, to);
    });
  } else {
    sum_planes(view, sums, [&](int64_t c, const PlaneChunks& part, int64_t width, ChannelSums* to) {
      loops<T>().forward_planes(x + c * view.S, part, width, to);
    });
  }
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

template <typename T>
WriteMode write_mode_of(const ForwardShard& p) {
  return write_mode_of<T>(p.mode, p.view, p.y, {p.x, p.residual});
}

template <typename T>
void forward(const ForwardShard& p, const Statistics* s) {
  const View& view = p.view;
  const WriteMode mode = write_mode_of<T>(p);
  std::vector<Normalize<Arithmetic<T>>> coefficients(view.C);
  for (int64_t c = 0; c < view.C; ++c) coefficients[c] = normalize_of<T>(p, s[c], c);
  const T* const x = static_cast<const T*>(p.x);
  T* const y = static_cast<T*>(p.y);
  if (view.S == 1) {
    const NormalizeColumns<T> columns(coefficients, view.N);
    for_rows(view, [&](int64_t at, int64_t n) {
      loops<T>().normalize_rows(x + at, at_offset<T>(p.residual, at), n, columns, p.epilogue,
                                y + at, mode);
    });
  } else {
    for_each_plane(view, [&](int64_t at, int64_t c) {
      loops<T>().normalize(x + at, at_offset<T>(p.residual, at), view.S, coefficients[c],
                           p.epilogue, y + at, mode);
    });
  }
}

// The arguments of the backward loops for channels begin..end of a shard.
template <typename T>
class BackwardChannels {
 public:
  using A = Arithmetic<T>;
  const Sources<T> sources;
  const Results<T> results;

  BackwardChannels(const BackwardShard& p, const Statistics* s, int64_t begin, int64_t end)
      : sources{static_cast<const T*>(p.dy), static_cast<const T*>(p.x),
                static_cast<const T*>(p.epilogue.activation == Activation::kNone ? nullptr
                                      : p.y                                      ? p.y
                                                                                 : p.x),
                p.from_y() ? static_cast<A>(1 / p.epilogue.slope) : A{0}},
        results{static_cast<T*>(p.dx), write_mode_of<T>(p.mode, p.view, p.dx, {p.dy, p.x, p.y}),
                static_cast<T*>(p.dresidual),
                write_mode_of<T>(p.residual_mode, p.view, p.dresidual, {p.dy, p.x, p.y})},
        shard_(p),
        statistics_(s),
        begin_(begin) {
    for (int64_t c = begin; c < end; ++c) {
      if (p.from_y()) {
        of_z_.push_back(
            statistics_of_normalized(gamma_of<T>(p, c), static_cast<const A*>(p.beta)[c]));
      }
      if (!sources.gate) {
        gates_.emplace_back();
      } else if (p.y) {
        gates_.push_back(Gate<A>::of_y(p.epilogue.slope));
      } else {
        gates_.push_back(
            Gate<A>::of_x(normalize_of<T>(p, s[c], c), kLargestZero<T>, p.epilogue.slope));
      }
    }
  }

  bool has_results() const { return results.dx || results.dresidual; }
  // For channel c and the channels after it.
  const Statistics* statistics(int64_t c) const {
    return of_z_.empty() ? statistics_ + c : &of_z_[c - begin_];
  }
  const Gate<A>* gates(int64_t c) const { return &gates_[c - begin_]; }
  const std::vector<Gate<A>>& all_gates() const { return gates_; }
  InputGradient<A> input_gradient(int64_t c, const ChannelSums& sums, double count) const {
    const double factor = gamma_of<T>(shard_, c) * statistics_[c].inv_std;
    return InputGradient<A>::of(*statistics(c), factor, sums.first.value(), sums.second.value(),
                                count);
  }

 private:
  const BackwardShard& shard_;
  const Statistics* const statistics_;
  const int64_t begin_;
  std::vector<Statistics> of_z_;
  std::vector<Gate<A>> gates_;
};

template <typename T>
void backward_sums(const BackwardShard& p, const Statistics* s) {
  const View& view = p.view;
  const BackwardChannels<T> channels(p, s, 0, view.C);
  const Sources<T>& from = channels.sources;
  if (view.S == 1 && view.R > 1) {
    sum_samples(view, p.sums,
                [&](int64_t c, const SampleRows& parts, int64_t width, ChannelSums* to) {
                  loops<T>().backward_samples(from, c, parts, width, channels.statistics(c),
                                              channels.gates(c), to);
                });
  } else if (view.S == 1) {
    sum_rows(view, p.sums, [&](int64_t c, int64_t at, int64_t n, int64_t width, ChannelSums* to) {
      loops<T>().backward_rows(from, at, n, view.C, width, channels.statistics(c),
                               channels.gates(c), to);
    });
  } else {
    sum_planes(view, p.sums,
               [&](int64_t c, const PlaneChunks& part, int64_t width, ChannelSums* to) {
                 loops<T>().backward_planes(from, c * view.S, part, width, channels.statistics(c),
                                            channels.gates(c), to);
               });
  }
}

template <typename T>
void backward(const BackwardShard& p, const Statistics* s, const ChannelSums* sums, double count) {
  const View& view = p.view;
  const BackwardChannels<T> channels(p, s, 0, view.C);
  std::vector<InputGradient<Arithmetic<T>>> coefficients(view.C);
  for (int64_t c = 0; c < view.C; ++c) {
    coefficients[c] = channels.input_gradient(c, sums[c], count);
  }
  if (view.S == 1) {
    const GradientColumns<T> columns(coefficients, view.N);
    const GateColumns<T> gates(channels.all_gates(), view.N);
    for_rows(view, [&](int64_t at, int64_t n) {
      loops<T>().input_gradient_rows(channels.sources, at, n, columns, gates, channels.results);
    });
  } else {
    for_each_plane(view, [&](int64_t at, int64_t c) {
      loops<T>().input_gradient(channels.sources, at, view.S, coefficients[c], *channels.gates(c),
                                channels.results);
    });
  }
}

// Whether to divide the channels among the threads, so that a thread computes both the sums and the
// results of a channel. Forward then accesses memory twice instead of three times, which is worth
// it as long as threads idle for at most a third of the time.
bool by_channels(View view) {
  const int64_t units = view.size() / kValuesPerUnit;
  const int64_t threads = std::clamp<int64_t>(units, 1, thread_pool().threads());
  const int64_t most = (view.C + threads - 1) / threads;
  return view.S > 1 && 3 * view.C >= 2 * most * threads;
}

// Calls f(c, offset) for the planes of channels c_begin..c_end.
template <typename F>
void for_planes(View view, int64_t c_begin, int64_t c_end, const F& f) {
  for (int64_t n = 0; n < view.N; ++n) {
    for (int64_t c = c_begin; c < c_end; ++c) f(c, (n * view.C + c) * view.S);
  }
}

template <typename T>
void forward_alone(const ForwardShard& p, double epsilon, Statistics* statistics) {
  const View& view = p.view;
  const double count = static_cast<double>(view.N * view.S);
  if (!by_channels(view)) {
    std::vector<ChannelSums> sums(view.C);
    forward_sums<T>(view, p.x, sums.data());
    for (int64_t c = 0; c < view.C; ++c) statistics[c] = batch_statistics(sums[c], count, epsilon);
    if (p.y) forward<T>(p, statistics);
    return;
  }
  const T* const x = static_cast<const T*>(p.x);
  T* const y = static_cast<T*>(p.y);
  const WriteMode mode = write_mode_of<T>(p);
  for_ranges(view.C, view.N * view.S, [&](int64_t begin, int64_t end) {
    std::vector<ChannelSums> sums(end - begin);
    for_groups(begin, end, [&](int64_t c, int64_t width) {
      loops<T>().forward_planes(x + c * view.S, PlaneChunks::of(view), width, &sums[c - begin]);
    });
    std::vector<Normalize<Arithmetic<T>>> coefficients(end - begin);
    for (int64_t c = begin; c < end; ++c) {
      statistics[c] = batch_statistics(sums[c - begin], count, epsilon);
      coefficients[c - begin] = normalize_of<T>(p, statistics[c], c);
    }
    if (!y) return;
    for_planes(view, begin, end, [&](int64_t c, int64_t at) {
      loops<T>().normalize(x + at, at_offset<T>(p.residual, at), view.S, coefficients[c - begin],
                           p.epilogue, y + at, mode);
    });
  });
}

template <typename T>
void backward_alone(const BackwardShard& p, const Statistics* statistics) {
  const View& view = p.view;
  const double count = static_cast<double>(view.N * view.S);
  if (!by_channels(view)) {
    backward_sums<T>(p, statistics);
    if (p.dx || p.dresidual) backward<T>(p, statistics, p.sums, count);
    return;
  }
  for_ranges(view.C, view.N * view.S, [&](int64_t begin, int64_t end) {
    const BackwardChannels<T> channels(p, statistics, begin, end);
    std::fill(p.sums + begin, p.sums + end, ChannelSums());
    for_groups(begin, end, [&](int64_t c, int64_t width) {
      loops<T>().backward_planes(channels.sources, c * view.S, PlaneChunks::of(view), width,
                                 channels.statistics(c), channels.gates(c), p.sums + c);
    });
    if (!channels.has_results()) return;
    std::vector<InputGradient<Arithmetic<T>>> coefficients(end - begin);
    for (int64_t c = begin; c < end; ++c) {
      coefficients[c - begin] = channels.input_gradient(c, p.sums[c], count);
    }
    for_planes(view, begin, end, [&](int64_t c, int64_t at) {
      loops<T>().input_gradient(channels.sources, at, view.S, coefficients[c - begin],
                                *channels.gates(c), channels.results);
    });
  });
}

template <typename T>
constexpr Kernels kCpuKernels{forward_sums<T>, forward<T>,       backward_sums<T>,
                              backward<T>,     forward_alone<T>, backward_alone<T>};

}  // namespace

const Kernels& cpu_kernels(DType dtype) {
  return with_dtype(dtype, [](auto zero) -> const Kernels& { return kCpuKernels<decltype(zero)>; });
}

}  // namespace gluon_syncbn
