// Passes float64 values through a store that adds float32: the bits of each value as three integers
// of 22 bits, which float32 holds exactly. The lowest thirds of all values come first, then the
// next ones.
#ifndef GLUON_SYNCBN_PROCESSES_THIRDS_H_
#define GLUON_SYNCBN_PROCESSES_THIRDS_H_

#include <cstdint>
#include <cstring>

namespace gluon_syncbn {

constexpr int kThirds = 3, kBitsPerThird = 22;

// thirds: (kThirds, n).
inline void to_thirds(const double* values, int64_t n, float* thirds) {
  constexpr uint64_t kMask = (uint64_t{1} << kBitsPerThird) - 1;
  for (int64_t i = 0; i < n; ++i) {
    uint64_t bits;
    std::memcpy(&bits, values + i, sizeof(bits));
    // Via int32_t, for whose conversion there are vector instructions.
    for (int third = 0; third < kThirds; ++third) {
      const uint64_t value = bits >> (third * kBitsPerThird) & kMask;
      thirds[third * n + i] = static_cast<float>(static_cast<int32_t>(value));
    }
  }
}

// The inverse, for each of `rows` rows of (kThirds, n).
inline void from_thirds(const float* thirds, int64_t rows, int64_t n, double* values) {
  for (int64_t row = 0; row < rows; ++row, thirds += kThirds * n, values += n) {
    for (int64_t i = 0; i < n; ++i) {
      uint64_t bits = 0;
      for (int third = 0; third < kThirds; ++third) {
        const auto value = static_cast<uint64_t>(static_cast<int32_t>(thirds[third * n + i]));
        bits |= value << (third * kBitsPerThird);
      }
      std::memcpy(values + i, &bits, sizeof(bits));
    }
  }
}

}  // namespace gluon_syncbn

#endif  // GLUON_SYNCBN_PROCESSES_THIRDS_H_
