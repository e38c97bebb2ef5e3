// That the instruction sets give the same bits. The loops of kernels_cpu.cc are its own affair, so
// it is made a part of this program, under another name than the one linked with it.
#define cpu_kernels cpu_kernels_with_these_loops
#include "kernels_cpu.cc"
#undef cpu_kernels

#include "check.h"
#include "reference.h"

namespace gluon_syncbn {
namespace {

template <typename V>
bool same_bits(const std::vector<V>& a, const std::vector<V>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(V)) == 0;
}

// What a set of loops makes of the values: all bits of it, also those that rounding the sums would
// hide.
template <typename T>
struct Results {
  std::vector<ChannelSums> sums;
  std::vector<T> values;

  Results(const Loops<T>& loops, const std::vector<T>& x, const std::vector<T>& dy, double offset) {
    const int64_t n = static_cast<int64_t>(x.size());
    Random random(2);
    std::vector<Statistics> s(x.size());
    std::vector<Normalize<T>> normalize(x.size());
    std::vector<InputGradient<T>> gradient(x.size());
    ChannelSums terms;
    terms.first.add(random.normal());
    terms.second.add(random.normal());
    for (size_t c = 0; c < x.size(); ++c) {
      s[c] = {offset + random.normal(), random.normal() * 1e-17, 1, 0.5 + random.uniform()};
      normalize[c] = Normalize<T>::of(s[c], random.normal(), random.normal());
      gradient[c] = InputGradient<T>::of(s[c], random.normal(), terms, 3);
    }

    sums.resize(2 + 2 * kRow);
    loops.forward_chunk(x.data(), n, &sums[0]);
    loops.backward_chunk(dy.data(), x.data(), n, s[0], &sums[1]);
    const int64_t width = std::min(n, kRow);
    for (const int64_t stride : {width, width + 3}) {
      const int64_t rows = (n - width) / stride + 1;
      loops.forward_rows(x.data(), rows, stride, width, &sums[2]);
      loops.backward_rows(dy.data(), x.data(), rows, stride, width, s.data(), &sums[2 + kRow]);
    }
    for (const bool row : {false, true}) {
      for (const Store how : {Store::kWrite, Store::kAdd}) {
        std::vector<T> y = dy, dx = x;
        loops.normalize(x.data(), n, normalize.data(), row, y.data(), how);
        loops.input_gradient(dy.data(), x.data(), n, gradient.data(), row, dx.data(), how);
        values.insert(values.end(), y.begin(), y.end());
        values.insert(values.end(), dx.begin(), dx.end());
      }
    }
  }
};

template <typename T>
void check_same_bits(const Loops<T>& baseline, const Loops<T>& other) {
  Random random(1);
  std::vector<int64_t> sizes{127, 128, 129, 130, 1000, 2000, 2047, 2048};
  for (int64_t n = 1; n <= 67; ++n) sizes.push_back(n);
  for (const int64_t n : sizes) {
    for (const double offset : {0.0, 1e5}) {
      std::vector<T> x, dy;
      for (int64_t i = 0; i < n; ++i) {
        x.push_back(static_cast<T>(offset + random.normal()));
        dy.push_back(static_cast<T>(random.normal()));
      }
      const Results<T> expected(baseline, x, dy, offset), result(other, x, dy, offset);
      CHECK(same_bits(expected.sums, result.sums));
      CHECK(same_bits(expected.values, result.values));
    }
  }
}

void check_same_bits(const char* name, const Loops<float>& floats, const Loops<double>& doubles) {
  check::context = name;
  check_same_bits(baseline::kLoops<float>, floats);
  check_same_bits(baseline::kLoops<double>, doubles);
}

}  // namespace
}  // namespace gluon_syncbn

int main() {
  using namespace gluon_syncbn;
  check_same_bits("chosen", loops<float>(), loops<double>());
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
    check_same_bits("AVX2", avx2::kLoops<float>, avx2::kLoops<double>);
  } else {
    std::cerr << "AVX2 is not tested: this processor has none.\n";
  }
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
    check_same_bits("AVX-512", avx512::kLoops<float>, avx512::kLoops<double>);
  } else {
    std::cerr << "AVX-512 is not tested: this processor has none.\n";
  }
#endif
  return check::finish("loops_cpu");
}
