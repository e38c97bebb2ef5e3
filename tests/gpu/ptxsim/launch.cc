#include <algorithm>
#include <cstring>
#include <numeric>

#include "warp.h"

namespace ptxsim {
namespace {

// 0 .. size - 1.
std::vector<unsigned> order_of(unsigned size) {
  std::vector<unsigned> order(size);
  std::iota(order.begin(), order.end(), 0u);
  return order;
}

// The blocks of a grid in the order in which they run. Of more than kWholeGrid, which only kernels
// without sums have, a part: the first, the last and some between them.
std::vector<unsigned> blocks_of(unsigned size, std::mt19937* random) {
  constexpr unsigned kWholeGrid = 1u << 16, kEnd = 34;
  std::vector<unsigned> order = order_of(size < kWholeGrid ? size : 2 * kEnd);
  if (size >= kWholeGrid) {
    for (unsigned i = 0; i < kEnd; ++i) order[kEnd + i] = size - kEnd + i;
    for (unsigned i = 1; i < kEnd; ++i) order.push_back(size / kEnd * i);
  }
  if (random) std::shuffle(order.begin(), order.end(), *random);
  return order;
}

class Runner {
 public:
  Runner(Block* block, std::mt19937* random)
      : block_(*block), random_(random), order_(order_of(block->launch.threads / kLanes)) {
    for (const unsigned index : order_) warps_.emplace_back(block, static_cast<int>(index));
  }

  void run(dim3 place) {
    block_.place = place;
    block_.shared.reset();
    for (Warp& warp : warps_) warp.start();
    do {
      if (random_) std::shuffle(order_.begin(), order_.end(), *random_);
      for (const unsigned index : order_) warps_[index].advance();
    } while (pass_barrier());
  }

 private:
  Block& block_;
  std::mt19937* const random_;
  std::vector<unsigned> order_;
  std::vector<Warp> warps_;

  // Returns whether there was one, and not all warps have ended.
  bool pass_barrier() {
    const auto waits = [](const Warp& warp) { return warp.waits_for_block(); };
    if (std::none_of(warps_.begin(), warps_.end(), waits)) return false;
    for (const Warp& warp : warps_) {
      if (!waits(warp)) warp.refuse("a barrier that not all threads reach", nullptr);
    }
    for (Warp& warp : warps_) warp.pass_barrier();
    block_.shared.pass_barrier();
    return true;
  }
};

uint64_t count_unique(std::vector<uint64_t>* values) {
  std::sort(values->begin(), values->end());
  return static_cast<uint64_t>(std::unique(values->begin(), values->end()) - values->begin());
}

}  // namespace

std::vector<char> parameters_of(const Kernel& kernel, void** arguments) {
  std::vector<char> values(static_cast<size_t>(kernel.parameters_size));
  for (size_t i = 0; i < kernel.parameters.size(); ++i) {
    const Kernel::Parameter& parameter = kernel.parameters[i];
    std::memcpy(values.data() + parameter.offset, arguments[i], parameter.size);
  }
  return values;
}

Counts run(const Launch& launch, const Memory& memory, std::mt19937* random) {
  if (launch.threads % kLanes)
    stop("a block has " + std::to_string(launch.threads) +
         " threads, which is not a number of whole warps");
  Block block{launch, memory, SharedMemory(launch.kernel.shared_size)};
  Runner runner(&block, random);
  const dim3& grid = launch.grid;
  for (const unsigned n : blocks_of(grid.x * grid.y, random)) {
    runner.run({n % grid.x, n / grid.x, 0});
  }
  block.counts.unique_load_sectors = count_unique(&block.loaded);
  block.counts.unique_store_sectors = count_unique(&block.stored);
  return block.counts;
}

}  // namespace ptxsim
