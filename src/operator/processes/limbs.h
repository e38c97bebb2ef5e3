// Passes float64 values through a store that adds float32: each value as three limbs, integers of
// 22 bits, which float32 holds exactly. The lowest limbs of all values come first, then the next
// ones. (Limbs of fixed_point.h cut sums, not the bits of a double.)
#ifndef GLUON_SYNCBN_PROCESSES_LIMBS_H_
#define GLUON_SYNCBN_PROCESSES_LIMBS_H_

#include <cstdint>
#include <cstring>

namespace gluon_syncbn {

constexpr int kLimbs = 3, kBitsPerLimb = 22;

// limbs: (kLimbs, n).
inline void to_limbs(const double* values, int64_t n, float* limbs) {
  constexpr uint64_t kMask = (uint64_t{1} << kBitsPerLimb) - 1;
  for (int64_t i = 0; i < n; ++i) {
    uint64_t bits;
    std::memcpy(&bits, values + i, sizeof(bits));
    // Via int32_t, for whose conversion there are vector instructions.
    for (int limb = 0; limb < kLimbs; ++limb) {
      const uint64_t value = bits >> (limb * kBitsPerLimb) & kMask;
      limbs[limb * n + i] = static_cast<float>(static_cast<int32_t>(value));
    }
  }
}

// The inverse, for each of `rows` rows of (kLimbs, n).
inline void from_limbs(const float* limbs, int64_t rows, int64_t n, double* values) {
  for (int64_t row = 0; row < rows; ++row, limbs += kLimbs * n, values += n) {
    for (int64_t i = 0; i < n; ++i) {
      uint64_t bits = 0;
      for (int limb = 0; limb < kLimbs; ++limb) {
        const auto value = static_cast<uint64_t>(static_cast<int32_t>(limbs[limb * n + i]));
        bits |= value << (limb * kBitsPerLimb);
      }
      std::memcpy(values + i, &bits, sizeof(bits));
    }
  }
}

}  // namespace gluon_syncbn

#endif  // GLUON_SYNCBN_PROCESSES_LIMBS_H_
