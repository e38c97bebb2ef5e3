// Shared by the kernels of sums, which read x, or dy and x, once.
//
// The result depends neither on the number of blocks nor on the split of a batch. Up to kRun values
// are added in Arithmetic<T>, the runs of a chunk in double, in a fixed tree. These orders depend
// only on the shape of a sample. Chunks are added in Sum3, where the order is immaterial.
#ifndef GLUON_SYNCBN_CUDA_SUMS_RUNS_CUH_
#define GLUON_SYNCBN_CUDA_SUMS_RUNS_CUH_

#include "cuda/vectors.cuh"
#include "numerics/formulas.h"

namespace gluon_syncbn {

constexpr int kThreads = 256, kWarp = 32, kWarps = kThreads / kWarp;
constexpr unsigned kAllLanes = 0xffffffffu;

// The maximum number of values that are added in float. Each rounding costs half a unit in the last
// place of their spread.
constexpr int kRun = 8;

// The maximum number of values of a chunk per thread, for planes. The work per chunk takes as long
// as several vectors.
template <typename T>
constexpr int kPlaneShare = sizeof(T) == sizeof(double) ? 32 : 64;
// Vectors of each array that a thread loads before it uses the first.
constexpr int kInFlight = 4;
template <typename T>
constexpr int kRowsInFlight = sizeof(T) == sizeof(double)  ? kRun
                              : sizeof(T) == sizeof(float) ? 5
                                                           : 4;
constexpr int kRowPairsInFlight = 4;
template <typename T>
constexpr int kRowTriplesInFlight = sizeof(T) == 2 ? 2 : 3;
// S = 1: rows of a chunk per thread, and the minimum number of rows of threads for a chunk.
constexpr int kRowsPerThread = 32, kFewestRows = 2;

// Resident blocks of each kernel of sums per multiprocessor, limited by registers. The kernels read
// kArrays arrays: 1: x. 2: dy and x. 3: dy, x, and v, on which the gradient of an activation
// depends.
template <typename T>
constexpr int plane_blocks(int arrays, bool aligned) {
  return aligned && (arrays == 1 || (arrays == 2 && sizeof(T) >= sizeof(float))) ? 3 : 2;
}
constexpr int kRowBlocks = 2;

// Outside of this range, squares of float lose digits or overflow.
constexpr float kSmallSquare = 0x1p-90f, kLargeSquare = 0x1p126f;

// Compile-time constants as arguments.
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

// A thread's share of a chunk: the number of values, and the sums of x - origin and of its square.
template <typename A>
struct Share {
  A origin = 0;
  int count = 0;
  double first = 0, second = 0;

  // Changes the origin of the sums to `pivot`.
  SBN_DEVICE void move(double pivot) {
    const double distance = static_cast<double>(origin) - pivot, moved = count * distance;
    second += distance * (2 * first + moved);
    first += moved;
  }
};

// A number close to the values of a share that begins with value(0), value(1), ..., so that
// rounding errors depend on the spread of the values and not on their offset. float: the mean of
// these values, as one of them may be an outlier. Dividing before adding avoids an overflow.
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

// Adds kRuns runs of kValues values, value(run, i), and calls add(run, sum(x - origin),
// sum((x - origin)^2)) for each. In the worst case the squares lose 8 units of 2^-24, and inv_std
// half of that. If float is not enough, reload(run, i, f) calls f with value i, if it exists. It
// reads from memory, as keeping the values would take registers.
template <int kRuns, int kValues, typename Value, typename Origin, typename Reload, typename Add>
SBN_DEVICE void add_runs(const Value& value, const Origin& origin, float, const Reload& reload,
                         const Add& add) {
  float sums[kRuns], squares[kRuns];
  // The smallest and the largest of the squares. Both branches preserve NaN.
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
    // A run of zeros, as after a ReLU, loses nothing.
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
        reload(run, i, [&](double x) {
          const double d = x - origin(run);
          first += d;
          second = fma(d, d, second);
        });
      }
    }
    add(run, first, second);
  }
}

template <int kRuns, int kValues, typename Value, typename Origin, typename Reload, typename Add>
SBN_DEVICE void add_runs(const Value& value, const Origin& origin, double, const Reload&,
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

// The mean of a channel, as the sum of two numbers of A.
template <typename A>
struct Center {
  A mean, mean_low;

  SBN_DEVICE static Center of(const Statistics& s) {
    const A mean = static_cast<A>(s.mean);
    return {mean, static_cast<A>((s.mean - static_cast<double>(mean)) + s.mean_low)};
  }

  // Corrects sum(dy * (x - mean)), given sum(dy), for the lower part of the mean.
  SBN_DEVICE double products(double first, double second) const {
    return second - mean_low * first;
  }
};

// Whether float holds both.
SBN_DEVICE bool fits_products(float sum, float product) {
  return fabsf(sum) <= kLargeSquare && fabsf(product) <= kLargeSquare;
}

// The same for backward: sum(dy) and sum(dy * (x - mean)). dy is 0 where there is no value.
template <int kRuns, int kValues, typename Gradient, typename Value, typename Mean, typename Reload,
          typename Add>
SBN_DEVICE void add_runs(const Gradient& dy, const Value& x, const Mean& mean, float,
                         const Reload& reload, const Add& add) {
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
        reload(run, i, [&](double gradient, double value) {
          first += gradient;
          second = fma(gradient, value - mean(run), second);
        });
      }
    }
    add(run, first, second);
  }
}

template <int kRuns, int kValues, typename Gradient, typename Value, typename Mean, typename Reload,
          typename Add>
SBN_DEVICE void add_runs(const Gradient& dy, const Value& x, const Mean& mean, double,
                         const Reload&, const Add& add) {
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

// Adds up each group of `lanes` lanes, a power of 2. Its first lane has the sum.
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

// ChannelSums in device memory are aligned to 16 bytes.
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

// The coefficients of dx of one channel, with an activation or a gradient of the residual.
template <typename A>
struct GatedGradient {
  // Of Gate.
  A sign, threshold;
  InputGradient<A> input;
};

// The arguments of a kernel of sums. `to` has C x slices entries.
struct SumsTask {
  // N samples of C channels of S values, or, with S = 1, of R rows of C values.
  int64_t N, C, S, R;
  const void *dy, *x;
  const Statistics* statistics;
  ChannelSums* to;
  // Chunks per sample, and units (usually chunks) of all samples; chunk_size in values of a plane,
  // or in rows.
  int64_t chunks, units;
  int chunk_size, slices, lanes;
  // S = 1: rows of threads for a chunk. The other threads of a block have other chunks.
  int down;
  // The ends of dy and x.
  const void *dy_end, *x_end;

  SBN_DEVICE int64_t unit_of_slice(int slice) const { return units * slice / slices; }
};

// What an activation and a residual add to the arguments of a kernel. A parameter of its own, as
// nvcc generates slower code for a struct of more than 128 bytes.
template <typename A>
struct EpilogueTask {
  Activation activation;
  // Of the activation; and of its inverse, if x is recovered from y, or else 1.
  A slope, inverse;
  // x, or the array of y, which decides on the gates, and its end.
  const void *v, *v_end;
  // GatedGradients.
  const void* gates;
  void* dresidual;
  bool add_dresidual;
};

// Whether Fetched stays inside of the arrays.
template <int kArrays, typename A>
SBN_DEVICE bool holds(const SumsTask& task, const EpilogueTask<A>& epilogue, const void* dy,
                      const void* x, const void* v, int64_t vectors) {
  return Extent{task.x, task.x_end}.holds(x, vectors) &&
         (kArrays < 2 || Extent{task.dy, task.dy_end}.holds(dy, vectors)) &&
         (kArrays < 3 || Extent{epilogue.v, epilogue.v_end}.holds(v, vectors));
}

// What turns the values of dy and x at a value of v into those that are summed. x is recovered from
// y by the inverse of the activation, which is a gate too.
template <typename A, bool kGated>
struct Gates {
  Gate<A> dy, x;

  SBN_DEVICE static Gates of(const EpilogueTask<A>& epilogue, const GatedGradient<A>& gate) {
    return {{gate.sign, gate.threshold, epilogue.slope},
            {gate.sign, gate.threshold, epilogue.inverse}};
  }
  SBN_DEVICE static Gates of(const EpilogueTask<A>& epilogue, int64_t c) {
    return of(epilogue, static_cast<const GatedGradient<A>*>(epilogue.gates)[c]);
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
