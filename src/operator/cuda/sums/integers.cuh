// Integers of several words, and powers of 2 to scale them with.
#ifndef GLUON_SYNCBN_CUDA_SUMS_INTEGERS_CUH_
#define GLUON_SYNCBN_CUDA_SUMS_INTEGERS_CUH_

#include "cuda/sums/runs.cuh"

namespace gluon_syncbn {

// |x| < 2^(exponent_of(x) + 1); 128 if x is infinite or not a number.
SBN_DEVICE int exponent_of(float x) { return static_cast<int>(bits_of_float(x) >> 23 & 255) - 127; }
// Exponents from -126 to 127.
SBN_DEVICE float power_of_2(int exponent) {
  return float_of_bits(static_cast<uint32_t>(exponent + 127) << 23);
}
SBN_DEVICE double double_power_of_2(int exponent) {
  const uint64_t bits = static_cast<uint64_t>(exponent + 1023) << 52;
  double power;
  memcpy(&power, &bits, sizeof(power));
  return power;
}

// The same sum, of three doubles whose bits do not overlap.
SBN_DEVICE Sum3 without_overlap(const Sum3& sum) {
  Sum3 result;
  double rest;
  result.high = two_sum(sum.high, sum.middle, &rest);
  result.middle = two_sum(rest, sum.low, &result.low);
  result.high = two_sum(result.high, result.middle, &result.middle);
  return result;
}

// A signed integer of kWords words.
template <int kWords>
struct Integer {
  uint64_t words[kWords] = {};

  SBN_DEVICE static Integer of(int64_t value) {
    Integer result;
    result.words[0] = static_cast<uint64_t>(value);
#pragma unroll
    for (int i = 1; i < kWords; ++i) result.words[i] = static_cast<uint64_t>(value >> 63);
    return result;
  }
  SBN_DEVICE static Integer<2> product(int64_t a, int64_t b) {
    return {{static_cast<uint64_t>(a) * static_cast<uint64_t>(b),
             static_cast<uint64_t>(__mul64hi(a, b))}};
  }
  // The same number, in no fewer words.
  template <int kMore>
  SBN_DEVICE Integer<kMore> widened() const {
    // Their sign.
    auto result = Integer<kMore>::of(static_cast<int64_t>(words[kWords - 1]) >> 63);
#pragma unroll
    for (int i = 0; i < kWords; ++i) result.words[i] = words[i];
    return result;
  }

  SBN_DEVICE void add(const Integer& other) {
    uint64_t carry = 0;
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      const uint64_t partial = words[i] + other.words[i], sum = partial + carry;
      carry = (partial < words[i] ? 1 : 0) | (sum < partial ? 1 : 0);
      words[i] = sum;
    }
  }

  // Times 2^shift, for a shift of less than 64.
  SBN_DEVICE Integer shifted(int shift) const {
    Integer result;
    result.words[0] = words[0] << shift;
#pragma unroll
    for (int i = 1; i < kWords; ++i) {
      result.words[i] = words[i] << shift | words[i - 1] >> 1 >> (63 - shift);
    }
    return result;
  }

  SBN_DEVICE Integer from_lane(int mask) const {
    Integer result;
#pragma unroll
    for (int i = 0; i < kWords; ++i) result.words[i] = __shfl_xor_sync(kAllLanes, words[i], mask);
    return result;
  }

  // This times 2^exponent. Words are split into doubles, which takes fewer instructions than adding
  // them.
  SBN_DEVICE Sum3 times_power_of_2(int exponent) const {
    constexpr int kBits = 53;
    constexpr uint64_t kMask = (uint64_t{1} << kBits) - 1;
    const bool is_negative = static_cast<int64_t>(words[kWords - 1]) < 0;
    uint64_t carry = is_negative ? 1 : 0, magnitude[3] = {};
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      magnitude[i] = (is_negative ? ~words[i] : words[i]) + carry;
      carry = carry && magnitude[i] == 0 ? 1 : 0;
    }
    const auto scaled = [&](uint64_t bits, int at) {
      const double power = double_power_of_2(exponent + at);
      return static_cast<double>(bits) * (is_negative ? -power : power);
    };
    Sum3 sum;
    sum.low = scaled(magnitude[0] & kMask, 0);
    sum.middle = scaled((magnitude[0] >> kBits | magnitude[1] << (64 - kBits)) & kMask, kBits);
    sum.high = scaled(
        (magnitude[1] >> (2 * kBits - 64) | magnitude[2] << (128 - 2 * kBits)) & kMask, 2 * kBits);
    sum = without_overlap(sum);
    const uint64_t rest = magnitude[2] >> (3 * kBits - 128);
    if (kWords > 2 && rest) sum.add(scaled(rest, 3 * kBits));
    return sum;
  }
};

}  // namespace gluon_syncbn

#endif  // GLUON_SYNCBN_CUDA_SUMS_INTEGERS_CUH_
