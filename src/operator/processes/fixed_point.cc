// A packed message is the header, the count in limbs, the limbs of all sums, highest first, and for
// each sum whether bits of it were dropped. All processes read the same totals, so all decide alike
// whether to use them.
#include "processes/fixed_point.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace gluon_syncbn {
namespace {

// Window size in bits (minimum), headroom above the last magnitude, and the bits a sum needs when
// lower ones were dropped.
constexpr int kBits = 170, kHeadRoom = 24, kLeast = 106 + 16;
// Wider limbs would not reduce their number.
constexpr int kWidest = 43;
// Bits for the carry, at least. So up to 2^8 processes use the same width and message size.
constexpr int kCarry = 8;
// Magnitudes whose windows neither overflow nor underflow.
constexpr double kSmallest = 0x1p-800, kLargest = 0x1p900;
// Header before the limbs: the number of processes whose message does not fit, the step from the
// last call, and its square.
constexpr int kHeader = 3;
constexpr int kMantissa = 53;

int log2_up(int64_t n) {
  int bits = 0;
  while ((int64_t{1} << bits) < n) ++bits;
  return bits;
}

double power_of_two(int exponent) { return std::ldexp(1.0, exponent); }

// The power of two at or below a positive number.
double magnitude(double value) {
  uint64_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  bits &= uint64_t{0x7ff} << 52;
  std::memcpy(&value, &bits, sizeof(bits));
  return value;
}

// Returns an int, so that loops have no branches.
inline int differ(double a, double b) { return a != b; }

// Returns the multiple of `unit` nearest to *rest, and subtracts it from *rest exactly.
inline double take(double unit, double* rest) {
  const double shift = 0x1.8p52 * unit;
  const double taken = (*rest + shift) - shift;
  *rest -= taken;
  return taken;
}

}  // namespace

void add_message(const double* from, int64_t size, double* to) {
  to[1] += from[1];
  for (int64_t i = kCallSize; i < size; i += 3) {
    Sum3 sum{to[i], to[i + 1], to[i + 2]};
    sum.add(Sum3{from[i], from[i + 1], from[i + 2]});
    to[i] = sum.high;
    to[i + 1] = sum.middle;
    to[i + 2] = sum.low;
  }
}

Limbs Limbs::choose(int exact_bits, int processes) {
  const int width = std::min(kWidest, exact_bits - std::max(log2_up(processes), kCarry));
  return width < kCarry ? Limbs{} : Limbs{width, (kBits + width - 1) / width};
}

FixedPoint::FixedPoint(int64_t size, int processes, int exact_bits)
    : processes_(processes),
      limbs_(Limbs::choose(exact_bits, processes)),
      count_limbs_(limbs_.width ? (kMantissa + limbs_.width - 1) / limbs_.width : 0),
      longest_step_(std::floor(std::sqrt(power_of_two(std::min(exact_bits, 24)) / processes))) {
  if (!limbs_.width) return;
  const size_t sums = static_cast<size_t>(size - kCallSize) / 3;
  for (auto* values : {&windows_, &highs_, &middles_, &lows_}) values->assign(sums, 0.0);
  // Each sum has one more number, which is above 0 if a process has dropped some of its bits.
  packed_size_ = kHeader + count_limbs_ + static_cast<int64_t>(sums) * (limbs_.count + 1);
}

template <typename T>
void FixedPoint::pack(const double* message, T* packed) {
  const size_t n = sums();
  const double step = message[0] - call_, count = message[1];
  bool fits = std::abs(step) <= longest_step_ && count >= 0 && count < power_of_two(kMantissa);
  T* to = packed + kHeader;
  double rest = fits ? count : 0;
  for (int i = count_limbs_ - 1; i >= 0; --i) {
    const double unit = power_of_two(i * limbs_.width), limb = std::floor(rest / unit);
    *to++ = static_cast<T>(limb);
    rest -= limb * unit;
  }

  // Converts the sums to units of their windows, in which a part that is too small becomes zero.
  const double limit = power_of_two(limbs_.bits() - 1);
  T* const dropped = packed + packed_size_ - n;
  int outside = 0;
  for (size_t j = 0; j < n; ++j) {
    const double* const sum = message + kCallSize + 3 * j;
    double high = sum[0], middle = sum[1], low = sum[2];
    // Makes the parts non-overlapping.
    for (int i = 0; i < 2; ++i) {
      high = two_sum(high, middle, &middle);
      middle = two_sum(middle, low, &low);
    }
    const double window = windows_[j], inverse = window > 0 ? 1 / window : 0;
    highs_[j] = high * inverse;
    middles_[j] = middle * inverse;
    lows_[j] = low * inverse;
    // Negated to count NaN too. A nonzero sum without a window also counts.
    outside += !(std::abs(high) <= limit * window);
    dropped[j] =
        static_cast<T>(differ(highs_[j] * window, high) | differ(middles_[j] * window, middle) |
                       differ(lows_[j] * window, low));
  }
  fits = fits && outside == 0;
  packed[0] = static_cast<T>(!fits);
  packed[1] = static_cast<T>(fits ? step : 0);
  packed[2] = static_cast<T>(fits ? step * step : 0);
  if (!fits) {
    std::fill(packed + kHeader, packed + packed_size_, T(0));
    return;
  }
  for (int i = limbs_.count - 1; i >= 0; --i, to += n) {
    const double unit = power_of_two(i * limbs_.width), inverse = 1 / unit;
    for (size_t j = 0; j < n; ++j) {
      const double taken =
          take(unit, &highs_[j]) + take(unit, &middles_[j]) + take(unit, &lows_[j]);
      to[j] = static_cast<T>(taken * inverse);
    }
  }
  for (size_t j = 0; j < n; ++j) {
    dropped[j] +=
        static_cast<T>(differ(highs_[j], 0) | differ(middles_[j], 0) | differ(lows_[j], 0));
  }
}

template <typename T>
bool FixedPoint::unpack(const T* packed, double* message) {
  const double misfits = packed[0], steps = packed[1], squares = packed[2];
  // By Cauchy-Schwarz, the second condition holds unless all steps are equal.
  if (misfits != 0 || processes_ * squares != steps * steps) return false;
  const size_t n = sums();
  const T* from = packed + kHeader;
  double count = 0;
  for (int i = count_limbs_ - 1; i >= 0; --i) {
    count += static_cast<double>(*from++) * power_of_two(i * limbs_.width);
  }
  for (auto* values : {&highs_, &middles_, &lows_}) std::fill(values->begin(), values->end(), 0.0);
  for (int i = limbs_.count - 1; i >= 0; --i, from += n) {
    const double unit = power_of_two(i * limbs_.width);
    for (size_t j = 0; j < n; ++j) {
      Sum3 sum{highs_[j], middles_[j], lows_[j]};
      sum.add(static_cast<double>(from[j]) * unit);
      highs_[j] = sum.high;
      middles_[j] = sum.middle;
      lows_[j] = sum.low;
    }
  }
  const double least = power_of_two(kLeast);
  int too_low = 0;
  for (size_t j = 0; j < n; ++j) {
    const int is_low = std::abs(highs_[j] + middles_[j]) < least;
    too_low += is_low & differ(from[j], 0);
  }
  if (too_low) return false;
  call_ += steps / processes_;
  message[0] = call_;
  message[1] = count;
  for (size_t j = 0; j < n; ++j) {
    double* const sum = message + kCallSize + 3 * j;
    sum[0] = highs_[j] *= windows_[j];
    sum[1] = middles_[j] *= windows_[j];
    sum[2] = lows_[j] * windows_[j];
  }
  move_windows();
  return true;
}

void FixedPoint::move_windows() {
  const double lowest = power_of_two(1 + kHeadRoom - limbs_.bits() + 1);
  for (size_t j = 0; j < sums(); ++j) {
    const double value = std::abs(highs_[j] + middles_[j]);
    // A sum of zero, infinity or NaN leaves its window where it is.
    if (value >= kSmallest && value <= kLargest) windows_[j] = magnitude(value) * lowest;
  }
}

void FixedPoint::follow(const double* messages) {
  const size_t n = sums(), size = kCallSize + 3 * n;
  call_ = messages[0];
  std::vector<double> total(messages, messages + size);
  for (int rank = 1; rank < processes_; ++rank) {
    add_message(messages + size * rank, static_cast<int64_t>(size), total.data());
  }
  for (size_t j = 0; j < n; ++j) {
    highs_[j] = total[kCallSize + 3 * j];
    middles_[j] = total[kCallSize + 3 * j + 1];
  }
  move_windows();
  ready_ = true;
}

template void FixedPoint::pack(const double*, float*);
template void FixedPoint::pack(const double*, double*);
template bool FixedPoint::unpack(const float*, double*);
template bool FixedPoint::unpack(const double*, double*);

}  // namespace gluon_syncbn
