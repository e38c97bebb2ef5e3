// Compares the kernels with an activation, a residual, or a recovered x with separate passes.
#include <algorithm>
#include <cmath>
#include <type_traits>
#include <vector>

#include "cpu/kernels_fixture.h"
#include "cpu/thread_pool.h"

namespace gluon_syncbn {
namespace {

constexpr double kSlope = 0.25;
constexpr Epilogue kNone{}, kRelu{Activation::kRelu, 0, 0},
    kLeaky{Activation::kLeakyRelu, kSlope, 0};

template <typename T>
Arithmetic<T> activate(const Epilogue& epilogue, Arithmetic<T> v) {
  if (v > 0 || epilogue.activation == Activation::kNone) return v;
  return static_cast<Arithmetic<T>>(epilogue.slope) * v + 0;  // not -0
}

// What the kernels write for a problem, in one pass with the sums or after them.
template <typename T>
struct Fused {
  Array<T> y, dx, dresidual;
  Sums sums;
};

template <typename T>
Fused<T> fused(const Problem<T>& p, const std::vector<Statistics>& s, const Epilogue& epilogue,
               const Array<T>* residual, bool recovers, bool alone, WriteMode mode) {
  const View& v = p.view;
  const Kernels& k = kernels<T>();
  Fused<T> r{p.x, p.dy, p.x, Sums(static_cast<size_t>(v.C))};
  ForwardShard forth = forward_shard(p, r.y.data());
  forth.epilogue = epilogue;
  forth.residual = residual ? residual->data() : nullptr;
  if (alone) {
    std::vector<Statistics> computed(s.size());
    k.forward_alone(forth, kEpsilon, computed.data());
  } else {
    k.forward(forth, s.data());
  }
  BackwardShard back = backward_shard(p, r.dx.data(), mode);
  back.epilogue = epilogue;
  back.sums = r.sums.data();
  if (recovers) back.x = nullptr;
  const bool activated = epilogue.activation != Activation::kNone;
  if (recovers || (residual && activated)) back.y = r.y.data();
  if (residual) back.dresidual = r.dresidual.data();
  back.residual_mode = mode;
  if (alone) {
    k.backward_alone(back, s.data());
  } else {
    k.backward_sums(back, s.data());
    k.backward(back, s.data(), r.sums.data(), p.count());
  }
  CHECK(r.y.guards_intact() && r.dx.guards_intact() && r.dresidual.guards_intact());
  return r;
}

// Normalization, addition and activation one after the other, with arrays of T between them.
template <typename T>
void check_composition(const Problem<T>& p, const Epilogue& epilogue, bool adds) {
  const int64_t size = p.view.size();
  const Results<T> plain(p);
  Random random(2);
  Array<T> residual(size);
  for (int64_t i = 0; i < size; ++i) residual[i] = value_of<T>(random.normal());
  Array<T> y(size);
  Problem<T> gated = p;
  for (int64_t i = 0; i < size; ++i) {
    T sum = plain.y[i];
    if (adds) sum = rounded_to<T>(widen(sum) + widen(residual[i]));
    y[i] = rounded_to<T>(activate<T>(epilogue, widen(sum)));
    const bool passes = widen(sum) > 0 || epilogue.activation == Activation::kNone;
    if (!passes) {
      gated.dy[i] = rounded_to<T>(static_cast<Arithmetic<T>>(epilogue.slope) * widen(p.dy[i]) + 0);
    }
  }
  const Results<T> expected(gated);
  const Results<Arithmetic<T>> wide(gated.widened());
  for (const bool alone : {false, true}) {
    for (const WriteMode mode : {WriteMode::kWrite, WriteMode::kAdd}) {
      const Fused<T> r =
          fused(p, plain.s, epilogue, adds ? &residual : nullptr, false, alone, mode);
      CHECK(r.y == y);
      CHECK(rounded(r.sums) == rounded(expected.gradient_sums));
      const bool writes = mode == WriteMode::kWrite;
      CHECK(r.dx == (writes ? expected.dx : p.dy.plus(wide.dx)));
      if (!adds) continue;
      CHECK(r.dresidual == (writes ? gated.dy : p.x.plus(gated.dy.widened())));
    }
  }
}

// Backward reads y in place of x.
template <typename T>
void check_recovery(const Problem<T>& p) {
  const double unit = sizeof(T) == sizeof(double)    ? 0x1p-53
                      : sizeof(T) == sizeof(float)   ? 0x1p-24
                      : std::is_same<T, Half>::value ? 0x1p-11
                                                     : 0x1p-8;
  Epilogue in_place = kLeaky;
  in_place.least_gamma = 0.1;
  Problem<T> clamped = p;
  for (int64_t c = 0; c < p.view.C; ++c) {
    auto& gamma = clamped.gamma[c];
    if (std::abs(gamma) < 0.1) gamma = static_cast<Arithmetic<T>>(gamma < 0 ? -0.1 : 0.1);
  }
  const Results<T> plain(p);
  const Fused<T> expected =
      fused<T>(clamped, plain.s, kLeaky, nullptr, false, false, WriteMode::kWrite);
  for (const bool alone : {false, true}) {
    const Fused<T> r = fused<T>(p, plain.s, in_place, nullptr, true, alone, WriteMode::kWrite);
    double y_error = 0, error = 0, largest = 0;
    for (int64_t i = 0; i < p.view.size(); ++i) {
      y_error = std::max(y_error, std::abs(to_double(r.y[i]) - to_double(expected.y[i])));
      error = std::max(error, std::abs(to_double(r.dx[i]) - to_double(expected.dx[i])));
      largest = std::max(largest, std::abs(to_double(expected.dx[i])));
    }
    CHECK(y_error <= 4 * unit);
    CHECK(error <= 2000 * unit * largest);
    for (int64_t c = 0; c < p.view.C; ++c) {
      const double gamma = effective_gamma(p.gamma[c], in_place);
      // Both are the gradient of gamma.
      const double recovered = r.sums[c].second.value() / gamma;
      const double exact = expected.sums[c].second.value() * plain.s[c].inv_std;
      CHECK(std::abs(recovered - exact) <= 2000 * unit * p.count());
    }
  }
}

template <typename T>
void test_all() {
  for (const View view :
       {View{3, 5, 40}, View{5, 3, 1}, View{2, 130, 3}, View{2, 3, 5000}, View{70, 130, 1},
        View{3 * 9, 130, 1, 9}, View{2 * 70, 3, 1, 70}, View{6, 700, 1, 2}, View{9, 2100, 1},
        View{3, 1, 40000}, View{4, 64, 900}}) {
    for (const double offset : {0.0, 100.0}) {
      check::context = name_of<T>(view, offset);
      Problem<T> p(view, offset);
      // Constant channels, of which one gets no gradient.
      p.gamma[0] = 0;
      if (view.C > 2) p.gamma[2] = 0, p.beta[2] = -1;
      for (const Epilogue& epilogue : {kNone, kRelu, kLeaky}) {
        // Separate passes round to 16 bits once more.
        if (sizeof(T) == sizeof(Half) && epilogue.activation == Activation::kLeakyRelu) continue;
        for (const bool adds : {false, true}) check_composition(p, epilogue, adds);
      }
      check_recovery(p);
    }
  }
}

}  // namespace
}  // namespace gluon_syncbn

int main() {
  gluon_syncbn::set_num_threads(2);
  gluon_syncbn::for_each_type([](auto zero) { gluon_syncbn::test_all<decltype(zero)>(); });
  return check::finish("kernels_fused");
}
