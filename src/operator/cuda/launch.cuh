// Chooses and launches the kernels for a view: by its shape, by whether its arrays are aligned, and
// by how many blocks the device runs at a time. Only the shape of a sample may change bits.
#ifndef GLUON_SYNCBN_CUDA_LAUNCH_CUH_
#define GLUON_SYNCBN_CUDA_LAUNCH_CUH_

#include <cuda_runtime.h>

#include <algorithm>
#include <array>
#include <map>
#include <mutex>
#include <numeric>
#include <utility>

#include "cuda/elementwise.cuh"
#include "cuda/finish.cuh"
#include "cuda/plans.h"
#include "cuda/sums/planes.cuh"
#include "cuda/sums/rows.cuh"

#define SBN_LAUNCH(kernel, grid, stream, ...) \
  kernel<<<(grid), kThreads, 0, static_cast<cudaStream_t>(stream)>>>(__VA_ARGS__)

namespace gluon_syncbn {

// How many blocks of a kernel run at a time on a multiprocessor of the current device. Asks the
// runtime once for each device and kernel.
template <typename... Arguments>
int resident_blocks(void (*kernel)(Arguments...)) {
  static std::mutex mutex;
  static auto* const known = new std::map<std::pair<int, void (*)(Arguments...)>, int>;
  int device = 0;
  cudaGetDevice(&device);
  const std::lock_guard<std::mutex> lock(mutex);
  int& blocks = (*known)[{device, kernel}];
  const auto* const function = reinterpret_cast<const void*>(kernel);
  if (blocks == 0 && cudaOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, function, kThreads,
                                                                   0) != cudaSuccess) {
    // The launch will report it.
    cudaGetLastError();
  }
  return blocks = std::max(blocks, 1);
}

inline unsigned misaligned(const void* p) {
  return static_cast<unsigned>(reinterpret_cast<uintptr_t>(p) % 16);
}

inline dim3 blocks_for(int64_t threads) {
  return dim3(static_cast<unsigned>(std::max<int64_t>(1, divide_up(threads, kThreads))));
}

// The kernel of sums for a view, and its blocks.
template <typename T, int kArrays>
struct SumsPlan {
  enum Kind { kPlanes, kRows, kValues } kind;
  SumsTask task{};
  EpilogueTask<Arithmetic<T>> epilogue{};
  dim3 grid;

  SumsPlan(const View& v, int multiprocessors) : multiprocessors_(multiprocessors) {
    // Blocks that cover all channels, and units that a block takes at a time.
    int64_t blocks, at_once;
    task.N = v.N / v.R;
    task.C = v.C;
    task.S = v.S;
    task.R = v.R;
    task.lanes = task.split = 1;
    if (v.S > 1) {
      kind = kPlanes;
      split_planes(v.S);
      task.units = task.N * task.chunks;
    } else if (v.R > 1) {
      kind = kRows;
      while (task.lanes < kWarp && task.lanes * kPack<T> < v.C) task.lanes *= 2;
      task.down = kThreads / task.lanes;
      // For a small sample, few threads share a column, so that each has enough work.
      while (task.lanes == kWarp && task.down > kFewestRows &&
             task.down / 2 * kRowRuns * kRunRows >= v.R) {
        task.down /= 2;
      }
      task.chunk_size = task.down * kRowRuns * kRunRows;
      task.chunks = divide_up(v.R, task.chunk_size);
      task.units = task.N * task.chunks;
      blocks = divide_up(v.C, task.lanes * kPack<T>);
      at_once = kThreads / task.lanes / task.down;
    } else {
      kind = kValues;
      task.chunks = 1;
      task.units = task.N;
      blocks = divide_up(v.C, kWarp);
      at_once = 4 * kWarps;
    }
    const int64_t resident =
        int64_t{multiprocessors} * resident_blocks(kernel(row() % kPack<T> == 0));
    if (kind == kPlanes) share_blocks(resident, &blocks, &at_once);
    if (kind == kRows) blocks = split_shares(resident, blocks, divide_up(task.units, at_once));
    task.slices = static_cast<int>(choose_slices(blocks, resident, task.units, at_once));
    grid = dim3(static_cast<unsigned>(blocks), static_cast<unsigned>(task.slices));
  }

  // Chooses the threads for a channel: all of a block if there are units for them, or fewer if that
  // takes less time.
  void share_blocks(int64_t resident, int64_t* blocks, int64_t* at_once) {
    int most = kThreads;
    while (most / 2 >= task.lanes * task.units) most /= 2;
    int64_t least = 0;
    for (int across = most; across >= task.lanes; across /= 2) {
      const int64_t all = divide_up(task.C, kThreads / across), once = across / task.lanes;
      const int64_t slices = least == 0 ? choose_slices(all, resident, task.units, once) : 1;
      const int64_t time = time_of_slices(all, resident, task.units, once, slices);
      if (least != 0 && time >= least) continue;
      least = time;
      task.across = across;
      *blocks = all;
      *at_once = once;
    }
  }

  // Gives each run of rows a thread of its own, and so a block fewer columns, if the device runs
  // all of the blocks in two turns. Returns the blocks that cover all channels.
  int64_t split_shares(int64_t resident, int64_t blocks, int64_t turns) {
    const int lanes = task.lanes / kRowRuns;
    // Two lanes read a sector of 32 bytes.
    if (!kHasVariants || lanes < 2 || task.R <= task.down * kRunRows) return blocks;
    const int64_t more = divide_up(task.C, lanes * kPack<T>);
    if (more * turns > 2 * resident) return blocks;
    task.lanes = lanes;
    task.split = kRowRuns;
    return more;
  }

  // Chooses the chunks of a plane and the lanes for each, so that few lanes are idle. Depends only
  // on the size of a plane.
  void split_planes(int64_t S) {
    // Values that a lane loads at a time; the overhead per lane's share and per chunk, in values.
    constexpr int64_t kBatch = kRunVectors * kPack<T>, kShareCosts = 16, kChunkCosts = 24;
    // Fewer lanes would load less than a cache line at a time.
    constexpr int64_t kFewest = 4;
    int64_t least = 0;
    for (int lanes = 1; lanes <= kWarp; lanes *= 2) {
      const int64_t size = std::min<int64_t>(lanes * kPlaneShare<T>, S);
      const int64_t chunks = divide_up(S, size);
      if (lanes > 1 && lanes <= kFewest && lanes * kBatch <= S) least = 0;
      // A partial batch costs as much as two.
      const int64_t last = S - (chunks - 1) * size, batch = lanes * kBatch;
      const int64_t batches =
          (chunks - 1) * (size / batch) + divide_up(last, batch) + (last % batch != 0);
      const int64_t costs =
          lanes * (batches * kBatch + chunks * kShareCosts) + chunks * kChunkCosts;
      if (least != 0 && costs >= least) continue;
      least = costs;
      task.lanes = lanes;
      task.chunk_size = static_cast<int>(size);
      task.chunks = chunks;
    }
  }

  int64_t work_size() const { return task.slices > 1 ? task.slices * task.C : 0; }

  int run(ChannelSums* work, ChannelSums* sums, Stream stream) {
    task.sums = sums;
    task.work = work;
    const int64_t size = task.N * task.R * task.C * task.S;
    task.x_end = static_cast<const T*>(task.x) + size;
    task.dy_end = kArrays > 1 ? static_cast<const T*>(task.dy) + size : nullptr;
    epilogue.v_end = kArrays > 2 ? static_cast<const T*>(epilogue.v) + size : nullptr;
    const bool aligned = row() % kPack<T> == 0 && !misaligned(task.x) && !misaligned(task.dy) &&
                         !misaligned(epilogue.v);
    SBN_LAUNCH(kernel(aligned), grid, stream, task, epilogue);
    const int error = cudaGetLastError();
    if (error || task.slices == 1) return error;
    // Up to a warp per sum, but not more lanes than slices; a whole block if there are few sums.
    int lanes = 2;
    while (lanes < kWarp && lanes < task.slices) lanes *= 2;
    if (task.slices > kWarp && 2 * task.C <= multiprocessors_) lanes = kThreads;
    const dim3 added(static_cast<unsigned>(divide_up(2 * task.C, kThreads / lanes)));
    const Slices slices{reinterpret_cast<double*>(work), task.C, task.slices};
    SBN_LAUNCH(add_slices<>, added, stream, slices, lanes, sums);
    return cudaGetLastError();
  }

 private:
  // Few use float64, so it has only the kernels for any alignment.
  static constexpr bool kHasVariants = sizeof(T) < sizeof(double);

  int multiprocessors_;

  int64_t row() const { return task.S > 1 ? task.S : task.C; }

  auto kernel(bool aligned) const -> void (*)(SumsTask, EpilogueTask<Arithmetic<T>>) {
    if (kind == kValues) return sum_values<T, kArrays>;
    if constexpr (kHasVariants) {
      if (aligned) {
        return kind == kPlanes ? sum_planes<T, kArrays, true> : sum_rows<T, kArrays, true>;
      }
    }
    return kind == kPlanes ? sum_planes<T, kArrays, false> : sum_rows<T, kArrays, false>;
  }
};

// The plan for the current device, made once.
template <typename T, int kArrays>
SumsPlan<T, kArrays> plan_of(const View& v, int multiprocessors) {
  constexpr size_t kMost = 1000;
  using Key = std::array<int64_t, 6>;
  static std::mutex mutex;
  static auto* const known = new std::map<Key, SumsPlan<T, kArrays>>;
  int device = 0;
  cudaGetDevice(&device);
  const Key key{v.N, v.C, v.S, v.R, multiprocessors, device};
  const std::lock_guard<std::mutex> lock(mutex);
  auto found = known->find(key);
  if (found == known->end()) {
    // The shapes keep changing.
    if (known->size() >= kMost) known->clear();
    found = known->emplace(key, SumsPlan<T, kArrays>(v, multiprocessors)).first;
  }
  return found->second;
}

template <typename T>
int64_t work_size(const View& view, int multiprocessors) {
  return std::max({plan_of<T, 1>(view, multiprocessors).work_size(),
                   plan_of<T, 2>(view, multiprocessors).work_size(),
                   plan_of<T, 3>(view, multiprocessors).work_size()});
}

template <typename T>
int launch_forward_sums(const View& view, const void* x, ChannelSums* work, ChannelSums* sums,
                        int multiprocessors, Stream stream) {
  auto plan = plan_of<T, 1>(view, multiprocessors);
  plan.task.x = x;
  return plan.run(work, sums, stream);
}

template <typename A>
EpilogueTask<A> epilogue_of(const BackwardShard& p) {
  EpilogueTask<A> task{};
  task.activation = p.epilogue.activation;
  const bool activates = task.activation != Activation::kNone;
  task.slope = static_cast<A>(activates ? p.epilogue.slope : 1);
  task.inverse = static_cast<A>(p.from_y() ? 1 / p.epilogue.slope : 1);
  task.v = activates && p.y ? p.y : p.x;
  task.dresidual = p.dresidual;
  task.add_dresidual = p.dresidual && p.residual_mode == WriteMode::kAdd;
  return task;
}

template <typename T>
int launch_backward_sums(const BackwardShard& p, const ForBackward& kept, int64_t batch,
                         ChannelSums* work, ChannelSums* sums, int multiprocessors, Stream stream) {
  using A = Arithmetic<T>;
  const int64_t first = batch * p.view.C;
  const auto run = [&](auto plan) {
    plan.task.dy = p.dy;
    plan.task.x = p.from_y() ? p.y : p.x;
    plan.task.statistics = kept.used() + first;
    plan.epilogue = epilogue_of<A>(p);
    if (kept.gates) plan.epilogue.gates = static_cast<const Gate<A>*>(kept.gates) + first;
    return plan.run(work, sums, stream);
  };
  return p.epilogue.activation == Activation::kNone ? run(plan_of<T, 2>(p.view, multiprocessors))
                                                    : run(plan_of<T, 3>(p.view, multiprocessors));
}

template <typename T, typename F>
int launch_map(const View& view, MapTask task, EpilogueTask<Arithmetic<T>> epilogue,
               int multiprocessors, Stream stream) {
  constexpr int64_t kSize = kPack<T>, kMost = (int64_t{1} << 31) - 1;
  const int64_t sample = view.C * view.S;
  if (view.S > 1 && view.size() > kMost && sample <= kMost) {
    // Launches it in parts, as map_planes has 32-bit indices.
    View part = view;
    for (int64_t n = 0; n < view.N; n += part.N) {
      part.N = std::min(kMost / sample, view.N - n);
      const int error = launch_map<T, F>(part, task, epilogue, multiprocessors, stream);
      if (error) return error;
      const auto skip = [&](auto* array) {
        const auto next = reinterpret_cast<uintptr_t>(array) + part.size() * sizeof(T);
        return array ? reinterpret_cast<decltype(array)>(next) : array;
      };
      task.a = skip(task.a), task.b = skip(task.b), task.to = skip(task.to);
      epilogue.v = skip(epilogue.v), epilogue.dresidual = skip(epilogue.dresidual);
    }
    return 0;
  }
  task.C = view.C;
  task.S = view.S;
  task.size = view.size();
  // In place (`to` is an operand), no thread reads what another one writes, as `to` is then aligned
  // like its operand.
  const void* const to = task.to ? task.to : epilogue.dresidual;
  const auto fits = [&](const void* from) { return !from || misaligned(from) == misaligned(to); };
  const bool aligned = fits(task.a) && fits(task.b) && fits(epilogue.v);
  task.head = std::min<int64_t>((16 - misaligned(to)) % 16 / sizeof(T), task.size);
  task.vectors = (task.size - task.head) / kSize;
  if (task.size <= kMost) {
    task.by_S = Divider::by(view.S);
    task.by_C = Divider::by(view.C);
  }
  if (!aligned || (view.S > 1 && (view.S < kSize || task.size > kMost))) {
    SBN_LAUNCH((map_values<T, F>), blocks_for(task.size), stream, task, epilogue);
  } else if (view.S > 1) {
    constexpr int64_t kFull = int64_t{kThreads} * kVectorsPerThread<F>;
    task.per_block =
        static_cast<uint32_t>(task.vectors < kFull * multiprocessors ? kThreads : kFull);
    const int64_t threads = divide_up(task.vectors, int64_t{task.per_block}) * kThreads;
    SBN_LAUNCH((map_planes<T, F>), blocks_for(threads), stream, task, epilogue);
  } else {
    // The number of vectors after which the channels repeat.
    const int64_t period = view.C / std::gcd(view.C, kSize);
    const int64_t resident = resident_blocks(map_rows<T, F>);
    const int64_t most = std::max(resident * multiprocessors * kThreads, period);
    const int64_t threads = std::max(std::min(most, task.vectors) / period, int64_t{1}) * period;
    SBN_LAUNCH((map_rows<T, F>), blocks_for(threads), stream, task, epilogue, threads);
  }
  return cudaGetLastError();
}

template <typename T>
int launch_normalize(const ForwardShard& p, const void* coefficients, int multiprocessors,
                     Stream stream) {
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
  return p.residual
             ? launch_map<T, NormalizeSum<A>>(p.view, task, epilogue, multiprocessors, stream)
             : launch_map<T, Normalize<A>>(p.view, task, epilogue, multiprocessors, stream);
}

template <typename T>
int launch_input_gradient(const BackwardShard& p, const void* coefficients, int multiprocessors,
                          Stream stream) {
  using A = Arithmetic<T>;
  MapTask task{};
  task.a = p.dy;
  task.b = p.from_y() ? p.y : p.x;
  task.to = p.dx;
  task.add = p.dx && p.mode == WriteMode::kAdd;
  task.coefficients = coefficients;
  EpilogueTask<A> epilogue = epilogue_of<A>(p);
  if (!is_gated(p)) {
    return launch_map<T, InputGradient<A>>(p.view, task, epilogue, multiprocessors, stream);
  }
  if (p.dx && p.dresidual && misaligned(p.dx) != misaligned(p.dresidual)) {
    // Vectors can be aligned in one result only, so each result has a launch. dresidual comes
    // first, as dx may be dy.
    BackwardShard first = p;
    first.dx = nullptr;
    const int error = launch_input_gradient<T>(first, coefficients, multiprocessors, stream);
    if (error) return error;
    epilogue.dresidual = nullptr;
    epilogue.add_dresidual = false;
  }
  return launch_map<T, GatedGradient<A>>(p.view, task, epilogue, multiprocessors, stream);
}

// Enough for each kind of coefficients.
template <typename A>
int64_t coefficients_size(int64_t C) {
  return C * 16 * kCoefficientWords<GatedGradient<A>>;
}

template <typename T>
int launch_finish_forward(const ForwardFinish& task, const Deliveries& deliveries, Stream stream) {
  int64_t threads = task.C * task.batches;
  for (int i = 0; i < deliveries.size; ++i) {
    threads = std::max(threads, deliveries.items[i].period);
  }
  SBN_LAUNCH(finish_forward<Arithmetic<T>>, blocks_for(threads), stream, task, deliveries,
             kLargestZero<T>);
  return cudaGetLastError();
}

template <typename A>
int launch_finish_backward(const BackwardFinish& task, Stream stream) {
  SBN_LAUNCH(finish_backward<A>, blocks_for(task.C), stream, task);
  return cudaGetLastError();
}

}  // namespace gluon_syncbn

#endif  // GLUON_SYNCBN_CUDA_LAUNCH_CUH_
