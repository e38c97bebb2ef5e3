// float64 on its way through a store that adds float32: three whole numbers of 22 bits each, which
// float32 holds exactly. First the lowest bits of all values, then the next.
#ifndef GLUON_SYNCBN_EXCHANGE_LIMBS_H_
#define GLUON_SYNCBN_EXCHANGE_LIMBS_H_

#include <cstdint>
#include <cstring>

namespace gluon_syncbn {

constexpr int kParts = 3, kBitsPerPart = 22;

// parts: (kParts, n).
inline void split(const double* values, int64_t n, float* parts) {
  constexpr uint64_t kMask = (uint64_t{1} << kBitsPerPart) - 1;
  for (int64_t i = 0; i < n; ++i) {
    uint64_t bits;
    std::memcpy(&bits, values + i, sizeof(bits));
    // By way of int32_t, for which there are vector instructions.
    for (int part = 0; part < kParts; ++part) {
      const uint64_t value = bits >> (part * kBitsPerPart) & kMask;
      parts[part * n + i] = static_cast<float>(static_cast<int32_t>(value));
    }
  }
}

// The inverse, for so many rows of (kParts, n).
inline void join(const float* parts, int64_t rows, int64_t n, double* values) {
  for (int64_t row = 0; row < rows; ++row, parts += kParts * n, values += n) {
    for (int64_t i = 0; i < n; ++i) {
      uint64_t bits = 0;
      for (int part = 0; part < kParts; ++part) {
        const auto value = static_cast<uint64_t>(static_cast<int32_t>(parts[part * n + i]));
        bits |= value << (part * kBitsPerPart);
      }
      std::memcpy(values + i, &bits, sizeof(bits));
    }
  }
}

}  // namespace gluon_syncbn

#endif  // GLUON_SYNCBN_EXCHANGE_LIMBS_H_
