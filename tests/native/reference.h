// Reference arithmetic with 113 bits, and reproducible random numbers.
#ifndef GLUON_SYNCBN_TESTS_REFERENCE_H_
#define GLUON_SYNCBN_TESTS_REFERENCE_H_

#include <cfloat>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

#include "numerics/sums.h"

namespace gluon_syncbn {

#if defined(__SIZEOF_FLOAT128__)
__extension__ typedef __float128 Real;
#else
typedef long double Real;
static_assert(LDBL_MANT_DIG >= 113, "these tests need a type of 113 bits");
#endif

// Not inline, as GCC 12 removes the rounding of double -> float -> double when it vectorizes it.
__attribute__((noinline)) inline float to_float(double x) { return static_cast<float>(x); }

inline Real magnitude(Real x) { return x < 0 ? -x : x; }

// Two Newton steps from 53 bits.
inline Real square_root(Real x) {
  Real root = std::sqrt(static_cast<double>(x));
  for (int i = 0; i < 2 && root > 0; ++i) root = (root + x / root) / 2;
  return root;
}

// Splitmix64 (Steele, Lea, Flood 2014).
class Random {
 public:
  explicit Random(uint64_t seed) : state_(seed) {}

  uint64_t next() {
    uint64_t z = state_ += 0x9e3779b97f4a7c15;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
    z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
    return z ^ (z >> 31);
  }
  int64_t below(int64_t n) { return static_cast<int64_t>(next() % static_cast<uint64_t>(n)); }
  double uniform() { return static_cast<double>(next() >> 11) * 0x1p-53; }
  // Nearly normal: mean 0, standard deviation 1, and all bits of the significand in use.
  double normal() { return (uniform() + uniform() + uniform() + uniform() - 2) * std::sqrt(3.0); }
  double sign() { return next() & 1 ? 1 : -1; }

  template <typename V>
  void shuffle(std::vector<V>* values) {
    for (size_t i = values->size(); i > 1; --i) {
      std::swap((*values)[i - 1], (*values)[static_cast<size_t>(below(static_cast<int64_t>(i)))]);
    }
  }

 private:
  uint64_t state_;
};

// A rounded sum, which is the same for every order of the terms.
struct Rounded {
  double high, low;

  Rounded(double h, double l) : high(h), low(l) {}
  explicit Rounded(const Sum3& sum) { sum.round(&high, &low); }
  // Of a sum known to 113 bits.
  explicit Rounded(Real exact)
      : high(static_cast<double>(exact)), low(static_cast<double>(exact - high)) {}

  bool operator==(const Rounded& other) const {
    return std::memcmp(this, &other, sizeof *this) == 0;
  }
  bool operator!=(const Rounded& other) const { return !(*this == other); }
};

}  // namespace gluon_syncbn

#endif  // GLUON_SYNCBN_TESTS_REFERENCE_H_
