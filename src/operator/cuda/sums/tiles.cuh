// Sums over small unaligned planes, through shared memory. A warp loads several planes as one
// contiguous array, in aligned vectors; then each lane reads consecutive values of one plane.
#ifndef GLUON_SYNCBN_CUDA_SUMS_TILES_CUH_
#define GLUON_SYNCBN_CUDA_SUMS_TILES_CUH_

#include "cuda/sums/chunks.cuh"

namespace gluon_syncbn {

// Shared memory per warp and array, in bytes: for x, or for dy and x.
template <int kArrays>
constexpr int kTileBytes = kArrays == 1 ? 4608 : 2048;
// Values of a run, in chains.
template <typename T>
constexpr int kTileRun = sizeof(T) == sizeof(double) ? 4 : 16;
constexpr int kTileChains = 4;
// The values that fit, less those that may precede them in their first 16 bytes, and those after
// them that a thread reads but does not use.
template <typename T, int kArrays>
constexpr int kTileValues =
    kTileBytes<kArrays> / static_cast<int>(sizeof(T)) - (kPack<T> - 1) - kTileChains;
// Resident blocks per multiprocessor, limited by registers.
constexpr int kTileBlocks = 2;

// Contiguous values at any address, which are copied through registers to shared memory.
template <typename T, int kBytes>
struct Tile {
  static constexpr int kVectors = (kBytes / 16 + kWarp - 1) / kWarp;
  const T* from;
  int size, shift, vectors;
  bool inside;
  Words words[kVectors];

  // Starts the loads of `size` values at `from` by all lanes.
  SBN_DEVICE static Tile load(const T* from, int size, const Extent& array, int lane) {
    Tile tile;
    tile.from = from;
    tile.size = size;
    tile.shift = static_cast<int>(misalignment(from) / sizeof(T));
    tile.vectors =
        static_cast<int>(static_cast<unsigned>(tile.shift + size + kPack<T> - 1) / kPack<T>);
    const T* const begin = from - tile.shift;
    // False only at the ends of the array.
    tile.inside = begin >= array.begin && begin + tile.vectors * kPack<T> <= array.end;
    if (!tile.inside) return tile;
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const int v = lane + i * kWarp;
      if (v < tile.vectors) tile.words[i] = load_words(begin + v * kPack<T>);
    }
    return tile;
  }

  // The first value is written to to[shift].
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

// Reads the values of a tile, starting at a given one. 16-bit values are read in pairs.
template <typename T>
struct TileReader {
  const T* values;

  SBN_DEVICE TileReader(const T* tile, int at) : values(tile + at) {}

  // Values i, ..., i + kCount - 1.
  template <int kCount>
  SBN_DEVICE void read(int i, Arithmetic<T> (&to)[kCount]) const {
#pragma unroll
    for (int k = 0; k < kCount; ++k) to[k] = widen(values[i + k]);
  }
};
template <typename T>
struct PairReader {
  const uint32_t* words;
  unsigned bits;

  SBN_DEVICE PairReader(const T* tile, int at)
      : words(reinterpret_cast<const uint32_t*>(tile) + static_cast<unsigned>(at) / 2),
        bits(static_cast<unsigned>(at) % 2 * 16) {}

  // i and kCount are even.
  template <int kCount>
  SBN_DEVICE void read(int i, float (&to)[kCount]) const {
    const uint32_t* const from = words + static_cast<unsigned>(i) / 2;
#pragma unroll
    for (int k = 0; k < kCount; k += 2) {
      const uint32_t pair = __funnelshift_r(from[k / 2], from[k / 2 + 1], bits);
      widen_pair(T{}, pair, &to[k], &to[k + 1]);
    }
  }
};
template <>
struct TileReader<Half> : PairReader<Half> {
  using PairReader::PairReader;
};
template <>
struct TileReader<BFloat16> : PairReader<BFloat16> {
  using PairReader::PairReader;
};

// S > 1, small unaligned planes: a warp copies the contiguous planes of `kWarp / lanes` channels of
// a sample to shared memory. `lanes` threads per plane have `chunk_size` consecutive values each.
// `down` warps share the samples of a tile.
template <typename T, int kArrays>
__global__ void __launch_bounds__(kThreads, kTileBlocks)
    sum_tiles(SumsTask task, EpilogueTask<Arithmetic<T>> epilogue) {
  using A = Arithmetic<T>;
  constexpr bool kBackward = kArrays > 1, kGated = kArrays > 2;
  constexpr int kBytes = kTileBytes<kArrays>, kTiles = kBackward ? 2 : 1;
  constexpr int kTile = kBytes / static_cast<int>(sizeof(T));
  alignas(16) __shared__ Words shared[kTiles * kWarps * kBytes / sizeof(Words)];
  // In shared memory, as in sum_planes.
  __shared__ double own_sums[kThreads * kOwnWords];
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  T* const x_tile = reinterpret_cast<T*>(shared) + warp * kTiles * kTile;
  T* const dy_tile = x_tile + (kBackward ? kTile : 0);

  const auto lanes = PowerOf2::of(task.lanes), warps = PowerOf2::of(task.down);
  const int across = kWarp / lanes;
  const int plane = lane / lanes, lane_of_plane = lane % lanes;
  const auto tile_of = [&](int warp_of_block) {
    return (static_cast<int64_t>(blockIdx.x) * (kWarps / warps) + warp_of_block / warps) * across;
  };
  const int64_t tile = tile_of(warp), c = tile + plane;
  const int planes = tile + across <= task.C ? across : static_cast<int>(task.C - tile);
  const T *x = static_cast<const T*>(task.x), *dy = static_cast<const T*>(task.dy);
  [[maybe_unused]] const T* const v = static_cast<const T*>(epilogue.v);
  const bool reads_v = kGated && epilogue.v != task.x;

  Center<A> center{0, 0};
  // The slopes are taken from `epilogue`, to save registers.
  [[maybe_unused]] A sign = 0, threshold = 0;
  if constexpr (kBackward) {
    if (plane < planes) {
      center = Center<A>::of(task.statistics[c]);
      if constexpr (kGated) {
        const Gate<A> gate = epilogue.gates[c];
        sign = gate.sign;
        threshold = gate.threshold;
      }
    }
  }
  ChunkBuffer<A, kBackward> buffer(own_sums + threadIdx.x * kOwnWords, lanes, lane);

  const int n = static_cast<int>(task.S), share_size = task.chunk_size;
  const int64_t first = task.unit_of_slice(blockIdx.y) + warp % warps;
  int64_t at = (first * task.C + tile) * task.S;
  int samples = planes > 0 ? static_cast<int>(task.unit_of_slice(blockIdx.y + 1) - first) : 0;
  for (; samples > 0; samples -= warps, at += warps * task.C * task.S) {
    using Loads = Tile<T, kBytes>;
    const int begin = plane * n + lane_of_plane * share_size;
    const int left = plane < planes ? n - lane_of_plane * share_size : 0;
    const int count = left < 0 ? 0 : left < share_size ? left : share_size;
    // Bit i is 1 where v opens the gates of value i. v uses the shared memory of x.
    [[maybe_unused]] uint64_t open = 0;
    if constexpr (kGated) {
      if (reads_v) {
        const Loads v_loads = Loads::load(v + at, planes * n, {epilogue.v, epilogue.v_end}, lane);
        __syncwarp();
        v_loads.put(x_tile, lane);
        __syncwarp();
        for (int i = 0; i < count; ++i) {
          const bool is_open = widen(x_tile[v_loads.shift + begin + i]) * sign > threshold;
          open |= static_cast<uint64_t>(is_open ? 1 : 0) << i;
        }
      }
    }
    const Loads x_loads = Loads::load(x + at, planes * n, {task.x, task.x_end}, lane);
    const Loads dy_loads =
        kBackward ? Loads::load(dy + at, planes * n, {task.dy, task.dy_end}, lane) : x_loads;
    // All lanes have read what was there before.
    __syncwarp();
    x_loads.put(x_tile, lane);
    if constexpr (kBackward) dy_loads.put(dy_tile, lane);
    __syncwarp();
    const int x_at = x_loads.shift + begin, dy_at = kBackward ? dy_loads.shift + begin : 0;
    // Turns value i and its gradient into those that are summed.
    const auto gate = [&](int i, A* value, A* gradient) {
      if constexpr (kArrays > 2) {
        const bool is_open = reads_v ? open >> i & 1 : *value * sign > threshold;
        *gradient = Gate<A>{0, 0, epilogue.slope}.of(*gradient, is_open);
        *value = InverseGate<A>{0, 0, epilogue.inverse}.of(*value, is_open);
      }
    };

    Chunk<A> chunk;
    chunk.origin = center.mean;
    if (plane < planes) {
      chunk.n = n;
      if constexpr (!kBackward) {
        const T* const values = x_tile + x_loads.shift + plane * n;
        chunk.origin =
            origin_of(widen(values[0]), widen(values[(n - 1) / 2]), widen(values[n - 1]));
      }
    }
    const TileReader<T> xs(x_tile, x_at), dys(dy_tile, dy_at);
    for (int j = 0; j < count;) {
      Run<A, kTileChains> run;
#pragma unroll
      for (int part = 0; part < kTileRun<T>; part += kTileChains) {
        if (part > 0 && j >= count) break;
        A values[kTileChains], gradients[kTileChains] = {};
        xs.read(j, values);
        if constexpr (kBackward) dys.read(j, gradients);
        const auto add = [&](int i, bool exists) {
          A value = values[i], gradient = gradients[i];
          gate(j + i, &value, &gradient);
          value = exists ? value - chunk.origin : A{0};
          run.add(i, part == 0, !kBackward ? value : exists ? gradient : A{0}, value);
        };
        if (j + kTileChains <= count) {
#pragma unroll
          for (int i = 0; i < kTileChains; ++i) add(i, true);
        } else {
#pragma unroll
          for (int i = 0; i < kTileChains; ++i) add(i, j + i < count);
        }
        j += kTileChains;
      }
      run.add_to(&chunk.sums);
    }

    buffer.add(chunk, center, lanes, samples <= warps, [&](const auto& f) {
#pragma unroll 1
      for (int i = 0; i < count; ++i) {
        A value = widen(x_tile[x_at + i]);
        if constexpr (kArrays > 1) {
          A gradient = widen(dy_tile[dy_at + i]);
          gate(i, &value, &gradient);
          f(gradient, value);
        } else {
          f(value);
        }
      }
    });
  }
  // Computed again, so that no register holds it meanwhile.
  const int thread = thread_read_again();
  buffer.finish(lanes, warps, task, tile_of(thread / kWarp) + thread % kWarp / lanes);
}

}  // namespace gluon_syncbn

#endif  // GLUON_SYNCBN_CUDA_SUMS_TILES_CUH_
