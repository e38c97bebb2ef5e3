// Sums that do not depend on the order of their terms, to the last bit of a double.
#ifndef GLUON_SYNCBN_NUMERICS_SUMS_H_
#define GLUON_SYNCBN_NUMERICS_SUMS_H_

#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(__CUDACC__)
#define SBN_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define SBN_HOST_DEVICE inline __attribute__((always_inline))
#endif

namespace gluon_syncbn {

// a + b = sum + error, exactly (Knuth 1969).
SBN_HOST_DEVICE double two_sum(double a, double b, double* error) {
  const double sum = a + b;
  const double b_part = sum - a;
  *error = (a - (sum - b_part)) + (b - b_part);
  return sum;
}

// a * b = product + error, exactly.
SBN_HOST_DEVICE double two_product(double a, double b, double* error) {
  const double product = a * b;
  *error = fma(a, b, -product);
  return product;
}

// a + b, rounded to odd: the last bit is 1 if the sum is inexact. Added to a larger number, it
// gives the same double as the exact sum, even halfway between two doubles (Boldo, Melquiond 2008).
SBN_HOST_DEVICE double sum_to_odd(double a, double b) {
  double error;
  double sum = two_sum(a, b, &error);
  int64_t bits;
  memcpy(&bits, &sum, sizeof(bits));
  if ((error > 0 || error < 0) && bits % 2 == 0) {
    bits += (error > 0) == (sum > 0) ? 1 : -1;
    memcpy(&sum, &bits, sizeof(sum));
  }
  return sum;
}

// The unevaluated sum of three doubles: about 159 bits (Ogita, Rump, Oishi 2005, SumK with K = 3).
//
// Double-double (106 bits) is not enough for the sum of squares. At a mean of 1e5 standard
// deviations, the variance cancels 34 bits. The remaining 19 bits beyond the 53 of a double would
// let the order of addition change a result once in some hundred thousand channels. Sum3 leaves 72
// bits.
struct Sum3 {
  double high = 0, middle = 0, low = 0;

  SBN_HOST_DEVICE void add(double term) {
    double error;
    high = two_sum(high, term, &error);
    middle = two_sum(middle, error, &error);
    low += error;
  }

  SBN_HOST_DEVICE void add(const Sum3& other) {
    double error, middle_error;
    high = two_sum(high, other.high, &error);
    middle = two_sum(middle, other.middle, &middle_error);
    middle = two_sum(middle, error, &error);
    low += other.low + (middle_error + error);
  }

  // Adds a * b, exactly.
  SBN_HOST_DEVICE void add_product(double a, double b) {
    double error;
    add(two_product(a, b, &error));
    add(error);
  }

  // The sum to 106 bits: the nearest double, and the double nearest to the remainder. They are the
  // same for every order of the terms.
  SBN_HOST_DEVICE void round(double* high_out, double* low_out) const {
    double a, b, c;
    a = two_sum(high, middle, &b);
    b = two_sum(b, low, &c);
    a = two_sum(a, b, &b);
    b = two_sum(b, c, &c);
    *high_out = a + sum_to_odd(b, c);
    a = two_sum(a - *high_out, b, &b);
    *low_out = a + sum_to_odd(b, c);
  }

  SBN_HOST_DEVICE double value() const {
    double high_out, low_out;
    round(&high_out, &low_out);
    return high_out;
  }
};

// The two sums of a pass over one channel. Forward: x and x^2. Backward: dy and dy * (x - mean).
struct ChannelSums {
  Sum3 first, second;

  SBN_HOST_DEVICE void add(const ChannelSums& other) {
    first.add(other.first);
    second.add(other.second);
  }
};

}  // namespace gluon_syncbn

#endif  // GLUON_SYNCBN_NUMERICS_SUMS_H_
