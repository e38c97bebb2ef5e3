#include "check.h"
#include "numerics/formulas.h"
#include "reference.h"

namespace gluon_syncbn {
namespace {

constexpr double kEpsilon = 1e-5;

Statistics statistics_of(const std::vector<double>& values, double epsilon = kEpsilon) {
  ChannelSums sums;
  for (const double x : values) {
    sums.first.add(x);
    sums.second.add_product(x, x);
  }
  return batch_statistics(sums, static_cast<double>(values.size()), epsilon);
}

void check_against_reference(const std::vector<double>& values) {
  Real mean = 0, variance = 0;
  for (const double x : values) mean += x;
  mean /= values.size();
  for (const double x : values) variance += (x - mean) * (x - mean);
  variance /= values.size();

  const Statistics s = statistics_of(values);
  // The two numbers of the mean have 106 bits, of which the last few are rounded.
  CHECK(magnitude(s.mean + Real(s.mean_low) - mean) <= 0x1p-103 * magnitude(mean) + 0x1p-1000);
  CHECK(magnitude(s.mean - mean) <= 0x1p-52 * magnitude(mean));
  // The sum of squares has 106 bits, before the square of the mean is subtracted.
  const Real error = 0x1p-50 * variance + 0x1p-102 * (variance + mean * mean);
  CHECK(magnitude(s.variance - variance) <= error);
  const Real inv_std = 1 / square_root(variance + kEpsilon);
  CHECK(magnitude(s.inv_std - inv_std) <= inv_std * (0x1p-51 + error / (variance + kEpsilon)));
}

TEST(statistics_are_right_at_any_offset) {
  Random random(1);
  for (const double offset : {0.0, 1.0, 1e2, 1e3, 1e4, 1e5, 1e10}) {
    for (const double deviation : {1.0, 1e-3, 30.0}) {
      for (const int count : {1, 2, 3, 7, 1000}) {
        check::context = "offset " + std::to_string(offset) + ", " + std::to_string(count);
        std::vector<double> floats, doubles;
        for (int i = 0; i < count; ++i) {
          doubles.push_back(offset + deviation * random.normal());
          floats.push_back(to_float(doubles.back()));
        }
        check_against_reference(floats);
        check_against_reference(doubles);
      }
    }
  }
}

TEST(constant_input_has_no_variance) {
  Random random(3);
  for (int i = 0; i < 2000; ++i) {
    const double scale = std::ldexp(1.0, static_cast<int>(random.below(40)) - 20);
    const double x = random.normal() * scale, x_float = to_float(x);
    const std::vector<double> floats(1 + i % 300, x_float), doubles(1 + i % 300, x);
    const Statistics of_floats = statistics_of(floats), of_doubles = statistics_of(doubles);
    CHECK(of_floats.mean == x_float && of_floats.mean_low == 0 && of_floats.variance == 0);
    CHECK_EQ(of_floats.inv_std, 1 / std::sqrt(kEpsilon));
    // A sum of doubles may be inexact, so the variance may be a rounding error.
    CHECK(magnitude(of_doubles.mean + Real(of_doubles.mean_low) - x) <= 0x1p-104 * std::abs(x));
    CHECK(of_doubles.variance >= 0 && of_doubles.variance <= 0x1p-102 * x * x);
  }
}

TEST(one_value_is_its_own_mean) {
  Random random(4);
  for (const double scale : {1.0, 1e5, 1e10, 1e-10}) {
    const double x = scale * random.normal();
    const Statistics s = statistics_of({x});
    CHECK(s.mean == x && s.mean_low == 0 && s.variance == 0);
    CHECK_EQ(s.inv_std, 1 / std::sqrt(kEpsilon));
  }
}

// Values that differ only in their last bits, where rounding could make the variance negative.
TEST(variance_is_never_negative) {
  Random random(5);
  for (int i = 0; i < 5000; ++i) {
    const double x = std::ldexp(1 + random.uniform(), static_cast<int>(random.below(30)));
    std::vector<double> values(2 + random.below(30), x);
    values[0] = std::nextafter(x, random.sign() * INFINITY);
    const Statistics s = statistics_of(values, 0);
    CHECK(s.variance >= 0);
    CHECK(s.inv_std > 0);
  }
}

TEST(nan_and_infinity_stay) {
  for (const double odd : {NAN, INFINITY, -INFINITY}) {
    const Statistics s = statistics_of({1, odd, 2});
    CHECK(!std::isfinite(s.mean) && std::isnan(s.variance) && std::isnan(s.inv_std));
  }
}

// As when all processes of a group have run out of data.
TEST(no_values_leave_all_finite) {
  const Statistics s = statistics_of({});
  CHECK_EQ(Normalize<float>::of(s, 2, 3)(5), 13);
  CHECK_EQ((InputGradient<float>::of(s, 2, 0, 0, 0)(5, 7)), 10);
}

TEST(given_statistics_and_moving_averages) {
  const Statistics s = given_statistics(3, 4, 0);
  CHECK(s.mean == 3 && s.mean_low == 0 && s.variance == 4 && s.inv_std == 0.5);
  CHECK_EQ(moving_average(2, 6, 0.75), 3);
  CHECK_EQ(moving_average(2, 6, 1), 2);
  CHECK_EQ(moving_average(2, 6, 0), 6);
}

// The comparison of a Gate with y > 0, also at the values around its threshold.
template <typename T>
void check_gates() {
  Random random(6);
  for (int i = 0; i < 20000; ++i) {
    const double scale = std::ldexp(random.normal(), static_cast<int>(random.below(60)) - 30);
    const Statistics s{i % 3 ? random.normal() : 1e4 * random.normal(), 1e-9, 1,
                       std::ldexp(1, static_cast<int>(random.below(20)) - 10)};
    const double gamma = i % 50 ? scale : 0, beta = i % 4 ? scale * random.normal() : 0;
    const auto f = Normalize<T>::of(s, gamma, beta);
    const T zero = i % 5 ? 0 : kLargestZero<Half>;
    const auto gate = Gate<T>::of_x(f, zero, 0.5);
    int wrong = 0;
    const auto check = [&](T x) { wrong += gate(2, x) != (f(x) > zero ? 2 : 1); };
    const int64_t at = position_of(gate.threshold * gate.sign);
    for (int64_t near = at - 3; near <= at + 3; ++near) {
      T x;
      at_position(near, &x);
      check(x);
    }
    for (const double x : {0.0, 1e-40, -1e30, 1e30, random.normal()}) check(static_cast<T>(x));
    CHECK_EQ(wrong, 0);
  }
}

TEST(gates_have_the_bits_of_y) {
  check_gates<float>();
  check_gates<double>();
}

}  // namespace
}  // namespace gluon_syncbn

int main() { return check::run_all("batch_norm_math"); }
