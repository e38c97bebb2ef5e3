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
// If no device has data (M = 0), y = x * gamma + beta and dx = dy * gamma.
#ifndef GLUON_SYNCBN_NUMERICS_FORMULAS_H_
#define GLUON_SYNCBN_NUMERICS_FORMULAS_H_

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

SBN_HOST_DEVICE double moving_average(double running, double batch, double momentum) {
  return momentum * running + (1 - momentum) * batch;
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
  T mean, mean_low, dy_mean, dy_mean_low, slope, scale;

  SBN_HOST_DEVICE static InputGradient of(const Statistics& s, double gamma,
                                          const ChannelSums& sums, double count) {
    // Without values the sums are zero.
    const double divisor = count == 0 ? 1 : count;
    const double dy_mean_exact = sums.first.value() / divisor;
    const T mean = static_cast<T>(s.mean), dy_mean = static_cast<T>(dy_mean_exact);
    return {mean,
            static_cast<T>((s.mean - static_cast<double>(mean)) + s.mean_low),
            dy_mean,
            static_cast<T>(dy_mean_exact - static_cast<double>(dy_mean)),
            static_cast<T>(sums.second.value() / divisor * s.inv_std * s.inv_std),
            static_cast<T>(gamma * s.inv_std)};
  }

  SBN_HOST_DEVICE T operator()(T dy, T x) const {
    return (((dy - dy_mean) - dy_mean_low) - ((x - mean) - mean_low) * slope) * scale;
  }
};

}  // namespace gluon_syncbn

#endif  // GLUON_SYNCBN_NUMERICS_FORMULAS_H_
