// The formulas of batch normalization (Ioffe and Szegedy 2015), for host and device. Sums run over
// all M = N * S values of a channel, on all devices:
//
// - mean = sum(x) / M
// - variance = sum(x^2) / M - mean^2
// - inv_std = 1 / sqrt(variance + epsilon)
// - y = (x - mean) * inv_std * gamma + beta
// - dbeta = sum(dy)
// - dgamma = sum(dy * (x - mean)) * inv_std
// - dx = (dy - sum(dy) / M - (x - mean) * inv_std^2 * sum(dy * (x - mean)) / M) * gamma * inv_std
//
// With an activation or a residual, y = activation((x - mean) * inv_std * gamma + beta + residual),
// and dy above stands for the gradient of the activation's argument, which is that of the residual.
//
// If no device has data (M = 0), y = x * gamma + beta and dx = dy * gamma.
#ifndef GLUON_SYNCBN_NUMERICS_FORMULAS_H_
#define GLUON_SYNCBN_NUMERICS_FORMULAS_H_

#include "numerics/half.h"
#include "numerics/sums.h"

namespace gluon_syncbn {

// mean + mean_low is the mean to about 106 bits, so that (x - mean) is exact far from zero.
struct Statistics {
  double mean, mean_low, variance, inv_std;
};

SBN_HOST_DEVICE Statistics batch_statistics(const ChannelSums& sums, double count, double epsilon) {
  if (count == 0) return {0, 0, 1, 1};
  double sum, sum_low, squares, squares_low;
  sums.first.round(&sum, &sum_low);
  sums.second.round(&squares, &squares_low);
  Statistics s;
  s.mean = sum / count;
  // The rounding error of the mean: sum(x) - count * mean.
  double product_low;
  const double rest = (sum - two_product(count, s.mean, &product_low)) - product_low + sum_low;
  s.mean_low = rest / count;
  // sum((x - mean)^2) = sum(x^2) - mean * sum(x) - mean * rest, which cancels far from zero.
  double difference_low;
  const double difference =
      two_sum(squares, -two_product(s.mean, sum, &product_low), &difference_low);
  const double deviation =
      difference + (difference_low + (squares_low - product_low) - s.mean * (sum_low + rest));
  s.variance = deviation / count - s.mean_low * s.mean_low;
  // Not fmax, which would drop a NaN.
  if (s.variance < 0) s.variance = 0;
  s.inv_std = 1 / sqrt(s.variance + epsilon);
  return s;
}

SBN_HOST_DEVICE Statistics given_statistics(double mean, double variance, double epsilon) {
  return {mean, 0, variance, 1 / sqrt(variance + epsilon)};
}

// Adds {sum(x), sum(x^2)} of `count` values, given sum = sum(x - pivot) and sum_of_squares = sum((x
// - pivot)^2). The pivot is one of the values, so these sums are small at any offset of the data.
// (If the pivot is an outlier, it makes the variance so large that at most log2(count + 1) bits of
// a double are lost.)
//
// sum(x^2) = sum((x - pivot)^2) + 2 pivot sum(x - pivot) + count pivot^2
template <typename T>
SBN_HOST_DEVICE void add_shifted(double count, double pivot, double sum, double sum_of_squares,
                                 Sum3* plain, Sum3* squares) {
  double square_low;
  const double square = two_product(pivot, pivot, &square_low);
  plain->add(sum);
  squares->add_product(count, square);
  if (sizeof(T) == sizeof(double)) {
    plain->add_product(count, pivot);
    squares->add(sum_of_squares);
    squares->add_product(2 * pivot, sum);
    squares->add(count * square_low);
  } else {
    plain->add(count * pivot);  // exact, as is the square
    squares->add(sum_of_squares + 2 * pivot * sum);
  }
}

// What follows the normalization.
enum class Activation { kNone, kRelu, kLeakyRelu };

struct Epilogue {
  Activation activation = Activation::kNone;
  // The slope for negative arguments; 0 for relu.
  double slope = 0;
  // The least magnitude of the effective gamma; 0 unless backward finds z from y, which
  // gamma 0 would not allow.
  double least_gamma = 0;
};

SBN_HOST_DEVICE double effective_gamma(double gamma, const Epilogue& epilogue) {
  return fabs(gamma) < epilogue.least_gamma ? copysign(epilogue.least_gamma, gamma) : gamma;
}

// For a backward that has z = (x - mean) * inv_std * gamma + beta in place of x (Rota Bulo, Porzi,
// Kontschieder, In-Place Activated BatchNorm, CVPR 2018): the statistics of z with which the
// formulas above give the same dgamma and dx. Only the factor gamma * inv_std stays that of x.
SBN_HOST_DEVICE Statistics statistics_of_normalized(double gamma, double beta) {
  return {beta, 0, gamma * gamma, 1 / gamma};
}

// Without momentum the value before does not count, even if it is NaN.
SBN_HOST_DEVICE double moving_average(double running, double batch, double momentum) {
  return momentum == 0 ? batch : momentum * running + (1 - momentum) * batch;
}

// The momentum with which the moving average is the mean of all batches.
SBN_HOST_DEVICE double cumulative_momentum(double batches) { return 1 - 1 / batches; }

// The variance that enters the moving average.
SBN_HOST_DEVICE double running_variance(const Statistics& s, double count, bool unbiased) {
  return unbiased && count > 1 ? s.variance * (count / (count - 1)) : s.variance;
}

// y of one channel, computed in T. Two numbers of T hold the mean, so an offset of the data costs
// no precision.
template <typename T>
struct Normalize {
  T mean, mean_low, scale, shift;

  SBN_HOST_DEVICE static Normalize of(const Statistics& s, double gamma, double beta) {
    const T mean = static_cast<T>(s.mean);
    return {mean, static_cast<T>((s.mean - static_cast<double>(mean)) + s.mean_low),
            static_cast<T>(gamma * s.inv_std), static_cast<T>(beta)};
  }

  SBN_HOST_DEVICE T operator()(T x) const { return ((x - mean) - mean_low) * scale + shift; }
};

// dx of one channel, with the statistics of the batch.
template <typename T>
struct InputGradient {
  // x_factor is inv_std^2 * sum(dy * (x - mean)) / count, and scale is gamma * inv_std.
  T mean, mean_low, dy_mean, dy_mean_low, x_factor, scale;

  // `factor` is gamma * inv_std, `first` is sum(dy), and `second` is sum(dy * (x - mean)).
  SBN_HOST_DEVICE static InputGradient of(const Statistics& s, double factor, double first,
                                          double second, double count) {
    // Without values the sums are zero.
    const double divisor = count == 0 ? 1 : count;
    const double dy_mean_exact = first / divisor;
    const T mean = static_cast<T>(s.mean), dy_mean = static_cast<T>(dy_mean_exact);
    return {mean,
            static_cast<T>((s.mean - static_cast<double>(mean)) + s.mean_low),
            dy_mean,
            static_cast<T>(dy_mean_exact - static_cast<double>(dy_mean)),
            static_cast<T>(second / divisor * s.inv_std * s.inv_std),
            static_cast<T>(factor)};
  }

  SBN_HOST_DEVICE T operator()(T dy, T x) const {
    return (((dy - dy_mean) - dy_mean_low) - ((x - mean) - mean_low) * x_factor) * scale;
  }
};

// The position of a number among all numbers of its type, and the number at a position. The two
// zeros are one number.
SBN_HOST_DEVICE int64_t position_of(float x) {
  const uint32_t bits = bits_of_float(x);
  const int64_t magnitude = bits & 0x7fffffff;
  return bits >> 31 ? -magnitude : magnitude;
}
SBN_HOST_DEVICE int64_t position_of(double x) {
  int64_t bits;
  memcpy(&bits, &x, sizeof(bits));
  const int64_t magnitude = bits & 0x7fffffffffffffff;
  return bits < 0 ? -magnitude : magnitude;
}
SBN_HOST_DEVICE void at_position(int64_t position, float* x) {
  const float magnitude = float_of_bits(static_cast<uint32_t>(position < 0 ? -position : position));
  *x = position < 0 ? -magnitude : magnitude;
}
SBN_HOST_DEVICE void at_position(int64_t position, double* x) {
  const int64_t bits = position < 0 ? -position : position;
  double magnitude;
  memcpy(&magnitude, &bits, sizeof(bits));
  *x = position < 0 ? -magnitude : magnitude;
}

// The largest number that rounds to zero in T.
template <typename T>
constexpr Arithmetic<T> kLargestZero = 0;
template <>
constexpr float kLargestZero<Half> = 0x1p-25f;
template <>
constexpr float kLargestZero<BFloat16> = 0x1p-134f;

// The gradient of the activation's argument for one channel, computed in T: dy where y > 0, and
// dy * slope elsewhere. One comparison of v, which is x or y, decides: v * sign > threshold.
template <typename T>
struct Gate {
  T sign, threshold, slope;

  // v is y.
  SBN_HOST_DEVICE static Gate of_y(double slope) { return {1, 0, static_cast<T>(slope)}; }

  // v is x, and results up to `zero` are zero in y. Rounding preserves order, so Normalize is
  // monotonic, and there is a threshold for which the comparison is true exactly where y > 0.
  SBN_HOST_DEVICE static Gate of_x(const Normalize<T>& normalize, T zero, double slope) {
    const T rest = static_cast<T>(slope);
    // Normalize is constant, or NaN.
    if (!(normalize.scale > 0 || normalize.scale < 0)) {
      return {0, static_cast<T>(normalize.shift > zero ? -1 : 1), rest};
    }
    const T sign = normalize.scale > 0 ? 1 : -1;
    // The highest position known to give at most `zero`, and the lowest known to give more. Steps
    // from an estimate double until both are found, and then halve.
    int64_t high = position_of(static_cast<T>(INFINITY)), low = -high;
    const T estimate =
        (normalize.mean + (normalize.mean_low - normalize.shift / normalize.scale)) * sign;
    int64_t at = fabs(estimate) < INFINITY ? position_of(estimate) : 0;
    T v;
    for (uint64_t most = 1;; most = 2 * most + 1) {
      at_position(at, &v);
      const bool is_above = normalize(v * sign) > zero;
      (is_above ? high : low) = at;
      const uint64_t distance = static_cast<uint64_t>(high) - static_cast<uint64_t>(low);
      if (distance == 1) break;
      const auto step = static_cast<int64_t>(distance / 2 < most ? distance / 2 : most);
      at = is_above ? high - step : low + step;
    }
    at_position(low, &v);
    return {sign, v, rest};
  }

  // With a slope of 0, returns 0 even for an infinite or negative dy.
  SBN_HOST_DEVICE T of(T dy, bool open) const { return open ? dy : slope == 0 ? T{0} : dy * slope; }
  SBN_HOST_DEVICE T operator()(T dy, T v) const { return of(dy, v * sign > threshold); }
};

}  // namespace gluon_syncbn

#endif  // GLUON_SYNCBN_NUMERICS_FORMULAS_H_
