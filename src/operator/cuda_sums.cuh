// The sums of a pass: kernels that read x, or dy and x, once.
//
// What is added to what depends on the shape of one sample alone: runs of up to kRun values in the
// type that data are computed in, runs of a chunk in double, in a fixed tree, and chunks in Sum3,
// where the order is immaterial. So neither the number of blocks nor the split of a batch shows.
#ifndef GLUON_SYNCBN_CUDA_SUMS_CUH_
#define GLUON_SYNCBN_CUDA_SUMS_CUH_

#include "batch_norm_math.h"
#include "cuda_vectors.cuh"

namespace gluon_syncbn {

constexpr int kThreads = 256, kWarp = 32, kWarps = kThreads / kWarp;
constexpr unsigned kAllLanes = 0xffffffffu;

// Consecutive values or so that are added in float: at most this many, as each rounding costs half
// a unit in the last place of their own spread.
constexpr int kRun = 8;

// Values of a plane that one thread adds up at a time, at most: what is done once a chunk takes the
// time of some vectors.
template <typename T>
constexpr int kPlaneShare = sizeof(T) == sizeof(double) ? 32 : 64;
// Vectors of each array that a thread asks for before it looks at the first.
constexpr int kInFlight = 4;
template <typename T>
constexpr int kRowsInFlight = sizeof(T) == sizeof(double)  ? kRun
                              : sizeof(T) == sizeof(float) ? 5
                                                           : 4;
constexpr int kRowPairsInFlight = 4;
// With S = 1, rows of a sample that one thread adds up at a time, and threads below each other that
// a chunk has at least.
constexpr int kRowsPerThread = 32, kFewestRows = 2;

// Blocks of each kernel of sums that a multiprocessor has at a time: what registers allow.
template <typename T>
constexpr int plane_blocks(bool backward, bool aligned) {
  return aligned && (!backward || sizeof(T) >= sizeof(float)) ? 3 : 2;
}
constexpr int kRowBlocks = 2;

// Below and above, squares of float lose digits or overflow.
constexpr float kSmallSquare = 0x1p-90f, kLargeSquare = 0x1p126f;

// Known to the compiler.
struct True {
  static constexpr bool value = true;
};
struct False {
  static constexpr bool value = false;
};
template <int kValue>
struct Number {
  static constexpr int value = kValue;
};

// A thread's share of a chunk: how many values, and the sums of x - origin and of its square.
template <typename A>
struct Share {
  A origin = 0;
  int count = 0;
  double first = 0, second = 0;

  // The same sums about `near`.
  SBN_DEVICE void move(double near) {
    const double away = static_cast<double>(origin) - near, moved = count * away;
    second += away * (2 * first + moved);
    first += moved;
  }
};

// A number close to the values of a share that begins with these, value(i), so that what is rounded
// is no larger than their own spread, whatever the data's offset. float: their mean, as one of them
// may be an outlier; in parts, which do not overflow.
template <int kValues, typename Value>
SBN_DEVICE float origin_of(const Value& value, float) {
  constexpr float kPart = 1.0f / kValues;
  float mean = value(0) * kPart;
#pragma unroll
  for (int i = 1; i < kValues; ++i) mean = fmaf(value(i), kPart, mean);
  return mean;
}
template <int kValues, typename Value>
SBN_DEVICE double origin_of(const Value& value, double) {
  return value(0);
}

// Whether float holds the squares from the smallest to the largest.
SBN_DEVICE bool fits_float(float smallest, float largest) {
  return smallest >= kSmallSquare && largest <= kLargeSquare;
}

// Adds kRuns runs of kValues values, value(run, i), about origin(run), and calls add(run,
// sum(x - origin), sum((x - origin)^2)) for each. In the worst case the squares lose 8 units of
// 2^-24, and inv_std half of that. Where that does not do, again(run, i, f) calls f with value i,
// should there be one: from memory, as registers that hold it so long would be missing elsewhere.
template <int kRuns, int kValues, typename Value, typename Origin, typename Again, typename Add>
SBN_DEVICE void add_runs(const Value& value, const Origin& origin, float, const Again& again,
                         const Add& add) {
  float sums[kRuns], squares[kRuns];
  // Of the squares. Not a number stays so on either way.
  float smallest = 1, largest = 0;
#pragma unroll
  for (int run = 0; run < kRuns; ++run) {
    float d = value(run, 0) - origin(run);
    sums[run] = d;
    squares[run] = d * d;
    uint32_t bits = bits_of_float(d);
#pragma unroll
    for (int i = 1; i < kValues; ++i) {
      d = value(run, i) - origin(run);
      sums[run] += d;
      squares[run] = fmaf(d, d, squares[run]);
      bits |= bits_of_float(d);
    }
    // Zeros, of either sign, as of all that is zero behind a relu, have nothing to lose.
    smallest = fminf(smallest, bits << 1 ? squares[run] : 1.0f);
    largest = fmaxf(largest, squares[run]);
  }
  if (fits_float(smallest, largest)) {
#pragma unroll
    for (int run = 0; run < kRuns; ++run) add(run, sums[run], squares[run]);
    return;
  }
#pragma unroll
  for (int run = 0; run < kRuns; ++run) {
    double first = sums[run], second = squares[run];
    if (!fits_float(squares[run], squares[run])) {
      first = second = 0;
#pragma unroll 1
      for (int i = 0; i < kValues; ++i) {
        again(run, i, [&](double x) {
          const double d = x - origin(run);
          first += d;
          second = fma(d, d, second);
        });
      }
    }
    add(run, first, second);
  }
}

template <int kRuns, int kValues, typename Value, typename Origin, typename Again, typename Add>
SBN_DEVICE void add_runs(const Value& value, const Origin& origin, double, const Again&,
                         const Add& add) {
#pragma unroll
  for (int run = 0; run < kRuns; ++run) {
    double first = 0, second = 0;
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
      const double d = value(run, i) - origin(run);
      first += d;
      second = fma(d, d, second);
    }
    add(run, first, second);
  }
}

// The mean of a channel, as the type of its data can hold it.
template <typename A>
struct Center {
  A mean, mean_low;

  SBN_DEVICE static Center of(const Statistics& s) {
    const A mean = static_cast<A>(s.mean);
    return {mean, static_cast<A>((s.mean - static_cast<double>(mean)) + s.mean_low)};
  }

  // From {sum(dy), sum(dy * (x - mean))}, what the lower part of the mean makes of them.
  SBN_DEVICE double products(double first, double second) const {
    return second - mean_low * first;
  }
};

// Whether float holds both.
SBN_DEVICE bool fits_products(float sum, float product) {
  return fabsf(sum) <= kLargeSquare && fabsf(product) <= kLargeSquare;
}

// The same for backward: sum(dy) and sum(dy * (x - mean)). dy is 0 where there is no value.
template <int kRuns, int kValues, typename Gradient, typename Value, typename Mean, typename Again,
          typename Add>
SBN_DEVICE void add_runs(const Gradient& dy, const Value& x, const Mean& mean, float,
                         const Again& again, const Add& add) {
  float sums[kRuns], products[kRuns];
  bool all_fit = true;
#pragma unroll
  for (int run = 0; run < kRuns; ++run) {
    sums[run] = dy(run, 0);
    products[run] = dy(run, 0) * (x(run, 0) - mean(run));
#pragma unroll
    for (int i = 1; i < kValues; ++i) {
      sums[run] += dy(run, i);
      products[run] = fmaf(dy(run, i), x(run, i) - mean(run), products[run]);
    }
    all_fit = all_fit && fits_products(sums[run], products[run]);
  }
  if (all_fit) {
#pragma unroll
    for (int run = 0; run < kRuns; ++run) add(run, sums[run], products[run]);
    return;
  }
#pragma unroll
  for (int run = 0; run < kRuns; ++run) {
    double first = sums[run], second = products[run];
    if (!fits_products(sums[run], products[run])) {
      first = second = 0;
#pragma unroll 1
      for (int i = 0; i < kValues; ++i) {
        again(run, i, [&](double gradient, double x_again) {
          first += gradient;
          second = fma(gradient, x_again - mean(run), second);
        });
      }
    }
    add(run, first, second);
  }
}

template <int kRuns, int kValues, typename Gradient, typename Value, typename Mean, typename Again,
          typename Add>
SBN_DEVICE void add_runs(const Gradient& dy, const Value& x, const Mean& mean, double, const Again&,
                         const Add& add) {
#pragma unroll
  for (int run = 0; run < kRuns; ++run) {
    double first = 0, second = 0;
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
      first += dy(run, i);
      second = fma(dy(run, i), x(run, i) - mean(run), second);
    }
    add(run, first, second);
  }
}

SBN_DEVICE Sum3 from_lane(const Sum3& sum, int mask) {
  return {__shfl_xor_sync(kAllLanes, sum.high, mask), __shfl_xor_sync(kAllLanes, sum.middle, mask),
          __shfl_xor_sync(kAllLanes, sum.low, mask)};
}

// The sum over lanes that differ in the bits below `lanes`, a power of 2: in the first of them.
SBN_DEVICE void add_lanes(ChannelSums* sums, int lanes) {
  for (int mask = lanes / 2; mask > 0; mask /= 2) {
    sums->add({from_lane(sums->first, mask), from_lane(sums->second, mask)});
  }
}

SBN_DEVICE void put(const ChannelSums& sums, double* to) {
  to[0] = sums.first.high, to[1] = sums.first.middle, to[2] = sums.first.low;
  to[3] = sums.second.high, to[4] = sums.second.middle, to[5] = sums.second.low;
}

SBN_DEVICE ChannelSums get_sums(const double* from) {
  return {{from[0], from[1], from[2]}, {from[3], from[4], from[5]}};
}

// ChannelSums on the device lie at multiples of 16.
SBN_DEVICE ChannelSums load_sums(const ChannelSums* from) {
  Words words[3];
#pragma unroll
  for (int i = 0; i < 3; ++i) words[i] = load_words(reinterpret_cast<const char*>(from) + 16 * i);
  const auto number = [&](int i) { return value_at<double>(words[i / 2], i % 2); };
  return {{number(0), number(1), number(2)}, {number(3), number(4), number(5)}};
}

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

// What a kernel of sums is asked for. `to` has C x slices entries.
struct SumsTask {
  // N samples of C channels of S values, or, with S = 1, of R rows of C values.
  int64_t N, C, S, R;
  const void *dy, *x;
  const Statistics* statistics;
  ChannelSums* to;
  // Each sample has so many chunks of so many values of a plane, or rows; units are those of all.
  int64_t chunks, units;
  int chunk_size, slices, lanes;
  // Of rows: threads below each other for a chunk; the others of a block have other chunks.
  int down;
  // Where dy and x end.
  const void *dy_end, *x_end;

  SBN_DEVICE int64_t unit_of_slice(int slice) const { return units * slice / slices; }
  // Whether Fetched stays inside of the arrays.
  template <bool kBackward>
  SBN_DEVICE bool holds(const void* dy_at, const void* x_at, int64_t vectors) const {
    return Extent{x, x_end}.holds(x_at, vectors) &&
           (!kBackward || Extent{dy, dy_end}.holds(dy_at, vectors));
  }
};

// The sums of one chunk, by `lanes` threads: vector i belongs to lane i % lanes.
template <typename T, bool kBackward, bool kAligned>
struct PlaneSums {
  using A = Arithmetic<T>;
  static constexpr int kSize = kPack<T>;
  // Vectors of one run, and runs of one batch.
  static constexpr int kVectors = kRun / kSize < kInFlight ? kRun / kSize : kInFlight;
  static constexpr int kRuns = kInFlight / kVectors;

  const SumsTask& task;
  Center<A> center;

  // Vector i stands i * apart values behind x and dy, which have `left` values to the chunk's end.
  struct Batch {
    const T *x, *dy;
    int left, apart;
  };

  // The share of `lane` in the n values of a chunk.
  SBN_DEVICE void add_values(const T* dy, const T* x, int n, int lane, int lanes,
                             Share<A>* share) const {
    const int vectors = (n + kSize - 1) / kSize;
    // False at the ends of the array alone, and at one of them only.
    const bool inside = kAligned || task.holds<kBackward>(dy, x, vectors);
    const unsigned x_shift = kAligned || !inside ? 0 : misalignment(x);
    const unsigned dy_shift = kAligned || !inside ? 0 : misalignment(dy);
    for (int v = lane; v < vectors; v += lanes * kInFlight) {
      const Batch batch{x + v * kSize, dy + (kBackward ? v * kSize : 0), n - v * kSize,
                        lanes * kSize};
      Fetched<kAligned> xs[kInFlight], dys[kInFlight];
      // A vector behind the last is the last once more.
      const int last = (vectors - 1 - v) * kSize;
      const auto at = [&](int i) { return i * batch.apart < last ? i * batch.apart : last; };
      if (inside) {
#pragma unroll
        for (int i = 0; i < kInFlight; ++i) {
          xs[i] = Fetched<kAligned>::load(batch.x + at(i));
          if (kBackward) dys[i] = Fetched<kAligned>::load(batch.dy + at(i));
        }
      } else {
#pragma unroll
        for (int i = 0; i < kInFlight; ++i) {
          xs[i].low = xs[i].high = load_some(batch.x + at(i), batch.left - at(i));
          if (kBackward) {
            dys[i].low = dys[i].high = load_some(batch.dy + at(i), batch.left - at(i));
          }
        }
      }
      Words x_words[kInFlight], dy_words[kInFlight];
#pragma unroll
      for (int i = 0; i < kInFlight; ++i) {
        x_words[i] = xs[i].template words<T>(x_shift);
        if (kBackward) dy_words[i] = dys[i].template words<T>(dy_shift);
      }
      if ((kInFlight - 1) * batch.apart + kSize <= batch.left) {
        add_batch<true>(x_words, dy_words, batch, v == lane, share);
      } else {
        add_batch<false>(x_words, dy_words, batch, v == lane, share);
      }
    }
  }

 private:
  // kFull: all vectors have all their values.
  template <bool kFull>
  SBN_DEVICE void add_batch(const Words (&x)[kInFlight], const Words (&dy)[kInFlight],
                            const Batch& batch, bool is_first, Share<A>* share) const {
    const auto get = [&](const Words(&from)[kInFlight], int run, int i, A other) {
      const int vector = run * kVectors + i / kSize, j = i % kSize;
      const bool there = kFull || j < batch.left - vector * batch.apart;
      return there ? value_at<T>(from[vector], j) : other;
    };
    const auto again = [&](int run, int i, const auto& f) {
      const int place = (run * kVectors + i / kSize) * batch.apart + i % kSize;
      if (place >= batch.left) return;
      if constexpr (kBackward) {
        f(widen(batch.dy[place]), widen(batch.x[place]));
      } else {
        f(widen(batch.x[place]));
      }
    };
    const auto add = [&](int, double first, double second) {
      share->first += first;
      share->second += second;
    };
    constexpr int kValues = kVectors * kSize;
    if constexpr (kBackward) {
      add_runs<kRuns, kValues>([&](int run, int i) { return get(dy, run, i, A{0}); },
                               [&](int run, int i) { return get(x, run, i, center.mean); },
                               [&](int) { return center.mean; }, A{}, again, add);
    } else {
      if (is_first) {
        const A first = value_at<T>(x[0], 0);
        share->origin = origin_of<kValues>([&](int i) { return get(x, 0, i, first); }, A{});
      }
      const A origin = share->origin;
      add_runs<kRuns, kValues>([&](int run, int i) { return get(x, run, i, origin); },
                               [&](int) { return origin; }, A{}, again, add);
      if (kFull) {
        share->count += kInFlight * kSize;
      } else {
#pragma unroll
        for (int i = 0; i < kInFlight; ++i) {
          const int here = batch.left - i * batch.apart;
          share->count += here >= kSize ? kSize : here > 0 ? here : 0;
        }
      }
    }
  }
};

// The sums of chunks on their way to Sum3, which `own` has. Those of a chunk come to be in all of
// its `lanes` lanes; each of these keeps another chunk's until all have one, and then all turn
// theirs into Sum3 at once.
template <typename A, bool kBackward>
struct KeptSums {
  double* own;
  int lanes, lane, count = 0, turn = 0;
  A near = 0;
  double first = 0, second = 0;

  SBN_DEVICE KeptSums(double* own_sums, int lanes_of_chunk, int lane_of_warp)
      : own(own_sums), lanes(lanes_of_chunk), lane(lane_of_warp) {
    put(ChannelSums(), own);
  }

  // Takes a lane's share of a chunk of n values.
  SBN_DEVICE void take(Share<A> share, int n, const Center<A>& center) {
    const int lane_of_chunk = lane % lanes;
    A chunk_near = 0;
    if constexpr (!kBackward) {
      // Of its first lane.
      chunk_near = __shfl_sync(kAllLanes, share.origin, lane - lane_of_chunk);
      share.move(chunk_near);
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
      near = chunk_near;
      first = share.first;
      second = kBackward ? center.products(first, share.second) : share.second;
    }
    if (++turn == lanes) {
      keep();
      turn = 0;
    }
  }

  // Adds what is kept to `own`.
  SBN_DEVICE void keep() {
    ChannelSums sums = get_sums(own);
    if constexpr (kBackward) {
      sums.first.add(first);
      sums.second.add(second);
    } else {
      add_about<A>(count, near, first, second, &sums.first, &sums.second);
    }
    put(sums, own);
    count = 0;
    near = first = second = 0;
  }
};

// S > 1: one channel a block, some of its chunks; `lanes` threads a chunk.
template <typename T, bool kBackward, bool kAligned>
__global__ void __launch_bounds__(kThreads, plane_blocks<T>(kBackward, kAligned))
    sum_planes(SumsTask task) {
  using A = Arithmetic<T>;
  // In shared memory, as a thread needs its own once in `lanes` chunks.
  __shared__ double own_sums[kThreads * 6];
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const int lanes = task.lanes, lane_of_chunk = lane % lanes, at_once = kWarp / lanes;
  const int64_t c = blockIdx.x;

  PlaneSums<T, kBackward, kAligned> plane{task, {0, 0}};
  if constexpr (kBackward) plane.center = Center<A>::of(task.statistics[c]);

  double* const own = own_sums + threadIdx.x * 6;
  KeptSums<A, kBackward> kept{own, lanes, lane};

  // The chunks that are left for the warp, a lane's next one, and how far the one after that is: so
  // many samples and chunks.
  const int64_t begin = task.unit_of_slice(blockIdx.y) + warp * at_once;
  int64_t units = task.unit_of_slice(blockIdx.y + 1) - begin;
  const int64_t unit = begin + lane / lanes, sample_size = task.C * task.S;
  const int chunks = static_cast<int>(task.chunks);
  int64_t sample = unit, samples_apart = kWarps * at_once;
  int chunk = 0, chunks_apart = 0;
  if (chunks > 1) {
    sample = unit / chunks;
    chunk = static_cast<int>(unit - sample * chunks);
    samples_apart = kWarps * at_once / chunks;
    chunks_apart = kWarps * at_once % chunks;
  }
  int64_t plane_at = sample * sample_size + c * task.S;
  const int64_t planes_apart = samples_apart * sample_size;
  const int last_size =
      static_cast<int>(task.S - static_cast<int64_t>(chunks - 1) * task.chunk_size);

  for (; units > 0; units -= kWarps * at_once) {
    Share<A> share;
    int n = 0;
    if (lane / lanes < units) {
      const int64_t at = plane_at + static_cast<int64_t>(chunk) * task.chunk_size;
      n = chunk + 1 == chunks ? last_size : task.chunk_size;
      plane.add_values(static_cast<const T*>(task.dy) + (kBackward ? at : 0),
                       static_cast<const T*>(task.x) + at, n, lane_of_chunk, lanes, &share);
    }
    plane_at += planes_apart;
    chunk += chunks_apart;
    if (chunk >= chunks) {
      chunk -= chunks;
      plane_at += sample_size;
    }
    kept.take(share, n, plane.center);
  }
  kept.keep();

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

// Bytes of an array that a warp has in shared memory at a time.
template <bool kBackward>
constexpr int kTileBytes = kBackward ? 2048 : 4608;
// Values of it, less those that may stand in front of them in their first 16 bytes, and those
// behind them that a thread's last run reads and does not use.
template <typename T, bool kBackward>
constexpr int kTileValues =
    kTileBytes<kBackward> / static_cast<int>(sizeof(T)) - (kPack<T> - 1) - kRun;
// Blocks of a multiprocessor: what registers allow, 2 in all of these kernels before sm_90.
template <typename T, bool kBackward>
constexpr int kTileBlocks =
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
    2;
#else
    kBackward && sizeof(T) == sizeof(double) ? 2 : 3;
#endif

// Values that lie together, at any address, on their way through registers to shared memory.
template <typename T, int kBytes>
struct Tile {
  static constexpr int kVectors = (kBytes / 16 + kWarp - 1) / kWarp;
  const T* from;
  int size, shift, vectors;
  bool inside;
  Words words[kVectors];

  // All lanes' loads of `size` values from `from` on.
  SBN_DEVICE static Tile load(const T* from, int size, const Extent& array, int lane) {
    Tile tile;
    tile.from = from;
    tile.size = size;
    tile.shift = static_cast<int>(misalignment(from) / sizeof(T));
    tile.vectors = (tile.shift + size + kPack<T> - 1) / kPack<T>;
    // False at the ends of the array alone.
    tile.inside = array.holds(from - tile.shift, tile.vectors);
    if (!tile.inside) return tile;
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const int v = lane + i * kWarp;
      if (v < tile.vectors) tile.words[i] = load_words(from - tile.shift + v * kPack<T>);
    }
    return tile;
  }

  // The first value comes to to[shift].
  SBN_DEVICE void put(T* to, int lane) const {
    if (inside) {
#pragma unroll
      for (int i = 0; i < kVectors; ++i) {
        const int v = lane + i * kWarp;
        if (v < vectors) share_words(to + v * kPack<T>, words[i]);
      }
    } else {
      for (int i = lane; i < size; i += kWarp) to[shift + i] = from[i];
    }
  }
};

// Values `at` and behind it of a tile: those of 16 bits by words, as a thread reads no more than a
// word at a time.
template <int kValues, typename T>
SBN_DEVICE void read_values(const T* tile, int at, Arithmetic<T> (&values)[kValues]) {
  if constexpr (sizeof(T) == 2) {
    const auto* const words = reinterpret_cast<const uint32_t*>(tile) + at / 2;
    uint32_t w[kValues / 2 + 1];
#pragma unroll
    for (int i = 0; i <= kValues / 2; ++i) w[i] = words[i];
#pragma unroll
    for (int i = 0; i < kValues / 2; ++i) {
      const Words pair = {{__funnelshift_r(w[i], w[i + 1], at % 2 * 16), 0, 0, 0}};
      values[2 * i] = value_at<T>(pair, 0);
      values[2 * i + 1] = value_at<T>(pair, 1);
    }
  } else {
#pragma unroll
    for (int i = 0; i < kValues; ++i) values[i] = widen(tile[at + i]);
  }
}

// S > 1, small planes that begin at odd addresses: a warp takes those of `kWarp / lanes` channels
// of a sample, which lie together, through shared memory; `lanes` threads a plane, each the next
// `chunk_size` values.
template <typename T, bool kBackward>
__global__ void __launch_bounds__(kThreads, kTileBlocks<T, kBackward>) sum_tiles(SumsTask task) {
  using A = Arithmetic<T>;
  constexpr int kBytes = kTileBytes<kBackward>, kArrays = kBackward ? 2 : 1, kTail = kRun / 2;
  constexpr int kTile = kBytes / static_cast<int>(sizeof(T));
  alignas(16) __shared__ Words shared[kArrays * kWarps * kBytes / sizeof(Words)];
  // In shared memory, as in sum_planes.
  __shared__ double own_sums[kThreads * 6];
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  T* const x_tile = reinterpret_cast<T*>(shared) + warp * kArrays * kTile;
  T* const dy_tile = x_tile + (kArrays - 1) * kTile;

  const int lanes = task.lanes, across = kWarp / lanes;
  const int plane = lane / lanes, lane_of_plane = lane % lanes;
  const int64_t tile = static_cast<int64_t>(blockIdx.x) * across, c = tile + plane;
  const int planes = c - plane + across <= task.C ? across : static_cast<int>(task.C - tile);
  const T *x = static_cast<const T*>(task.x), *dy = static_cast<const T*>(task.dy);

  Center<A> center{0, 0};
  if constexpr (kBackward) {
    if (plane < planes) center = Center<A>::of(task.statistics[c]);
  }
  double* const own = own_sums + threadIdx.x * 6;
  KeptSums<A, kBackward> kept{own, lanes, lane};

  const int64_t end = task.unit_of_slice(blockIdx.y + 1);
  const int n = static_cast<int>(task.S), share_size = task.chunk_size;
  for (int64_t sample = task.unit_of_slice(blockIdx.y) + warp; sample < end; sample += kWarps) {
    const int64_t at = (sample * task.C + tile) * task.S;
    using Loads = Tile<T, kBytes>;
    const Loads x_loads = Loads::load(x + at, planes * n, {task.x, task.x_end}, lane);
    const Loads dy_loads =
        kBackward ? Loads::load(dy + at, planes * n, {task.dy, task.dy_end}, lane) : x_loads;
    // All have read what was there before.
    __syncwarp();
    x_loads.put(x_tile, lane);
    if constexpr (kBackward) dy_loads.put(dy_tile, lane);
    __syncwarp();
    const int begin = plane * n + lane_of_plane * share_size;
    const int x_at = x_loads.shift + begin, dy_at = kBackward ? dy_loads.shift + begin : 0;

    const int left = plane < planes ? n - lane_of_plane * share_size : 0;
    Share<A> share;
    share.count = left < 0 ? 0 : left < share_size ? left : share_size;
    const auto add = [&](int, double run_first, double run_second) {
      share.first += run_first;
      share.second += run_second;
    };
    // kFull: all of the run's values are there.
    const auto add_run = [&](auto values, auto is_full, int j, bool is_first) {
      constexpr int kValues = decltype(values)::value;
      const auto there = [&](int i) { return decltype(is_full)::value || j + i < share.count; };
      const auto again = [&](int, int i, const auto& f) {
        if (j + i >= share.count) return;
        if constexpr (kBackward) {
          f(widen(dy_tile[dy_at + j + i]), widen(x_tile[x_at + j + i]));
        } else {
          f(widen(x_tile[x_at + j + i]));
        }
      };
      A v[kValues];
      read_values<kValues>(x_tile, x_at + j, v);
      if constexpr (kBackward) {
        A g[kValues];
        read_values<kValues>(dy_tile, dy_at + j, g);
        add_runs<1, kValues>([&](int, int i) { return there(i) ? g[i] : A{0}; },
                             [&](int, int i) { return there(i) ? v[i] : center.mean; },
                             [&](int) { return center.mean; }, A{}, again, add);
      } else {
        if (is_first) {
          share.origin = origin_of<kValues>([&](int i) { return there(i) ? v[i] : v[0]; }, A{});
        }
        const A origin = share.origin;
        add_runs<1, kValues>([&](int, int i) { return there(i) ? v[i] : origin; },
                             [&](int) { return origin; }, A{}, again, add);
      }
    };
    int j = 0;
    if (share.count >= kRun) {
      add_run(Number<kRun>(), True(), 0, true);
      j = kRun;
    }
    for (; j + kRun <= share.count; j += kRun) add_run(Number<kRun>(), True(), j, false);
    for (; j < share.count; j += kTail) add_run(Number<kTail>(), False(), j, j == 0);

    kept.take(share, n, center);
  }
  kept.keep();

  ChannelSums sums = get_sums(own);
  add_lanes(&sums, lanes);
  put(sums, own);
  __syncthreads();
  // The first warp has the sums of all planes in the first lane of each.
  if (warp == 0 && lane_of_plane == 0 && plane < planes) {
    for (int i = 1; i < kWarps; ++i) sums.add(get_sums(own + i * kWarp * 6));
    store_sums(sums, task.to + c * task.slices + blockIdx.y);
  }
}

// S = 1, R > 1: as many channels a block as its threads side by side, `lanes`, have vectors, and
// some chunks of the samples' rows.
template <typename T, bool kBackward, bool kAligned>
__global__ void __launch_bounds__(kThreads, kRowBlocks) sum_rows(SumsTask task) {
  using A = Arithmetic<T>;
  constexpr int kSize = kPack<T>;
  constexpr int kBatch = kBackward ? kRowPairsInFlight : kRowsInFlight<T>;
  // Padded so that threads that read neighbouring channels meet different banks.
  constexpr int kPlane = kThreads + 16 / kSize;
  // What is left to be added one after the other: the fewest rows of threads.
  constexpr int kLast = kThreads / kWarp, kMostGroups = kLast / kFewestRows;
  __shared__ double shared[2][kSize * kPlane];
  // In shared memory, as they are needed once a chunk.
  __shared__ double own_sums[kThreads * 6];

  const int across = task.lanes, down = task.down, groups = kThreads / across / down;
  const int column = threadIdx.x % across, line = threadIdx.x / across;
  const int row = line % down, group = line / down;
  const int64_t tile = static_cast<int64_t>(blockIdx.x) * across * kSize;
  const int64_t c = tile + column * kSize;
  const int width = c + kSize <= task.C ? kSize : c < task.C ? static_cast<int>(task.C - c) : 0;
  const T *x = static_cast<const T*>(task.x), *dy = static_cast<const T*>(task.dy);
  const int64_t below = down * task.C;

  // The first threads have a channel of the block's each, for what is done once a chunk.
  const int own = threadIdx.x;
  const bool owns = own < across * kSize && tile + own < task.C;
  put(ChannelSums(), own_sums + own * 6);

  // What is subtracted: the means, or origins of a thread's share.
  A about[kSize];
  Center<A> own_center{0, 0};
  if (kBackward) {
#pragma unroll
    for (int j = 0; j < kSize; ++j) {
      about[j] = j < width ? Center<A>::of(task.statistics[c + j]).mean : A{0};
    }
    if (owns) own_center = Center<A>::of(task.statistics[tile + own]);
  }

  // The chunk whose first rows are on their way, while the one before it is reduced.
  int64_t base = task.unit_of_slice(blockIdx.y), at = 0;
  int left = static_cast<int>(task.unit_of_slice(blockIdx.y + 1) - base);
  int n = 0;
  bool inside = true;
  Words xs[kBatch], dys[kBatch];
  // `vectors` of an array, a whole number of rows apart. Behind the last row is the first once
  // more.
  const auto load = [&](const T* from, int r, auto& vectors) {
    constexpr int kVectors = sizeof(vectors) / sizeof(Words);
    const auto place = [&](int i) { return from + (r + i * down < n ? i * below : 0); };
    if (kAligned || inside) {
      Fetched<kAligned> fetched[kVectors];
#pragma unroll
      for (int i = 0; i < kVectors; ++i) fetched[i] = Fetched<kAligned>::load(place(i));
#pragma unroll
      for (int i = 0; i < kVectors; ++i) {
        vectors[i] = fetched[i].template words<T>(kAligned ? 0 : misalignment(place(i)));
      }
    } else {
#pragma unroll
      for (int i = 0; i < kVectors; ++i) vectors[i] = load_some(place(i), width);
    }
  };
  const auto load_batch = [&](int r) {
    const int64_t from = at + c + r * task.C;
    load(x + from, r, xs);
    if constexpr (kBackward) load(dy + from, r, dys);
  };
  const auto begin_chunk = [&] {
    // Of a group that has none, the last once more.
    const int64_t unit = base + (group < left ? group : left - 1);
    const int64_t sample = task.chunks == 1 ? unit : unit / task.chunks;
    const int64_t start = (unit - sample * task.chunks) * task.chunk_size, rows = task.R - start;
    n = rows < task.chunk_size ? static_cast<int>(rows) : task.chunk_size;
    at = (sample * task.R + start) * task.C;
    // A vector at a row's end reaches past it where C is no multiple of its size.
    const int64_t vectors = n * task.C / kSize + 3;
    inside = kAligned || task.holds<kBackward>(dy + (kBackward ? at : 0), x + at, vectors);
    if (kAligned && width > 0 && row < n) load_batch(row);
  };

  double first[kSize] = {}, second[kSize] = {};
  const auto add_batch = [&](auto is_full, int r, bool is_first) {
    constexpr bool kFull = decltype(is_full)::value;
    const auto there = [&](int i) { return kFull || r + i * down < n; };
    const auto add = [&](int j, double a, double b) {
      first[j] += a;
      second[j] += b;
    };
    const auto get = [&](const Words* from, int j, int i, A other) {
      return there(i) ? value_at<T>(from[i], j) : other;
    };
    const auto again = [&](int j, int i, const auto& f) {
      if (!there(i) || j >= width) return;
      const int64_t place = at + c + (r + i * down) * task.C + j;
      if constexpr (kBackward) {
        f(widen(dy[place]), widen(x[place]));
      } else {
        f(widen(x[place]));
      }
    };
    const auto value = [&](int j, int i) { return get(xs, j, i, about[j]); };
    const auto origin = [&](int j) { return about[j]; };
    if (!kBackward && is_first) {
#pragma unroll
      for (int j = 0; j < kSize; ++j) {
        about[j] = value_at<T>(xs[0], j);
        about[j] = origin_of<kBatch>([&](int i) { return value(j, i); }, A{});
      }
    }
    if constexpr (kBackward) {
      add_runs<kSize, kBatch>([&](int j, int i) { return get(dys, j, i, A{0}); }, value, origin,
                              A{}, again, add);
    } else {
      add_runs<kSize, kBatch>(value, origin, A{}, again, add);
    }
  };

  if (left > 0) begin_chunk();
  while (left > 0) {
    int count = 0;
#pragma unroll
    for (int j = 0; j < kSize; ++j) {
      first[j] = second[j] = 0;
      if (!kBackward) about[j] = 0;
    }
    for (int r = row; r < n && width > 0; r += down * kBatch) {
      // Vectors at odd addresses are not asked for before: both halves of each would have to be
      // kept.
      if (!kAligned || r != row) load_batch(r);
      if (r + (kBatch - 1) * down < n) {
        add_batch(True(), r, r == row);
        count += kBatch;
      } else {
        add_batch(False(), r, r == row);
#pragma unroll
        for (int i = 0; i < kBatch; ++i) count += r + i * down < n ? 1 : 0;
      }
    }
    if (!kBackward) {
      // Read again, as registers are few.
      Words nears[1] = {zero_words()};
      if (width > 0) load(x + at + c, 0, nears);
#pragma unroll
      for (int j = 0; j < kSize; ++j) {
        Share<A> share{about[j], count, first[j], second[j]};
        share.move(value_at<T>(nears[0], j));
        first[j] = share.first;
        second[j] = share.second;
      }
    }
    const int chunk_size = n;
    const int chunks = left;
    T chunk_nears[kMostGroups];
    if (!kBackward && owns) {
      // Several groups have a whole sample each.
      const T* const from = x + (groups == 1 ? at : base * task.R * task.C) + tile + own;
#pragma unroll
      for (int g = 0; g < kMostGroups; ++g) {
        if (g < groups && g < chunks) chunk_nears[g] = from[g * task.R * task.C];
      }
    }
    base += groups;
    left -= groups;
    if (left > 0) begin_chunk();

    // All have read what the chunk before left there.
    __syncthreads();
#pragma unroll
    for (int j = 0; j < kSize; ++j) {
      shared[0][j * kPlane + threadIdx.x] = first[j];
      shared[1][j * kPlane + threadIdx.x] = second[j];
    }
    for (int lines = down; lines > kLast;) {
      lines /= 2;
      __syncthreads();
      if (row < lines) {
#pragma unroll
        for (int j = 0; j < 2 * kSize; ++j) {
          double* const place = shared[j % 2] + j / 2 * kPlane + threadIdx.x;
          *place += place[lines * across];
        }
      }
    }
    __syncthreads();
    if (owns) {
      ChannelSums sums = get_sums(own_sums + own * 6);
#pragma unroll
      for (int g = 0; g < kMostGroups; ++g) {
        // A break takes one register more, and sm_50 has none left.
        if (g >= groups || g >= chunks) continue;
        const int place = own % kSize * kPlane + own / kSize + g * down * across;
        double total[2] = {shared[0][place], shared[1][place]};
#pragma unroll
        for (int i = 1; i < kLast; ++i) {
          if (i >= down) break;
          total[0] += shared[0][place + i * across];
          total[1] += shared[1][place + i * across];
        }
        if (kBackward) {
          sums.first.add(total[0]);
          sums.second.add(own_center.products(total[0], total[1]));
        } else {
          add_about<A>(chunk_size, widen(chunk_nears[g]), total[0], total[1], &sums.first,
                       &sums.second);
        }
      }
      put(sums, own_sums + own * 6);
    }
  }
  if (owns) {
    store_sums(get_sums(own_sums + own * 6), task.to + (tile + own) * task.slices + blockIdx.y);
  }
}

// S = R = 1: each value is a sample of its own, so each goes into Sum3.
template <typename T, bool kBackward>
__global__ void __launch_bounds__(kThreads, 2) sum_values(SumsTask task) {
  using A = Arithmetic<T>;
  __shared__ double shared[kWarps * kWarp * 6];
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const int64_t c = static_cast<int64_t>(blockIdx.x) * kWarp + lane;
  const T *x = static_cast<const T*>(task.x), *dy = static_cast<const T*>(task.dy);
  ChannelSums sums;
  if (c < task.C) {
    const double mean = kBackward ? task.statistics[c].mean : 0;
    const double mean_low = kBackward ? task.statistics[c].mean_low : 0;
    const int64_t end = task.unit_of_slice(blockIdx.y + 1);
    for (int64_t n = task.unit_of_slice(blockIdx.y) + warp; n < end; n += kWarps) {
      double value = widen(x[n * task.C + c]);
      if (kBackward) {
        const double gradient = widen(dy[n * task.C + c]);
        value -= mean;
        if (sizeof(A) == sizeof(double)) value -= mean_low;
        sums.first.add(gradient);
        sums.second.add(gradient * value);
      } else {
        double error;
        sums.first.add(value);
        sums.second.add(two_product(value, value, &error));
        if (sizeof(A) == sizeof(double)) sums.second.add(error);
      }
    }
  }
  put(sums, shared + threadIdx.x * 6);
  __syncthreads();
  if (warp == 0 && c < task.C) {
    for (int i = 1; i < kWarps; ++i) sums.add(get_sums(shared + (i * kWarp + lane) * 6));
    store_sums(sums, task.to + c * task.slices + blockIdx.y);
  }
}

// sums[c] = the sum over the slices of channel c, by `lanes` threads, a power of 2.
__global__ void __launch_bounds__(kThreads)
    add_slices(int64_t C, int slices, int lanes, const ChannelSums* parts, ChannelSums* sums) {
  __shared__ double shared[kWarps * 6];
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % lanes;
  const int64_t c = static_cast<int64_t>(blockIdx.x) * (kThreads / lanes) + threadIdx.x / lanes;
  ChannelSums total;
  if (c < C) {
#pragma unroll 4
    for (int i = lane; i < slices; i += lanes) total.add(load_sums(parts + c * slices + i));
  }
  add_lanes(&total, lanes < kWarp ? lanes : kWarp);
  if (lanes > kWarp) {
    // All threads have the same channel.
    if (threadIdx.x % kWarp == 0) put(total, shared + warp * 6);
    __syncthreads();
    total = ChannelSums();
    if (threadIdx.x < kWarps) total = get_sums(shared + threadIdx.x * 6);
    add_lanes(&total, kWarps);
  }
  if (c < C && lane == 0) store_sums(total, sums + c);
}

}  // namespace gluon_syncbn

#endif  // GLUON_SYNCBN_CUDA_SUMS_CUH_
