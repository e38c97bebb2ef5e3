// The 16-bit types, over all their values.
#include <cmath>
#include <limits>
#include <string>

#if defined(__SSE__)
#include <xmmintrin.h>
#endif

#include "check.h"
#include "numerics/formulas.h"
#include "numerics/half.h"

namespace gluon_syncbn {
namespace {

// A format of IEEE 754: exponents are biased by half their range, and the largest is for infinities
// and NaN.
template <typename T, int kExponent, int kFraction>
struct Format {
  using Type = T;
  static constexpr int kBias = (1 << (kExponent - 1)) - 1;
  static constexpr uint16_t kSign = 0x8000;
  static constexpr uint16_t kInfinity = ((1 << kExponent) - 1) << kFraction;
  static constexpr uint16_t kQuiet = 1 << (kFraction - 1);

  static bool is_nan(uint16_t bits) { return (bits & ~kSign) > kInfinity; }

  // The value of a finite number, in double.
  static double value(uint16_t bits) {
    const int exponent = (bits & ~kSign) >> kFraction, fraction = bits & ((1 << kFraction) - 1);
    const int significand = exponent ? fraction | 1 << kFraction : fraction;
    const double size = std::ldexp(significand, (exponent ? exponent : 1) - kBias - kFraction);
    return bits & kSign ? -size : size;
  }

  static float widened(uint16_t bits) { return widen(T{bits}); }

  static uint16_t narrowed(float x) {
    T result;
    narrow(x, &result);
    return result.bits;
  }
};

using HalfFormat = Format<Half, 5, 10>;
using BFloat16Format = Format<BFloat16, 8, 7>;

template <typename F>
void widening_is_exact_and_narrowing_reverts_it() {
  int wrong_values = 0, wrong_signs = 0, wrong_ways_back = 0;
  for (int i = 0; i < 1 << 16; ++i) {
    const auto bits = static_cast<uint16_t>(i);
    const float x = F::widened(bits);
    wrong_signs += std::signbit(x) != ((bits & F::kSign) != 0);
    if (F::is_nan(bits)) {
      // A signaling NaN becomes quiet, at the latest when it is narrowed.
      wrong_values += !std::isnan(x);
      wrong_ways_back += F::narrowed(x) != (bits | F::kQuiet);
      continue;
    }
    const bool infinite = (bits & ~F::kSign) == F::kInfinity;
    wrong_values += infinite ? !std::isinf(x) : double{x} != F::value(bits);
    wrong_ways_back += F::narrowed(x) != bits;
  }
  CHECK_EQ(wrong_values, 0);
  CHECK_EQ(wrong_signs, 0);
  CHECK_EQ(wrong_ways_back, 0);
}

// Between two neighbours, the middle is rounded to the even one, all others to the nearer one.
// After the largest number comes infinity, in the place of one more number.
template <typename F>
void narrowing_rounds_to_nearest_even() {
  const float infinity = std::numeric_limits<float>::infinity();
  int wrong = 0;
  for (uint16_t bits = 0; bits < F::kInfinity; ++bits) {
    const uint16_t next = bits + 1, even = bits % 2 ? next : bits;
    const double middle = (F::value(bits) + F::value(next)) / 2;
    const float x = static_cast<float>(middle);
    wrong += double{x} != middle;
    const float below = std::nextafter(x, -infinity), above = std::nextafter(x, infinity);
    wrong += F::narrowed(below) != bits || F::narrowed(above) != next || F::narrowed(x) != even;
    wrong += F::narrowed(-below) != (bits | F::kSign) || F::narrowed(-above) != (next | F::kSign) ||
             F::narrowed(-x) != (even | F::kSign);
  }
  CHECK_EQ(wrong, 0);
  const float largest = static_cast<float>(F::value(F::kInfinity - 1));
  for (const float x :
       {1.25f * largest, 2 * largest, std::numeric_limits<float>::max(), infinity}) {
    CHECK_EQ(F::narrowed(x), F::kInfinity);
    CHECK_EQ(F::narrowed(-x), F::kInfinity | F::kSign);
  }
  for (const float x : {0.0f, std::numeric_limits<float>::denorm_min()}) {
    CHECK_EQ(F::narrowed(x), 0);
    CHECK_EQ(F::narrowed(-x), F::kSign);
  }
  CHECK_EQ(kLargestZero<typename F::Type>, static_cast<float>(F::value(1) / 2));
}

// Also if narrowing removes all bits that distinguish it from infinity.
template <typename F>
void nan_stays_nan() {
  for (const uint32_t fraction : {1u, 0x1fffu, 0x2000u, 0x7fffu, 0x10000u, 0x3fffffu, 0x7fffffu}) {
    for (const uint32_t sign : {0u, 0x80000000u}) {
      const uint16_t result = F::narrowed(float_of_bits(0x7f800000u | fraction | sign));
      CHECK(F::is_nan(result) && (result & F::kQuiet));
      CHECK_EQ((result & F::kSign) != 0, sign != 0);
    }
  }
}

template <typename F>
void check_format(const std::string& name) {
  check::context = name;
  widening_is_exact_and_narrowing_reverts_it<F>();
  narrowing_rounds_to_nearest_even<F>();
  nan_stays_nan<F>();
}

TEST(both_formats) {
  check_format<HalfFormat>("float16");
  check_format<BFloat16Format>("bfloat16");
}

#if defined(__SSE__)
// As some libraries set the processor when they are loaded. Subnormal halves are normal floats.
TEST(halves_do_not_depend_on_the_modes_of_subnormal_floats) {
  constexpr unsigned kFlushToZero = 0x8000, kDenormalsAreZero = 0x40;
  const unsigned before = _mm_getcsr();
  for (const unsigned mode : {kFlushToZero, kDenormalsAreZero, kFlushToZero | kDenormalsAreZero}) {
    _mm_setcsr(before | mode);
    check_format<HalfFormat>("float16, MXCSR " + std::to_string(mode));
  }
  _mm_setcsr(before);
}
#endif

}  // namespace
}  // namespace gluon_syncbn

int main() { return check::run_all("half"); }
