#include <algorithm>

#include "check.h"
#include "numerics/sums.h"
#include "reference.h"

namespace gluon_syncbn {
namespace {

// A term is a number, or the product of two.
struct Term {
  double a, b = 1;

  void add_to(Sum3* sum) const { b == 1 ? sum->add(a) : sum->add_product(a, b); }
};
using Terms = std::vector<Term>;

Sum3 sum_of(const Terms& terms) {
  Sum3 sum;
  for (const Term& term : terms) term.add_to(&sum);
  return sum;
}

// The sum of the same terms: short runs are added sequentially, and then merged in random order.
Sum3 sum_by_random_tree(const Terms& terms, Random* random) {
  std::vector<Sum3> parts;
  for (const Term& term : terms) {
    if (parts.empty() || random->below(3) == 0) parts.emplace_back();
    term.add_to(&parts.back());
  }
  while (parts.size() > 1) {
    random->shuffle(&parts);
    const Sum3 last = parts.back();
    parts.pop_back();
    parts[0].add(last);
  }
  return parts[0];
}

void check_orders(Terms terms, int orders, uint64_t seed) {
  Random random(seed);
  const Rounded first(sum_of(terms));
  for (int i = 0; i < orders; ++i) {
    random.shuffle(&terms);
    CHECK(Rounded(sum_of(terms)) == first);
    CHECK(Rounded(sum_by_random_tree(terms, &random)) == first);
  }
  const auto smaller = [](const Term& x, const Term& y) { return std::abs(x.a) < std::abs(y.a); };
  std::sort(terms.begin(), terms.end(), smaller);
  CHECK(Rounded(sum_of(terms)) == first);
  std::reverse(terms.begin(), terms.end());
  CHECK(Rounded(sum_of(terms)) == first);
}

// Values that are far from zero compared with their spread, their squares, and many magnitudes.
TEST(order_is_immaterial) {
  for (const double offset : {0.0, 1.0, 1e2, 1e5, 1e10}) {
    check::context = "offset " + std::to_string(offset);
    Random random(3);
    Terms values, squares, spread;
    for (int i = 0; i < 150; ++i) {
      const double x = offset + random.normal();
      values.push_back({x});
      squares.push_back({x, x});
      spread.push_back({std::ldexp(random.normal(), static_cast<int>(random.below(400)) - 200)});
    }
    for (const Terms& terms : {values, squares, spread}) check_orders(terms, 1000, 4);
  }
}

// Large terms cancel and leave small ones, whose sum is known.
TEST(cancellation_leaves_the_exact_sum) {
  for (const double large : {1.0, 1e10, 1e20, 1e27}) {
    check::context = "cancelling " + std::to_string(large);
    Random random(8);
    Terms terms;
    Real rest = 0;
    for (int i = 0; i < 50; ++i) {
      const double x = large * random.normal(), small = random.normal();
      terms.insert(terms.end(), {{x}, {-x}, {small}});
      rest += small;
    }
    CHECK(Rounded(sum_of(terms)) == Rounded(rest));
    check_orders(terms, 1000, 9);
  }
}

// Sums of products of floats of like size fit into 113 bits.
TEST(sum_is_the_exact_one_rounded) {
  Random random(10);
  for (int i = 0; i < 1000; ++i) {
    Terms terms;
    Real exact = 0;
    const double offset = std::ldexp(1.0, static_cast<int>(random.below(20)));
    for (int k = 0; k < 40; ++k) {
      const float x = to_float(offset + random.normal());
      const float y = to_float(offset + random.normal());
      terms.push_back({x, y});
      exact += Real(x) * Real(y);
    }
    const Sum3 sum = sum_of(terms);
    CHECK(Rounded(sum) == Rounded(exact));
    CHECK_EQ(sum.value(), static_cast<double>(exact));
  }
}

// Terms of one bit each. Many sums are in the middle of two doubles except for a far smaller term,
// which decides which of them is nearer.
Terms single_bits(const std::vector<int>& exponents, Random* random) {
  Terms terms;
  for (int64_t k = 3 + random->below(6); k > 0; --k) {
    const int exponent = exponents[random->below(static_cast<int64_t>(exponents.size()))];
    terms.push_back({random->sign() * std::ldexp(1.0, exponent)});
  }
  return terms;
}

TEST(halfway_sums_are_rounded_alike) {
  const Terms halfway{{1 + 0x1p-52}, {-0x1p-53}, {0x1p-106}};
  check_orders(halfway, 20, 11);
  CHECK_EQ(sum_of(halfway).value(), 1 + 0x1p-52);
  Random random(12);
  for (int i = 0; i < 2000; ++i) {
    const Terms terms = single_bits({0, 0, -51, -52, -53, -54, -104, -105, -106, -107}, &random);
    Real exact = 0;
    for (const Term& term : terms) exact += term.a;
    CHECK(Rounded(sum_of(terms)) == Rounded(exact));
    check_orders(terms, 5, 13);
  }
  // The same for the lower double. These sums have too many bits for the reference.
  for (int i = 0; i < 10000; ++i) {
    check_orders(single_bits({0, -53, -54, -55, -106, -107, -108, -109, -120, -150}, &random), 4,
                 14);
  }
}

}  // namespace
}  // namespace gluon_syncbn

int main() { return check::run_all("sums"); }
