// Compares the CUDA kernels with those of the CPU, and their bits for different splits, alignments
// and devices. They run on the host unless SBN_REAL_CUDA is defined.
#if !defined(SBN_REAL_CUDA)
#include "cuda/fake_cuda.inc"
#endif

#include <cmath>
#include <limits>

#include "cpu/thread_pool.h"
#include "cuda/device_fixture.h"

namespace gluon_syncbn {
namespace {

// The tolerance of mean and inv_std, compared with the CPU, whose sums are entirely in double: the
// last two bits of a float. (In the worst case, where all roundings of a run have the same
// direction, the error of inv_std is a quarter larger.) float64: an outlier at the start of a chunk
// costs 10 bits on both sides.
template <typename T>
constexpr double kSumsUnit = sizeof(T) == sizeof(double) ? 0x1p-42 : 0x1p-22;

template <typename T>
void check_statistics(const std::vector<Statistics>& device, const std::vector<Statistics>& host) {
  for (size_t c = 0; c < host.size(); ++c) {
    const Statistics &d = device[c], &h = host[c];
    const double off = (d.mean - h.mean) + (d.mean_low - h.mean_low);
    CHECK(std::fabs(off) <= kSumsUnit<T> * std::sqrt(h.variance) + 0x1p-100 * std::fabs(h.mean));
    CHECK_SAY(std::fabs(d.inv_std - h.inv_std) <= kSumsUnit<T> * h.inv_std,
              "inv_std is off by " << std::fabs(d.inv_std / h.inv_std - 1));
  }
}

template <typename T>
void check_backward_sums(const Problem<T>& p, const Sums& device, const Sums& host,
                         const std::vector<Statistics>& s) {
  std::vector<double> plain(host.size()), products(host.size());
  for (int64_t i = 0; i < p.view.size(); ++i) {
    const size_t c = static_cast<size_t>(i / p.view.S % p.view.C);
    plain[c] += std::fabs(to_double(p.dy[i]));
    products[c] += std::fabs(to_double(p.dy[i]) * (to_double(p.x[i]) - s[c].mean));
  }
  for (size_t c = 0; c < host.size(); ++c) {
    CHECK(std::fabs(device[c].first.value() - host[c].first.value()) <= kSumsUnit<T> * plain[c]);
    CHECK(std::fabs(device[c].second.value() - host[c].second.value()) <=
          kSumsUnit<T> * products[c]);
  }
}

// The sums must be close to the CPU's. Everything else, computed from the same sums, must have the
// CPU's bits.
template <typename T>
void check_problem(const Problem<T>& p, int64_t shift = 0) {
  OnDevice<T> device(p, shift);
  const Sums sums = device.forward_sums(), host_sums = forward_sums(p);
  if (p.view.S == 1 && p.view.R == 1) {
    CHECK(rounded(sums) == rounded(host_sums));
  }
  const std::vector<Statistics> s = statistics_of(p, sums);
  check_statistics<T>(s, statistics_of(p, host_sums));
  const std::vector<Statistics> on_device = device.statistics(sums, p.count());
  CHECK(std::memcmp(on_device.data(), s.data(), s.size() * sizeof(s[0])) == 0);
  const Sums gradient_sums = device.backward_sums(s);
  check_backward_sums(p, gradient_sums, backward_sums(p, s), s);

  const Kernels& cpu = kernels<T>();
  for (const Store how : {Store::kWrite, Store::kAdd}) {
    const bool gamma = how == Store::kWrite;
    const Arithmetic<T>* const host_gamma = gamma ? p.gamma.data() : nullptr;
    DeviceArray<T> to(p.x.data(), p.view.size(), shift ? shift + 2 : 0);
    Array<T> expected = p.x;
    device.normalize(OnDevice<T>::kForward, s, gamma, device.x.data(), to.data(), how);
    cpu.forward(p.view, p.x.data(), s.data(), host_gamma, p.beta.data(), expected.data(), how);
    CHECK(same_bits(to.get(), expected));

    device.normalize(OnDevice<T>::kConstant, s, gamma, device.dy.data(), to.data(), how);
    cpu.backward_constant(p.view, p.dy.data(), s.data(), host_gamma, expected.data(), how);
    CHECK(same_bits(to.get(), expected));

    const double count = 2 * p.count();
    Sums all = gradient_sums;
    for (ChannelSums& c : all) c.add({{1, 0, 0}, {-2, 0, 0}});
    const auto parameters = device.gradients(s, gamma, gradient_sums, all, count, to.data(), how);
    cpu.backward(p.view, p.dy.data(), p.x.data(), s.data(), host_gamma, all.data(), count,
                 expected.data(), how);
    CHECK(same_bits(to.get(), expected));
    for (int64_t c = 0; c < p.view.C; ++c) {
      using A = Arithmetic<T>;
      const double before = gamma ? 0 : p.beta[c];
      const double dgamma = gamma ? gradient_sums[c].second.value() * s[c].inv_std : 0;
      CHECK_EQ(parameters.first[c], static_cast<A>(before + dgamma));
      CHECK_EQ(parameters.second[c], static_cast<A>(before + gradient_sums[c].first.value()));
    }
  }
}

template <typename T>
void in_place(const Problem<T>& p) {
  OnDevice<T> device(p);
  const Sums sums = device.forward_sums();
  const std::vector<Statistics> s = statistics_of(p, sums);
  const Sums gradient_sums = device.backward_sums(s);
  const Kernels& cpu = kernels<T>();
  Array<T> expected = p.dy;
  device.gradients(s, true, gradient_sums, gradient_sums, p.count(), device.dy.data(),
                   Store::kWrite);
  cpu.backward(p.view, p.dy.data(), p.x.data(), s.data(), p.gamma.data(), gradient_sums.data(),
               p.count(), expected.data(), Store::kWrite);
  CHECK(same_bits(device.dy.get(), expected));
  device.normalize(OnDevice<T>::kForward, s, true, device.x.data(), device.x.data(), Store::kWrite);
  cpu.forward(p.view, p.x.data(), s.data(), p.gamma.data(), p.beta.data(), expected.data(),
              Store::kWrite);
  CHECK(same_bits(device.x.get(), expected));
}

template <typename T>
void results_match_the_cpu_for_every_shape() {
  // Planes within a vector, across vectors, several per warp, with chunks and a tail.
  for (const int64_t S : {2, 3, 7, 8, 15, 16, 31, 49, 100, 196, 1023, 1024, 1025, 3000}) {
    const View view{S < 200 ? 5 : 2, S < 200 ? 3 : 2, S};
    for (const int64_t shift : {0, 1}) {
      check::context = name_of<T>(view, shift);
      check_problem(Problem<T>(view, 3), shift);
    }
  }
  // Small planes of many channels, several per tile: full tiles and partial ones.
  for (const View& view : {View{9, 70, 3}, View{3, 1, 9}, View{11, 37, 49}, View{4, 34, 121},
                           View{3, 9, 225}, View{2, 5, 283}, View{2, 3, 12545}}) {
    for (const int64_t shift : {0, 1, 3}) {
      check::context = name_of<T>(view, shift);
      check_problem(Problem<T>(view, 3), shift);
    }
  }
  // Channels last: row lengths near those of vectors and blocks, sample sizes near a thread's rows.
  for (const int64_t C : {1, 2, 3, 8, 20, 33, 64, 129, 300}) {
    for (const int64_t R : {1, 2, 49}) {
      const View view{3 * R, C, 1, R};
      for (const int64_t shift : {0, 1}) {
        check::context = name_of<T>(view, shift);
        check_problem(Problem<T>(view, 3), shift);
      }
    }
  }
  for (const int64_t R : {1025, 9000}) {
    const View view{2 * R, 3, 1, R};
    check::context = name_of<T>(view, 0);
    check_problem(Problem<T>(view, 3));
  }
  in_place(Problem<T>({3, 5, 77}, 0));
  in_place(Problem<T>({3 * 12, 5, 1, 12}, 0));
}

template <typename T>
void sums_are_independent_of_splits_alignment_and_multiprocessors() {
  for (const View& view :
       {View{8, 3, 49}, View{6, 40, 25}, View{6, 2, 2100}, View{7, 5, 6}, View{8 * 30, 20, 1, 30},
        View{5 * 600, 3, 1, 600}, View{9 * 20, 300, 1, 20}, View{40, 33, 1}}) {
    check::context = name_of<T>(view, 0);
    const Problem<T> p(view, Type<T>::kLargestOffset);
    OnDevice<T> whole(p);
    const Sums sums = whole.forward_sums();
    const std::vector<Statistics> s = statistics_of(p, sums);
    const Sums gradient_sums = whole.backward_sums(s);
    for (const int64_t shift : {0, 1, 2, 3, 5}) {
      for (const int multiprocessors : {1, 3, 132}) {
        OnDevice<T> device(p, shift, multiprocessors);
        CHECK(rounded(device.forward_sums()) == rounded(sums));
        CHECK(rounded(device.backward_sums(s)) == rounded(gradient_sums));
      }
    }
    const int64_t samples = view.N / view.R;
    for (int64_t parts = 2; parts <= std::min<int64_t>(samples, 8); ++parts) {
      Sums forward(sums.size()), backward(sums.size());
      for (int64_t i = parts - 1; i >= 0; --i) {
        const int64_t begin = samples * i / parts * view.R;
        const int64_t end = samples * (i + 1) / parts * view.R;
        const Sums f = whole.forward_sums(begin, end), b = whole.backward_sums(s, begin, end);
        for (size_t c = 0; c < sums.size(); ++c) {
          forward[c].add(f[c]);
          backward[c].add(b[c]);
        }
      }
      CHECK(rounded(forward) == rounded(sums));
      CHECK(rounded(backward) == rounded(gradient_sums));
    }
  }
}

// Data far from zero, and data whose squares overflow or underflow in float.
template <typename T>
void results_are_right_for_extreme_data() {
  const View planes{4, 3, 600}, rows{4 * 150, 4, 1, 150};
  for (const View& view : {planes, rows}) {
    for (const double offset : {1.0, 1e3, Type<T>::kLargestOffset}) {
      check::context = name_of<T>(view, offset);
      check_problem(Problem<T>(view, offset));
    }
    if (sizeof(T) < sizeof(float)) continue;
    for (const double size : {1e-30, 1e-19, 1e19, 1e25}) {
      check::context = name_of<T>(view, size);
      Problem<T> p(view, 0);
      for (int64_t i = 0; i < view.size(); ++i) p.x[i] = static_cast<T>(to_double(p.x[i]) * size);
      const Sums host = forward_sums(p), device = OnDevice<T>(p).forward_sums();
      for (size_t c = 0; c < host.size(); ++c) {
        // No epsilon, which would hide the variance of small data.
        const Statistics h = batch_statistics(host[c], p.count(), 0);
        const Statistics d = batch_statistics(device[c], p.count(), 0);
        CHECK(std::fabs(d.inv_std - h.inv_std) <= kSumsUnit<T> * h.inv_std);
      }
    }
    check::context = "constant data";
    Problem<T> p(view, 0);
    for (int64_t i = 0; i < view.size(); ++i) p.x[i] = static_cast<T>(1.1);
    const Statistics s = statistics_of(p, OnDevice<T>(p).forward_sums())[0];
    CHECK_EQ(s.mean, double{static_cast<T>(1.1)});
    CHECK_EQ(s.variance, 0);

    check::context = "outliers at the start of samples";
    Problem<T> far(view, 0);
    for (int64_t n = 0; n < view.N; n += view.R) far.x[n * view.C * view.S] = static_cast<T>(1e3);
    OnDevice<T> device(far);
    check_statistics<T>(statistics_of(far, device.forward_sums()),
                        statistics_of(far, forward_sums(far)));

    check::context = "not a number";
    Problem<T> bad(view, 0);
    bad.x[view.S + 5 * (view.S > 1)] = std::numeric_limits<T>::infinity();
    const Sums sums = OnDevice<T>(bad).forward_sums();
    CHECK(std::isfinite(sums[0].first.value()) && !std::isfinite(sums[1].second.value()));
  }
}
template <>
void results_are_right_for_extreme_data<Half>() {}
template <>
void results_are_right_for_extreme_data<BFloat16>() {}

// As after a ReLU: patches of zeros, of the length of runs, vectors, shares and whole samples.
template <typename T>
void results_are_right_with_zeros() {
  for (const View& view : {View{4, 3, 2100}, View{6, 3, 77}, View{4 * 150, 12, 1, 150}}) {
    for (const int64_t patch : {1, 8, 40, 1000}) {
      check::context = name_of<T>(view, 0) + ", zeros in patches of " + std::to_string(patch);
      Problem<T> p(view, 0);
      for (int64_t i = 0; i < view.size(); ++i) {
        // Patches in a channel, also with channels last.
        const int64_t index = view.S > 1 ? i : i / view.C;
        if (index / patch % 2 == 0 || to_double(p.x[i]) < 0) p.x[i] = value_of<T>(0);
      }
      check_problem(p);
    }
  }
}

// add_runs is a function of the host only if SBN_REAL_CUDA is not defined.
void runs_of_equal_values_are_added_once() {
#if !defined(SBN_REAL_CUDA)
  check::context = "add_runs";
  // Whether the values are read again, to be added in double.
  const auto reloads = [](float value, float origin) {
    int reads = 0;
    double sum = 0, squares = 0;
    add_runs<1, 8>([&](int, int) { return value; }, [&](int) { return origin; }, 0.0f,
                   [&](int, int, const auto& add) {
                     ++reads;
                     add(value);
                   },
                   [&](int, double first, double second) { sum = first, squares = second; });
    const double d = static_cast<double>(value) - origin;
    CHECK(sum == 8 * d && std::fabs(squares - 8 * d * d) <= 1e-6 * squares);
    return reads > 0;
  };
  CHECK(!reloads(0, 0) && !reloads(-0.0f, 0) && !reloads(3, 3) && !reloads(3, 1));
  CHECK(reloads(1e-25f, 0) && reloads(1e25f, 0));
#endif
}

void divisions_are_exact() {
#if !defined(SBN_REAL_CUDA)
  check::context = "Divider";
  Random random(3);
  constexpr int64_t kEnd = int64_t{1} << 31;
  for (int64_t i = 0; i < 400; ++i) {
    const int64_t d = 1 + random.below(std::min((int64_t{1} << (1 + i % 31)), kEnd - 1));
    const Divider divide = Divider::by(d);
    for (int k = 0; k < 50; ++k) {
      const int64_t multiple = d * random.below((kEnd - 1) / d + 1);
      const int64_t n = k % 3 == 0 ? random.below(kEnd) : k % 3 == 1 ? multiple : multiple + d - 1;
      if (n < kEnd) {
        CHECK_EQ(int64_t{divide(static_cast<uint32_t>(n))}, n / d);
      }
    }
    CHECK_EQ(int64_t{divide(static_cast<uint32_t>(kEnd - 1))}, (kEnd - 1) / d);
  }
#endif
}

template <typename T>
void test_all() {
  results_match_the_cpu_for_every_shape<T>();
  sums_are_independent_of_splits_alignment_and_multiprocessors<T>();
  results_are_right_for_extreme_data<T>();
  results_are_right_with_zeros<T>();
}

// Runs each kernel once or twice, for tools under which kernels are slow.
template <typename T>
void test_few() {
  for (const View& view : {View{3, 5, 49}, View{9, 40, 9}, View{2, 2, 2100},
                           View{2 * 49, 33, 1, 49}, View{2 * 600, 3, 1, 600}, View{9, 40, 1}}) {
    for (const int64_t shift : {0, 1}) {
      check::context = name_of<T>(view, shift);
      check_problem(Problem<T>(view, 3), shift);
    }
  }
}

}  // namespace
}  // namespace gluon_syncbn

// --small is for compute-sanitizer.
int main(int count, char** arguments) {
  using namespace gluon_syncbn;
  if (!cuda_backend()) return 1;
  set_num_threads(2);
  if (count > 1 && std::string(arguments[1]) == "--small") {
    test_few<float>();
    test_few<double>();
    test_few<Half>();
    test_few<BFloat16>();
    return check::finish("cuda_kernels --small");
  }
  divisions_are_exact();
  runs_of_equal_values_are_added_once();
  test_all<float>();
  test_all<double>();
  test_all<Half>();
  test_all<BFloat16>();
  return check::finish("cuda_kernels");
}
