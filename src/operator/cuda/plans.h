// What the host decides for the kernels before it launches them.
#ifndef GLUON_SYNCBN_CUDA_PLANS_H_
#define GLUON_SYNCBN_CUDA_PLANS_H_

#include <algorithm>
#include <cstdint>

#include "numerics/shards.h"

namespace gluon_syncbn {

// Threads of a warp and of a block.
constexpr int kWarp = 32, kThreads = 256, kWarps = kThreads / kWarp;

// Divides integers below 2^31 by a constant: a product and a shift, as GPUs divide slowly.
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

  SBN_HOST_DEVICE uint32_t operator()(uint32_t n) const {
    return static_cast<uint32_t>((static_cast<uint64_t>(n) * multiplier) >> (31 + shift));
  }
};

inline int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Values of a vector: those of 16 bytes, of 8, or one, so that they divide a row.
inline int width_for(int64_t row, int bytes) {
  int width = 16 / bytes;
  while (row % width != 0) width = width * bytes > 8 ? 8 / bytes : 1;
  return width;
}

// Vectors of a run. Rows: runs of a thread in a chunk, and rows of a chunk if these are more, so
// that there are fewer records.
constexpr int kRun = 8, kRowRuns = 2, kFewestRows = 128;

// How samples are cut for the kernel of sums (sums.cuh). All that decides on bits follows from the
// shape of a sample:
//
// | | planes | rows | (N, C) data |
// | --- | --- | --- | --- |
// | a vector | of values of a channel | of channels | a channel |
// | across: vectors side by side | as lanes leave | enough for C, at most 32 channels | 32 |
// | lanes: threads of a chunk | enough for a run each | what across leaves | 1 |
// | a chunk | a run of each lane | 2 runs of each lane, at least 128 rows | a value |
struct SumsPlan {
  enum Kind { kPlanes, kRows, kValues } kind;
  // Lanes and across are powers of 2.
  int width, lanes = 1, log_across = 0;
  // Vectors of a sample's plane, or its rows; those of a chunk, at most. Chunks are about as large.
  int vectors = 1, chunk = 1;
  // Of `sample` values. Units: the chunks of all samples. Records: of a channel.
  int64_t C, S, sample, units, records;
  // Units of a warp: several if they are small, as its start takes as long as some vectors.
  uint32_t per_warp = 1, warps;
  Divider by_tiles, by_chunks;
  // Whether indices have 31 bits.
  bool fits;

  SumsPlan() = default;
  SumsPlan(const View& v, int bytes) : C(v.C), S(v.S), sample(v.R * v.C * v.S) {
    int64_t columns = C, chunks = 1;
    int across = kWarp;
    if (v.S > 1) {
      kind = kPlanes;
      width = width_for(S, bytes);
      vectors = static_cast<int>(S / width);
      while (lanes < kWarp && lanes * kRun < vectors) lanes *= 2;
      across = kWarp / lanes;
      chunks = divide_up(vectors, lanes * kRun);
    } else if (v.R > 1) {
      kind = kRows;
      width = width_for(C, bytes);
      vectors = static_cast<int>(v.R);
      columns = C / width;
      for (across = 1; across * width < kWarp && across < columns;) across *= 2;
      lanes = kWarp / across;
      chunks = divide_up(vectors, std::max(lanes * kRun * kRowRuns, kFewestRows));
    } else {
      kind = kValues;
      width = 1;
    }
    while (1 << log_across < across) ++log_across;
    chunk = static_cast<int>(divide_up(vectors, chunks));
    units = v.N / v.R * chunks;
    const int64_t of_lane = divide_up(chunk, lanes), tiles = divide_up(columns, across);
    if (of_lane < kRun) per_warp = static_cast<uint32_t>(2 * kRun / of_lane);
    if (kind == kValues) per_warp = kWarp;
    const int64_t slices = divide_up(units, per_warp);
    records = kind == kValues ? slices : units;
    warps = static_cast<uint32_t>(tiles * slices);
    fits = std::max({v.S, v.R, units, tiles * slices}) < int64_t{1} << 31;
    by_tiles = Divider::by(tiles);
    by_chunks = Divider::by(chunks);
  }

  // Of the records, in ChannelSums.
  int64_t work_size() const {
    constexpr int64_t kRecord = 4 * sizeof(double), kSums = sizeof(ChannelSums);
    return kind == kValues ? C * records : divide_up(C * records * kRecord, kSums);
  }
  // Threads that add the records of a channel: each has some, or a block has all.
  int fold_lanes() const {
    int lanes = 1;
    while (lanes < kWarp && 8 * lanes < records) lanes *= 2;
    return records > 16 * kWarp ? kThreads : lanes;
  }
};

}  // namespace gluon_syncbn

#endif  // GLUON_SYNCBN_CUDA_PLANS_H_
