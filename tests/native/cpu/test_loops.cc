// Compares the bits of the instruction sets. The loops are private to kernels.cc, so this program
// includes it, under another name than the object that it links.
#define cpu_kernels cpu_kernels_with_these_loops
#include "cpu/kernels.cc"
#undef cpu_kernels

#include "check.h"
#include "reference.h"

namespace gluon_syncbn {
namespace {

template <typename V>
bool same_bits(const std::vector<V>& a, const std::vector<V>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(V)) == 0;
}

template <typename V>
std::vector<V> first(const std::vector<V>& values, int64_t n) {
  return {values.begin(), values.begin() + n};
}

// The results of a set of loops. Includes the unrounded sums, as rounding could hide differences.
template <typename T>
struct Computed {
  std::vector<ChannelSums> sums;
  std::vector<T> values;

  Computed(const Loops<T>& loops, const std::vector<T>& x, const std::vector<T>& dy, double offset,
           const Epilogue& epilogue, bool reads_y, WriteMode replace) {
    using A = Arithmetic<T>;
    const int64_t n = static_cast<int64_t>(x.size());
    Random random(2);
    std::vector<Statistics> s(x.size());
    std::vector<Normalize<A>> normalize(x.size());
    std::vector<InputGradient<A>> gradient(x.size());
    std::vector<Gate<A>> gates(x.size());
    ChannelSums terms;
    terms.first.add(random.normal());
    terms.second.add(random.normal());
    for (size_t c = 0; c < x.size(); ++c) {
      s[c] = {offset + random.normal(), random.normal() * 1e-17, 1, 0.5 + random.uniform()};
      normalize[c] = Normalize<A>::of(s[c], random.normal(), random.normal());
      gradient[c] =
          InputGradient<A>::of(s[c], random.normal(), terms.first.value(), terms.second.value(), 3);
      gates[c] = reads_y ? Gate<A>::of_y(epilogue.slope)
                         : Gate<A>::of_x(normalize[c], kLargestZero<T>, epilogue.slope);
    }
    // y and the residual have the values of dy.
    const bool is_plain = epilogue.activation == Activation::kNone;
    const T* const residual = reads_y ? dy.data() : nullptr;
    const bool recovers = reads_y && epilogue.slope != 0;
    const Sources<T> from{dy.data(), recovers ? nullptr : x.data(),
                          is_plain  ? nullptr
                          : reads_y ? dy.data()
                                    : x.data(),
                          recovers ? static_cast<A>(1 / epilogue.slope) : A{0}};

    const Sources<T> all_x{nullptr, x.data(), nullptr, 0};
    sums.resize(2 * kPlanes + 4 * kBlock);
    ChannelSums *const of_rows = &sums[2 * kPlanes], *const of_samples = of_rows + 2 * kBlock;
    for (const int64_t planes : {int64_t{1}, std::min(n, int64_t{5})}) {
      const Chunks all{n / planes, 1, n, 1, 0, 1};
      loops.forward_planes(all_x, 0, all, planes, nullptr, nullptr, &sums[0]);
      loops.backward_planes(from, 0, all, planes, s.data(), gates.data(), &sums[kPlanes]);
    }
    const auto sum_rows = [&](const Chunks& all, int64_t width, ChannelSums* to) {
      loops.forward_rows(all_x, 0, all, width, nullptr, nullptr, to);
      loops.backward_rows(from, 0, all, width, s.data(), gates.data(), to + kBlock);
    };
    const int64_t width = std::min(n, kBlock);
    for (const int64_t step : {width, width + 3}) {
      sum_rows({1, step, step, 1, 0, (n - width) / step + 1}, width, of_rows);
    }
    // Several rows in a sample, of few channels and of many, and of a part of the channels.
    for (const int64_t channels : {int64_t{3}, int64_t{11}, int64_t{40}, width}) {
      const int64_t rows = n / channels;
      if (rows == 0) continue;
      for (const int64_t part : {channels, channels - 2}) {
        if (part > 0) sum_rows({rows, channels, n, 1, 0, 1}, part, of_samples);
      }
    }
    const auto keep = [&](const auto& forward, const auto& backward) {
      for (const WriteMode mode : {replace, WriteMode::kAdd}) {
        std::vector<T> y = dy, dx = x, dresidual = dy;
        forward(y.data(), mode);
        backward({dx.data(), mode, dresidual.data(), mode});
        for (const std::vector<T>* each : {&y, &dx, &dresidual}) {
          values.insert(values.end(), each->begin(), each->end());
        }
      }
    };
    keep(
        [&](T* y, WriteMode mode) {
          loops.normalize(x.data(), residual, n, normalize[0], epilogue, y, mode);
        },
        [&](const Results<T>& to) { loops.input_gradient(from, 0, n, gradient[0], gates[0], to); });
    for (const int64_t channels : {int64_t{1}, int64_t{3}, n}) {
      const int64_t rows = n / channels;
      if (rows == 0) continue;
      keep(
          [&](T* y, WriteMode mode) {
            loops.normalize_rows(x.data(), residual, rows * channels,
                                 {first(normalize, channels), rows}, epilogue, y, mode);
          },
          [&](const Results<T>& to) {
            loops.input_gradient_rows(from, 0, rows * channels, {first(gradient, channels), rows},
                                      {first(gates, channels), rows}, to);
          });
    }
  }
};

template <typename T>
void check_same_bits(const Loops<T>& baseline, const Loops<T>& other) {
  Random random(1);
  std::vector<int64_t> sizes{127, 128, 129, 130, 1000, 2000, 2047, 2048};
  for (int64_t n = 1; n <= 67; ++n) sizes.push_back(n);
  for (const int64_t n : sizes) {
    for (const double offset : {0.0, 6e4}) {
      std::vector<T> x(static_cast<size_t>(n)), dy(x);
      for (size_t i = 0; i < x.size(); ++i) {
        narrow(static_cast<Arithmetic<T>>(offset + random.normal()), &x[i]);
        narrow(static_cast<Arithmetic<T>>(random.normal()), &dy[i]);
      }
      for (const Epilogue& epilogue : {Epilogue{}, Epilogue{Activation::kRelu, 0, 0},
                                       Epilogue{Activation::kLeakyRelu, .1, 0}}) {
        for (const bool reads_y : {false, true}) {
          if (reads_y && epilogue.activation == Activation::kNone) continue;
          const Computed<T> expected(baseline, x, dy, offset, epilogue, reads_y, WriteMode::kWrite);
          for (const WriteMode replace : {WriteMode::kWrite, WriteMode::kStream}) {
            const Computed<T> result(other, x, dy, offset, epilogue, reads_y, replace);
            CHECK(same_bits(expected.sums, result.sums));
            CHECK(same_bits(expected.values, result.values));
          }
        }
      }
    }
  }
}

// Converts all halves to float, and to halves a float for each rounding case: all values of the
// upper 19 bits, with lower bits that are zero, or below, at or above one half of the last upper
// bit.
template <typename Widen, typename Narrow>
void check_conversions(const Widen& widen_these, const Narrow& narrow_these) {
  std::vector<Half> halves(1 << 16);
  for (size_t i = 0; i < halves.size(); ++i) halves[i].bits = static_cast<uint16_t>(i);
  std::vector<float> expected_floats(halves.size()), floats(halves.size());
  for (size_t i = 0; i < halves.size(); ++i) expected_floats[i] = widen(halves[i]);
  widen_these(halves.data(), static_cast<int64_t>(halves.size()), floats.data());
  CHECK(same_bits(expected_floats, floats));

  std::vector<float> from;
  for (uint32_t upper = 0; upper < 1u << 19; ++upper) {
    for (const uint32_t lower : {0u, 1u, 0xfffu, 0x1000u, 0x1001u, 0x1fffu}) {
      from.push_back(float_of_bits(upper << 13 | lower));
    }
  }
  std::vector<Half> expected(from.size()), result(from.size());
  for (size_t i = 0; i < from.size(); ++i) narrow(from[i], &expected[i]);
  narrow_these(from.data(), static_cast<int64_t>(from.size()), result.data());
  CHECK(same_bits(expected, result));
}

}  // namespace
}  // namespace gluon_syncbn

// Checks the loops and conversions of one namespace of loops.h.
#define CHECK_SAME_BITS(name, set)                                                          \
  do {                                                                                      \
    check::context = name;                                                                  \
    check_same_bits(baseline::kLoops<float>, set::kLoops<float>);                           \
    check_same_bits(baseline::kLoops<double>, set::kLoops<double>);                         \
    check_same_bits(baseline::kLoops<Half>, set::kLoops<Half>);                             \
    check_same_bits(baseline::kLoops<BFloat16>, set::kLoops<BFloat16>);                     \
    check_conversions([](auto from, int64_t n, auto to) { set::widen_all(from, n, to); },   \
                      [](auto from, int64_t n, auto to) { set::narrow_all(from, n, to); }); \
  } while (false)

int main() {
  using namespace gluon_syncbn;
  check::context = "selected";
  check_same_bits(baseline::kLoops<float>, loops<float>());
  check_same_bits(baseline::kLoops<double>, loops<double>());
  check_same_bits(baseline::kLoops<Half>, loops<Half>());
  check_same_bits(baseline::kLoops<BFloat16>, loops<BFloat16>());
  CHECK_SAME_BITS("baseline", baseline);
#if defined(__x86_64__)
  if (has_avx2()) {
    CHECK_SAME_BITS("AVX2", avx2);
  } else {
    std::cerr << "AVX2 is not tested: this processor has none.\n";
  }
  if (has_avx512()) {
    CHECK_SAME_BITS("AVX-512", avx512);
  } else {
    std::cerr << "AVX-512 is not tested: this processor has none.\n";
  }
#endif
  return check::finish("loops");
}
