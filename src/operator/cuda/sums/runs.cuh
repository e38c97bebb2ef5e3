// What the kernels of sums share. They read x, or dy and x, once.
//
// What is added to what depends on the shape of one sample alone: runs of up to kRun values in the
// type that data are computed in, runs of a chunk in double, in a fixed tree, and chunks in Sum3,
// where the order is immaterial. So neither the number of blocks nor the split of a batch shows.
#ifndef GLUON_SYNCBN_CUDA_SUMS_RUNS_CUH_
#define GLUON_SYNCBN_CUDA_SUMS_RUNS_CUH_

#include "cuda/vectors.cuh"
#include "numerics/formulas.h"

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

}  // namespace gluon_syncbn

#endif  // GLUON_SYNCBN_CUDA_SUMS_RUNS_CUH_
