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
// a unit in the last place of the run's own spread.
constexpr int kRun = 8;

// Values of a plane that are summed at a time.
constexpr int kPlaneChunk = 1024;
// Vectors of each array that a thread asks for before it looks at the first.
constexpr int kInFlight = 4;
template <typename T>
constexpr int kRowsInFlight = sizeof(T) == sizeof(double)  ? kRun
                              : sizeof(T) == sizeof(float) ? 5
                                                           : 4;
constexpr int kRowPairsInFlight = 4;
// With S = 1, rows of a sample that one thread adds up at a time.
constexpr int kRowsPerThread = 32;

// Below and above, squares of float lose digits or overflow.
constexpr float kSmallSquare = 0x1p-90f, kLargeSquare = 0x1p126f;

// Adds the first `count` values to {sum(x - near), sum((x - near)^2)}; those behind are copies.
// float: about their mean, so that what is rounded is no larger than their own spread, whatever the
// data's offset. In the worst case the squares lose 10 units of 2^-24, and inv_std half of that.
template <int kValues>
SBN_DEVICE void add_run(const float (&x)[kValues], int count, double near, double* first,
                        double* second) {
  float origin = x[0];
#pragma unroll
  for (int i = 1; i < kValues; ++i) origin += x[i];
  origin *= 1.0f / kValues;
  float about = 0, squares = 0;
#pragma unroll
  for (int i = 0; i < kValues; ++i) {
    const float d = i < count ? x[i] - origin : 0;
    about += d;
    squares += d * d;
  }
  double sum = about, sum_of_squares = squares;
  if (!(squares >= kSmallSquare && squares <= kLargeSquare)) {
    bool differ = !(squares >= 0);
    origin = x[0];
#pragma unroll
    for (int i = 1; i < kValues; ++i) differ |= x[i] != origin;
    sum = 0;
    sum_of_squares = 0;
    if (differ) {
#pragma unroll
      for (int i = 1; i < kValues; ++i) {
        const double d = static_cast<double>(x[i]) - static_cast<double>(origin);
        sum += i < count ? d : 0;
        sum_of_squares += i < count ? d * d : 0;
      }
    }
  }
  const double away = static_cast<double>(origin) - near;
  const double moved = count * away;
  *first += moved + sum;
  *second += sum_of_squares + away * (2 * sum + moved);
}

template <int kValues>
SBN_DEVICE void add_run(const double (&x)[kValues], int count, double near, double* first,
                        double* second) {
#pragma unroll
  for (int i = 0; i < kValues; ++i) {
    const double d = i < count ? x[i] - near : 0;
    *first += d;
    *second += d * d;
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
};

// Adds to {sum(dy), sum(dy * (x - mean))}; dy is 0 where there is no value.
template <int kValues>
SBN_DEVICE void add_run(const float (&dy)[kValues], const float (&x)[kValues],
                        const Center<float>& center, double* first, double* second) {
  float plain = 0, products = 0;
#pragma unroll
  for (int i = 0; i < kValues; ++i) {
    plain += dy[i];
    products += dy[i] * ((x[i] - center.mean) - center.mean_low);
  }
  double sum = plain, sum_of_products = products;
  if (!(fabsf(plain) <= kLargeSquare && fabsf(products) <= kLargeSquare)) {
    sum = 0;
    sum_of_products = 0;
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
      const float d = (x[i] - center.mean) - center.mean_low;
      sum += dy[i];
      sum_of_products += static_cast<double>(dy[i]) * d;
    }
  }
  *first += sum;
  *second += sum_of_products;
}

template <int kValues>
SBN_DEVICE void add_run(const double (&dy)[kValues], const double (&x)[kValues],
                        const Center<double>& center, double* first, double* second) {
#pragma unroll
  for (int i = 0; i < kValues; ++i) {
    *first += dy[i];
    *second += dy[i] * ((x[i] - center.mean) - center.mean_low);
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

// What a kernel of sums is asked for. `to` has C x slices entries.
struct SumsTask {
  // N samples of C channels of S values, or, with S = 1, of R rows of C values.
  int64_t N, C, S, R;
  const void *dy, *x;
  const Statistics* statistics;
  ChannelSums* to;
  int64_t chunks, units;
  int slices, lanes;

  SBN_DEVICE int64_t unit_of_slice(int slice) const { return units * slice / slices; }
  template <typename T>
  SBN_DEVICE Extent extent(const void* from) const {
    return {from, static_cast<const T*>(from) + N * R * C * S};
  }
};

// The sums of one chunk, by `lanes` threads: vector i belongs to lane i % lanes.
template <typename T, bool kBackward, bool kAligned>
struct PlaneSums {
  using A = Arithmetic<T>;
  static constexpr int kSize = kPack<T>;
  // Vectors of one run.
  static constexpr int kVectors = kRun / kSize < kInFlight ? kRun / kSize : kInFlight;
  static constexpr int kValues = kVectors * kSize;

  Extent x_extent, dy_extent;
  Center<A> center;

  SBN_DEVICE void add_values(const T* dy, const T* x, int n, int lane, int lanes, double near,
                             double* first, double* second) const {
    const int vectors = n / kSize;
    for (int v = lane; v < vectors; v += lanes * kInFlight) {
      Words xs[kInFlight], dys[kInFlight];
#pragma unroll
      for (int i = 0; i < kInFlight; ++i) {
        const int at = v + i * lanes;
        if (at >= vectors) continue;
        xs[i] = load_values<T, kAligned>(x + at * kSize, x_extent);
        if (kBackward) dys[i] = load_values<T, kAligned>(dy + at * kSize, dy_extent);
      }
#pragma unroll
      for (int i = 0; i < kInFlight; i += kVectors) {
        if (v + i * lanes >= vectors) continue;
        A values[kValues], gradients[kValues];
        int count = 0;
#pragma unroll
        for (int k = 0; k < kVectors; ++k) {
          const bool there = k == 0 || v + (i + k) * lanes < vectors;
          count += there ? kSize : 0;
#pragma unroll
          for (int j = 0; j < kSize; ++j) {
            values[k * kSize + j] = there ? value_at<T>(xs[i + k], j) : value_at<T>(xs[i], 0);
            if (kBackward) gradients[k * kSize + j] = there ? value_at<T>(dys[i + k], j) : A{0};
          }
        }
        if constexpr (kBackward) {
          add_run(gradients, values, center, first, second);
        } else {
          add_run(values, count, near, first, second);
        }
      }
    }
    for (int i = vectors * kSize + lane; i < n; i += lanes) {
      const A value[1] = {widen(x[i])};
      if constexpr (kBackward) {
        const A gradient[1] = {widen(dy[i])};
        add_run(gradient, value, center, first, second);
      } else {
        add_run(value, 1, near, first, second);
      }
    }
  }
};

// S > 1: one channel a block, some of its chunks; `lanes` threads a chunk.
template <typename T, bool kBackward, bool kAligned>
__global__ void __launch_bounds__(kThreads, kBackward ? 2 : 3) sum_planes(SumsTask task) {
  using A = Arithmetic<T>;
  // In shared memory, as a thread needs its own once in `lanes` chunks.
  __shared__ double own_sums[kThreads * 6];
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  const int lanes = task.lanes, lane_of_chunk = lane % lanes, at_once = kWarp / lanes;
  const int64_t c = blockIdx.x;
  const T *x = static_cast<const T*>(task.x), *dy = static_cast<const T*>(task.dy);

  PlaneSums<T, kBackward, kAligned> plane;
  plane.x_extent = task.extent<T>(x);
  if constexpr (kBackward) {
    plane.dy_extent = task.extent<T>(dy);
    plane.center = Center<A>::of(task.statistics[c]);
  }

  double* const own = own_sums + threadIdx.x * 6;
  put(ChannelSums(), own);
  // The sums of a chunk are in all of its lanes. Each of them keeps another chunk's until all have
  // one, and then all turn them into Sum3 at once.
  double count = 0, near = 0, first = 0, second = 0;
  const auto keep = [&] {
    ChannelSums sums = get_sums(own);
    if constexpr (kBackward) {
      sums.first.add(first);
      sums.second.add(second);
    } else {
      add_about<A>(count, near, first, second, &sums.first, &sums.second);
    }
    put(sums, own);
    count = near = first = second = 0;
  };

  const int64_t end = task.unit_of_slice(blockIdx.y + 1);
  int turn = 0;
  for (int64_t base = task.unit_of_slice(blockIdx.y) + warp * at_once; base < end;
       base += kWarps * at_once) {
    const int64_t unit = base + lane / lanes;
    double chunk_near = 0, chunk_first = 0, chunk_second = 0;
    int n = 0;
    if (unit < end) {
      const int64_t sample = task.chunks == 1 ? unit : unit / task.chunks;
      const int64_t start = (unit - sample * task.chunks) * kPlaneChunk;
      const int64_t at = (sample * task.C + c) * task.S + start;
      n = static_cast<int>(task.S - start < kPlaneChunk ? task.S - start : kPlaneChunk);
      if (!kBackward) chunk_near = widen(x[at]);
      plane.add_values(dy + (kBackward ? at : 0), x + at, n, lane_of_chunk, lanes, chunk_near,
                       &chunk_first, &chunk_second);
    }
    for (int mask = lanes / 2; mask > 0; mask /= 2) {
      chunk_first += __shfl_xor_sync(kAllLanes, chunk_first, mask);
      chunk_second += __shfl_xor_sync(kAllLanes, chunk_second, mask);
    }
    if (lane_of_chunk == turn) {
      count = n;
      near = chunk_near;
      first = chunk_first;
      second = chunk_second;
    }
    if (++turn == lanes) {
      keep();
      turn = 0;
    }
  }
  keep();

  ChannelSums sums = get_sums(own);
  add_lanes(&sums, kWarp);
  if (lane == 0) put(sums, own);
  __syncthreads();
  if (warp == 0) {
    ChannelSums of_warp;
    if (lane < kWarps) of_warp = get_sums(own_sums + lane * kWarp * 6);
    add_lanes(&of_warp, kWarps);
    if (lane == 0) task.to[c * task.slices + blockIdx.y] = of_warp;
  }
}

// How a block walks rows, where S = 1: `across` threads side by side, a vector each, and the others
// below them.
template <typename T>
SBN_DEVICE int rows_across(int64_t C) {
  int across = 1;
  while (across < kWarp && across * kPack<T> < C) across *= 2;
  return across;
}

// S = 1, R > 1: as many channels a block as its threads side by side have vectors, and some chunks
// of the samples' rows.
template <typename T, bool kBackward, bool kAligned>
__global__ void __launch_bounds__(kThreads, 2) sum_rows(SumsTask task) {
  using A = Arithmetic<T>;
  constexpr int kSize = kPack<T>;
  constexpr int kBatch = kBackward ? kRowPairsInFlight : kRowsInFlight<T>;
  // Padded so that threads that read neighbouring channels meet different banks.
  constexpr int kPlane = kThreads + 16 / kSize;
  // What is left to be added one after the other.
  constexpr int kLast = 8;
  __shared__ double shared[kSize * kPlane];
  // In shared memory, as they are needed once a chunk.
  __shared__ double own_sums[kThreads * 6];

  const int across = task.lanes, down = kThreads / across;
  const int column = threadIdx.x % across, row = threadIdx.x / across;
  const int64_t tile = static_cast<int64_t>(blockIdx.x) * across * kSize;
  const int64_t c = tile + column * kSize;
  const int width = c + kSize <= task.C ? kSize : c < task.C ? static_cast<int>(task.C - c) : 0;
  const T *x = static_cast<const T*>(task.x), *dy = static_cast<const T*>(task.dy);
  const Extent x_extent = task.extent<T>(x), dy_extent = task.extent<T>(dy);
  const auto load = [&](const T* from, const Extent& extent) {
    return kAligned || width == kSize ? load_values<T, kAligned>(from, extent)
                                      : load_some(from, width);
  };

  Center<A> center[kSize];
  if constexpr (kBackward) {
#pragma unroll
    for (int j = 0; j < kSize; ++j) {
      center[j] = j < width ? Center<A>::of(task.statistics[c + j]) : Center<A>{0, 0};
    }
  }

  // The first threads have a channel of the block's each, for what is done once a chunk.
  const int own = threadIdx.x;
  const bool owns = own < across * kSize && tile + own < task.C;
  put(ChannelSums(), own_sums + own * 6);

  const int64_t chunk_rows = static_cast<int64_t>(down) * kRowsPerThread;
  const int64_t end = task.unit_of_slice(blockIdx.y + 1);
  for (int64_t unit = task.unit_of_slice(blockIdx.y); unit < end; ++unit) {
    const int64_t sample = task.chunks == 1 ? unit : unit / task.chunks;
    const int64_t start = (unit - sample * task.chunks) * chunk_rows;
    const int n = static_cast<int>(task.R - start < chunk_rows ? task.R - start : chunk_rows);
    const int64_t at = (sample * task.R + start) * task.C;

    double first[kSize], second[kSize];
#pragma unroll
    for (int j = 0; j < kSize; ++j) first[j] = second[j] = 0;
    Words near = zero_words();
    if (!kBackward && width > 0) near = load(x + at + c, x_extent);
    for (int r = row; r < n && width > 0; r += down * kBatch) {
      Words xs[kBatch], dys[kBatch];
      int count = 0;
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const bool there = r + i * down < n;
        const int64_t from = at + static_cast<int64_t>(r + i * down) * task.C + c;
        count += there ? 1 : 0;
        if (there) xs[i] = load(x + from, x_extent);
        if (kBackward) dys[i] = there ? load(dy + from, dy_extent) : zero_words();
      }
#pragma unroll
      for (int j = 0; j < kSize; ++j) {
        A values[kBatch], gradients[kBatch];
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
          values[i] = i < count ? value_at<T>(xs[i], j) : value_at<T>(xs[0], j);
          if (kBackward) gradients[i] = value_at<T>(dys[i], j);
        }
        if constexpr (kBackward) {
          add_run(gradients, values, center[j], &first[j], &second[j]);
        } else {
          add_run(values, count, value_at<T>(near, j), &first[j], &second[j]);
        }
      }
    }

    double total[2] = {0, 0};
#pragma unroll
    for (int which = 0; which < 2; ++which) {
      __syncthreads();
#pragma unroll
      for (int j = 0; j < kSize; ++j) {
        shared[j * kPlane + threadIdx.x] = which ? second[j] : first[j];
      }
      int rows = down;
      for (; rows > kLast; rows /= 2) {
        __syncthreads();
        if (row < rows / 2) {
#pragma unroll
          for (int j = 0; j < kSize; ++j) {
            double* const place = shared + j * kPlane + threadIdx.x;
            *place += place[rows / 2 * across];
          }
        }
      }
      __syncthreads();
      if (owns) {
        const double* const place = shared + own % kSize * kPlane + own / kSize;
        for (int i = 0; i < rows; ++i) total[which] += place[i * across];
      }
    }
    if (owns) {
      ChannelSums sums = get_sums(own_sums + own * 6);
      if constexpr (kBackward) {
        sums.first.add(total[0]);
        sums.second.add(total[1]);
      } else {
        add_about<A>(n, widen(x[at + tile + own]), total[0], total[1], &sums.first, &sums.second);
      }
      put(sums, own_sums + own * 6);
    }
  }
  if (owns) task.to[(tile + own) * task.slices + blockIdx.y] = get_sums(own_sums + own * 6);
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
      if constexpr (kBackward) {
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
    task.to[c * task.slices + blockIdx.y] = sums;
  }
}

// sums[c] = the sum over the slices of channel c, by one warp.
__global__ void __launch_bounds__(kThreads)
    add_slices(int64_t C, int slices, const ChannelSums* parts, ChannelSums* sums) {
  const int lane = threadIdx.x % kWarp;
  const int64_t c = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / kWarp;
  ChannelSums total;
  if (c < C) {
    for (int i = lane; i < slices; i += kWarp) total.add(parts[c * slices + i]);
  }
  add_lanes(&total, kWarp);
  if (c < C && lane == 0) sums[c] = total;
}

}  // namespace gluon_syncbn

#endif  // GLUON_SYNCBN_CUDA_SUMS_CUH_
