// Compares the CUDA kernels with those of the CPU, and their bits for different splits, alignments
// and devices. They run on a GPU or, as PTX, on the simulator.
#include <cmath>
#include <limits>
#include <type_traits>

#include "cpu/thread_pool.h"
#include "cuda/compare.h"
#include "cuda/cuda_sums.h"
#include "cuda/plans.h"

namespace gluon_syncbn {
namespace {

template <typename T>
void results_match_the_cpu_for_every_shape() {
  // Planes within a vector, across vectors, several per warp, with chunks and a tail.
  std::vector<View> views;
  for (const int64_t S : {2, 3, 7, 8, 15, 16, 31, 49, 100, 196, 1023, 1024, 1025, 3000}) {
    views.push_back({S < 200 ? 5 : 2, S < 200 ? 3 : 2, S});
  }
  // Channels last: row lengths near those of vectors and blocks, sample sizes near a thread's rows.
  for (const int64_t C : {1, 2, 3, 8, 20, 33, 64, 129, 300}) {
    for (const int64_t R : {1, 2, 49}) views.push_back({3 * R, C, 1, R});
  }
  check_views<T>(views, {0, 1});
  // Small planes of many channels, several of a block.
  check_views<T>(
      {{30, 99, 3}, {3, 1, 9}, {11, 37, 49}, {4, 34, 121}, {3, 9, 225}, {2, 5, 283}, {2, 3, 12545}},
      {0, 1, 7});
  check_views<T>({{2 * 1025, 3, 1, 1025}, {2 * 9000, 3, 1, 9000}}, {0});
  // Vectors of 8 bytes, for float and 16-bit data.
  for (const int64_t even : {2, 4}) {
    check_views<T>({{5, 3, 3 * even}, {2, 3, 511 * even}, {2 * 300, 17 * even, 1, 300}}, {0, 1});
  }
  // Aligned vectors after some values.
  check_views<T>({{3, 3, 49}, {2, 2, 600}, {2 * 49, 40, 1, 49}}, {kAlike + 1});
  check_in_place(Problem<T>({3, 5, 77}, 0));
  check_in_place(Problem<T>({3 * 12, 5, 1, 12}, 0));
}

// Data far from zero, and as large and as small as docs/precision.md allows.
template <typename T>
void results_are_right_for_extreme_data() {
  const View planes{4, 3, 600}, rows{4 * 150, 4, 1, 150};
  for (const View& view : {planes, rows}) {
    for (const double offset : {1.0, 1e3, Type<T>::kLargestOffset}) {
      check::context = name_of<T>(view, offset);
      check_problem(Problem<T>(view, offset));
    }
    if (sizeof(T) < sizeof(float)) continue;
    for (const double size : {1e-17, 1e17}) {
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

template <typename T>
void results_match_the_cpu_for_more_variants() {
  for (const View& view : {View{5, 3, 3}, View{5, 3, 49}, View{3, 3, 600}, View{2, 2, 3000},
                           View{3 * 49, 40, 1, 49}, View{600, 12, 1, 200}, View{40, 33, 1},
                           View{5, 3, 6}, View{5, 3, 12}, View{98, 6, 1, 49}}) {
    const Problem<T> p(view, 3);
    const std::vector<Statistics> s = statistics_of(p, forward_sums(p));
    for (const int64_t shift : {0, 1}) {
      OnDevice<T> device(p, shift);
      for (const Variant& variant : kMoreVariants) {
        check::context = name_of<T>(view, shift) + ", more variants";
        check_variant(p, &device, s, variant, shift);
      }
    }
  }
}

template <typename T>
void given_statistics_are_those_of_the_host() {
  using A = Arithmetic<T>;
  const std::vector<A> mean{0, 3, -5}, variance{1, 0, 7};
  DeviceArray<A> means(mean.data(), 3), variances(variance.data(), 3);
  DeviceArray<Statistics> device(3);
  ForwardFinish finish;
  finish.C = 3;
  finish.batches = 1;
  finish.kept.statistics = device.data();
  finish.mean = finish.beta = means.data();
  finish.variance = variances.data();
  finish.epsilon = kEpsilon;
  MUST(cuda_backend()->kernels(Type<T>::kDType).finish_forward(finish, the_stream()));
  const std::vector<Statistics> result = device.get();
  for (size_t c = 0; c < 3; ++c) {
    const Statistics host = given_statistics(mean[c], variance[c], kEpsilon);
    CHECK(std::memcmp(&result[c], &host, sizeof(host)) == 0);
  }
}

// Planes that are shorter than a vector, that most warps have the end of (at each place of a
// vector), and larger ones.
template <typename T>
void large_arrays_are_written() {
  for (const int64_t S : {3, 21, 600}) {
    for (const Variant& variant :
         {kPlain, kVariants[0], kVariants[2], kMoreVariants[0], kMoreVariants[1]}) {
      for (const WriteMode mode : {WriteMode::kWrite, WriteMode::kAdd}) {
        for (const int64_t shift : {0, 7}) {
          check::context = name_of<T>({int64_t{1} << 31, 2, S}, shift) + ", large";
          check_large<T>(S, variant, mode, shift);
        }
      }
    }
  }
}

void divisions_are_exact() {
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
}

template <typename T>
void test_all() {
  results_match_the_cpu_for_every_shape<T>();
  results_are_right_for_extreme_data<T>();
  results_are_right_with_zeros<T>();
  results_match_the_cpu_for_more_variants<T>();
  test_sums<T>();
  given_statistics_are_those_of_the_host<T>();
  large_arrays_are_written<T>();
}

// Runs each kernel once or twice, for tools under which kernels are slow.
template <typename T>
void test_few() {
  check_views<T>(
      {{3, 5, 49}, {9, 40, 9}, {2, 2, 2100}, {2 * 49, 33, 1, 49}, {2 * 600, 3, 1, 600}, {9, 40, 1}},
      {0, 1});
}

}  // namespace
}  // namespace gluon_syncbn

// --small is for compute-sanitizer.
int main(int count, char** arguments) {
  using namespace gluon_syncbn;
  if (!cuda_backend()) return 1;
  set_num_threads(2);
  const bool small = count == 2 && std::string(arguments[1]) == "--small";
  if (!small) {
    divisions_are_exact();
    products_that_cancel_leave_their_low_bits();
  }
  for_each_type([&](auto zero) {
    using T = decltype(zero);
    small ? test_few<T>() : test_all<T>();
  });
  return check::finish(small ? "cuda_kernels --small" : "cuda_kernels");
}
