// Compares the kernels with a reference of 113 bits.
#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "cpu/kernels_fixture.h"
#include "cpu/thread_pool.h"

namespace gluon_syncbn {
namespace {

// The unit roundoff of a double, in which all sums are taken.
constexpr double kUnit = 0x1p-53;
// The roundings of a value in the sum of a chunk of 2048: 128 in its lane, 15 in the tail, and some
// more.
constexpr double kSteps = 160;

// The unit roundoff of Arithmetic<T>.
template <typename T>
constexpr double kUnitOf = std::numeric_limits<Arithmetic<T>>::epsilon() / 2;

// The error of rounding a number of this size to T, if T is not Arithmetic<T>.
template <typename T>
Real storage_error(Real) {
  return 0;
}
template <>
Real storage_error<Half>(Real size) {
  return std::max(Real{0x1p-11} * size, Real{0x1p-25});
}
template <>
Real storage_error<BFloat16>(Real size) {
  return 0x1p-8 * size;
}

// Whether a result differs from the exact number by at most `error` plus the rounding to T.
template <typename T>
bool is_near(T result, Real exact, Real error) {
  const Real distance = magnitude(to_double(result) - exact);
  return distance <= error + storage_error<T>(magnitude(exact) + error);
}

// One channel of a problem.
template <typename T>
struct Channel {
  const Problem<T>& p;
  int64_t c;

  template <typename F>
  void for_each(const F& f) const {
    for (int64_t n = 0; n < p.view.N; ++n) {
      for (int64_t i = 0; i < p.view.S; ++i) f((n * p.view.C + c) * p.view.S + i);
    }
  }

  // The errors of the sums are relative to the deviations and not to the offset, as one of the
  // values is subtracted from all.
  void check_statistics(const Results<T>& r) const {
    Real mean = 0, variance = 0, distance = 0, largest = 0;
    for_each([&](int64_t i) { mean += to_double(p.x[i]); });
    mean /= p.count();
    for_each([&](int64_t i) {
      const Real d = to_double(p.x[i]) - mean;
      variance += d * d;
      distance += magnitude(d);
      largest = std::max(largest, magnitude(to_double(p.x[i])));
    });
    variance /= p.count();
    distance /= p.count();
    const Statistics& s = r.s[c];
    const Real about = 2 * distance + 2 * kUnitOf<T> * largest;
    CHECK(magnitude(s.mean + Real(s.mean_low) - mean) <=
          kSteps * kUnit * about + 0x1p-100 * largest);
    const Real error =
        4 * kSteps * kUnit * (variance + about * kUnitOf<T> * largest) + 0x1p-100 * mean * mean;
    CHECK(magnitude(s.variance - variance) <= error);
    const Real inv_std = 1 / square_root(variance + kEpsilon);
    CHECK(magnitude(s.inv_std - inv_std) <= inv_std * (8 * kUnit + error / (variance + kEpsilon)));
  }

  void check_values(const Results<T>& r) const {
    const Statistics& s = r.s[c];
    const Real mean = s.mean + Real(s.mean_low), gamma = p.gamma[c], beta = p.beta[c];
    const Rounded first(r.gradient_sums[c].first), second(r.gradient_sums[c].second);
    const Real dy_sum = first.high + Real(first.low), product_sum = second.high + Real(second.low);
    const Real scale = gamma * s.inv_std, slope = product_sum / p.count() * s.inv_std * s.inv_std;
    const Real dy_mean = dy_sum / p.count();
    const Real unit = kUnitOf<T>, size = magnitude(scale);
    // A few roundings for each value. The mean is two numbers of T, so its size counts with the
    // square of the unit; the mean of dy is at most a double.
    const Real mean_error = 4 * unit * unit * magnitude(mean);
    const Real dy_mean_error = (4 * unit * unit + 2 * kUnit) * magnitude(dy_mean);
    Real exact_dy_sum = 0, exact_product_sum = 0, dy_size = 0, product_size = 0;
    int wrong = 0;
    for_each([&](int64_t i) {
      const Real d = to_double(p.x[i]) - mean, dy = to_double(p.dy[i]);
      exact_dy_sum += dy;
      exact_product_sum += dy * d;
      dy_size += magnitude(dy);
      product_size += magnitude(dy * d);

      const Real y = d * scale + beta;
      wrong += !is_near(r.y[i], y,
                        unit * (6 * magnitude(d * scale) + 2 * magnitude(y)) + mean_error * size);
      const Real dx = (dy - dy_mean - d * slope) * scale;
      const Real dx_size = 8 * magnitude(dy - dy_mean) + 12 * magnitude(d * slope);
      wrong += !is_near(r.dx[i], dx,
                        (unit * dx_size + dy_mean_error + mean_error * magnitude(slope)) * size);
      const Real constant = dy * scale;
      wrong += !is_near(r.constant_dx[i], constant, 4 * unit * magnitude(constant));
    });
    CHECK_EQ(wrong, 0);
    CHECK(magnitude(dy_sum - exact_dy_sum) <= kSteps * kUnit * dy_size);
    // For float64 data the mean is two doubles here, else one.
    const Real off = magnitude(mean) * (sizeof(T) == sizeof(double) ? kUnit * kUnit : kUnit);
    CHECK(magnitude(product_sum - exact_product_sum) <=
          kSteps * kUnit * product_size + 2 * off * dy_size);
  }
};

template <typename T>
void check_against_reference(const Problem<T>& p, const Results<T>& r) {
  for (int64_t c = 0; c < p.view.C; ++c) {
    const Channel<T> channel{p, c};
    channel.check_statistics(r);
    channel.check_values(r);
  }
}

template <typename T>
void check_view(View view, double offset) {
  check::context = name_of<T>(view, offset);
  const Problem<T> p(view, offset);
  check_against_reference(p, Results<T>(p));
}

template <typename T>
void results_are_right_for_every_shape() {
  for (const int64_t S : {1, 2, 15, 16, 17}) {
    for (const int64_t C : {1, 3, 63, 64, 65, 130}) {
      for (const int64_t N : {1, 2, 5}) check_view<T>({N, C, S}, S == 2 ? 100 : 0);
    }
  }
  for (const int64_t S : {2047, 2048, 2049, 5000}) {
    for (const int64_t N : {1, 3}) {
      for (const int64_t C : {1, 3}) check_view<T>({N, C, S}, 100);
    }
  }
  check_view<T>({3, 5000, 1}, 100);
  for (const int64_t C : {1, 3, 9, 21, 64, 65, 130, 513}) {
    for (const int64_t R : {3, 49}) check_view<T>({2 * R, C, 1, R}, 100);
  }
  check_view<T>({5000, 3, 1, 2500}, 100);
}

template <typename T>
void results_are_right_at_any_offset() {
  for (const double offset : {0.0, 1e3, 6e4, Type<T>::kLargestOffset}) {
    for (const View& view :
         {View{3, 5, 300}, View{2, 1, 4100}, View{500, 5, 1}, View{600, 5, 1, 300}}) {
      check_view<T>(view, offset);
    }
  }
  // Two threads share the one channel.
  check_view<T>({3, 1, 25000}, Type<T>::kLargestOffset);
}

template <typename T>
void constant_input_has_no_variance() {
  for (const View view : {View{3, 2, 5000}, View{300, 2, 1}, View{300, 2, 1, 100}}) {
    check::context = "constant " + name_of<T>(view, 0);
    Problem<T> p(view, 0);
    for (int64_t i = 0; i < view.size(); ++i) {
      p.x[i] = value_of<T>(to_float(i / view.S % view.C ? 1.1 : -54321.7));
    }
    const Results<T> r(p);
    for (int64_t c = 0; c < view.C; ++c) {
      CHECK(r.s[c].mean == to_double(p.x[c * view.S]) && r.s[c].variance == 0);
      CHECK_EQ(r.s[c].inv_std, 1 / std::sqrt(kEpsilon));
    }
    for (int64_t i = 0; i < view.size(); ++i) {
      CHECK_EQ(to_double(r.y[i]), to_double(value_of<T>(p.beta[i / view.S % view.C])));
    }
  }
}

// The sums subtract the first value of a chunk. If it is an outlier, log2(n + 1) bits are lost.
template <typename T>
void first_value_may_be_an_outlier() {
  for (const int64_t S : {17, 2048, 5000}) {
    check::context = "outlier before " + name_of<T>({1, 1, S}, 10);
    Problem<T> p({1, 1, S}, 10);
    p.x[0] = value_of<T>(to_float(sizeof(T) == sizeof(Half) ? 6e4 : 1e6 + 0.1));
    const Results<T> r(p);
    const Channel<T> channel{p, 0};
    channel.check_values(r);
    Real mean = 0, variance = 0;
    channel.for_each([&](int64_t i) { mean += to_double(p.x[i]) / Real(S); });
    channel.for_each([&](int64_t i) {
      const Real d = to_double(p.x[i]) - mean;
      variance += d * d / S;
    });
    const Real error = kSteps * kUnit * static_cast<double>(S + 1);
    CHECK(magnitude(r.s[0].variance - variance) <= error * variance);
    CHECK(magnitude(r.s[0].mean - mean) <= error * magnitude(mean));
  }
}

}  // namespace
}  // namespace gluon_syncbn

int main() {
  using namespace gluon_syncbn;
  set_num_threads(2);
  for_each_type([](auto zero) {
    using T = decltype(zero);
    results_are_right_for_every_shape<T>();
    results_are_right_at_any_offset<T>();
    constant_input_has_no_variance<T>();
    first_value_may_be_an_outlier<T>();
  });
  return check::finish("kernels");
}
