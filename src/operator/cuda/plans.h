// What the host computes for the kernels before it launches them: dividers, as GPUs divide integers
// slowly, and the number of blocks that share a channel.
#ifndef GLUON_SYNCBN_CUDA_PLANS_H_
#define GLUON_SYNCBN_CUDA_PLANS_H_

#include <algorithm>
#include <cstdint>

#include "numerics/sums.h"

namespace gluon_syncbn {

// Divides integers below 2^31 by a constant: a product and a shift.
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

// The time that `slices` blocks for each channel take, in turns of a block. A block processes
// `at_once` units per turn. `blocks` blocks cover all channels, and `resident` blocks run at a
// time.
inline int64_t time_of_slices(int64_t blocks, int64_t resident, int64_t units, int64_t at_once,
                              int64_t slices) {
  const int64_t turns = divide_up(divide_up(units, slices), at_once);
  // The start and end of a block take about as long as one turn. So does adding the slices.
  return divide_up(slices * blocks, resident) * (turns + 1) + (slices > 1);
}

// The smallest number of slices that minimizes that time, as their sums must be added.
inline int64_t choose_slices(int64_t blocks, int64_t resident, int64_t units, int64_t at_once) {
  constexpr int64_t kMaxWaves = 16;
  int64_t best = 1, least = time_of_slices(blocks, resident, units, at_once, 1);
  for (int64_t waves = 1; waves <= kMaxWaves; ++waves) {
    const int64_t most = std::max<int64_t>(1, waves * resident / blocks);
    const int64_t turns = divide_up(divide_up(units, std::min(most, units)), at_once);
    const int64_t slices = divide_up(units, turns * at_once);
    const int64_t time = time_of_slices(blocks, resident, units, at_once, slices);
    if (time < least) {
      least = time;
      best = slices;
    }
  }
  return best;
}

}  // namespace gluon_syncbn

#endif  // GLUON_SYNCBN_CUDA_PLANS_H_
