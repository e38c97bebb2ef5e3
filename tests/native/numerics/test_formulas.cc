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
