// Compares the CUDA kernels with those of the CPU, and their bits for different splits, alignments
// and devices. They run on the host unless SBN_REAL_CUDA is defined.
#if !defined(SBN_REAL_CUDA)
#include "cuda/fake_cuda.inc"
#endif

#include <algorithm>
#include <cmath>
#include <limits>
#include <type_traits>

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

// What follows the normalization, and whether backward has y in place of x.
struct Variant {
  Epilogue epilogue;
  bool residual, in_place;
};

constexpr Epilogue kRelu{Activation::kRelu, 0, 0}, kLeaky{Activation::kLeakyRelu, 0.01, 0};
const Variant kPlain{{}, false, false};
const Variant kVariants[] = {{kRelu, false, false},
                             {{}, true, false},
                             {kLeaky, true, false},
                             {{Activation::kLeakyRelu, 0.01, 0.1}, false, true}};

// The sums of one problem on the host, and the sums of the magnitudes of their terms.
template <typename T>
struct BackwardSums {
  Sums sums;
  std::vector<double> plain, products;

  BackwardSums(BackwardShard shard, const std::vector<Statistics>& s)
      : sums(s.size()), plain(s.size()), products(s.size()) {
    using A = Arithmetic<T>;
    shard.sums = sums.data();
    kernels<T>().backward_sums(shard, s.data());
    const auto at = [](const void* values, int64_t i) {
      return widen(static_cast<const T*>(values)[i]);
    };
    const Epilogue& e = shard.epilogue;
    const auto parameter = [](const void* values, size_t c) {
      return double{static_cast<const A*>(values)[c]};
    };
    std::vector<Gate<A>> gates(s.size());
    for (size_t c = 0; c < s.size(); ++c) {
      const double gamma = shard.gamma ? effective_gamma(parameter(shard.gamma, c), e) : 1;
      const auto normalize = Normalize<A>::of(s[c], gamma, parameter(shard.beta, c));
      gates[c] =
          shard.y ? Gate<A>::of_y(e.slope) : Gate<A>::of_x(normalize, kLargestZero<T>, e.slope);
    }
    for (int64_t i = 0; i < shard.view.size(); ++i) {
      const size_t c = static_cast<size_t>(i / shard.view.S % shard.view.C);
      const bool activates = e.activation != Activation::kNone;
      double gradient = at(shard.dy, i), x;
      if (activates) {
        gradient = gates[c](at(shard.dy, i), at(shard.y ? shard.y : shard.x, i));
      }
      if (shard.x) {
        x = at(shard.x, i) - s[c].mean;
      } else {
        const double y = at(shard.y, i);
        x = (y > 0 ? y : y / e.slope) - parameter(shard.beta, c);
      }
      plain[c] += std::fabs(gradient);
      products[c] += std::fabs(gradient * x);
    }
  }

  void check(const Sums& device) const {
    for (size_t c = 0; c < sums.size(); ++c) {
      CHECK(std::fabs(device[c].first.value() - sums[c].first.value()) <= kSumsUnit<T> * plain[c]);
      CHECK(std::fabs(device[c].second.value() - sums[c].second.value()) <=
            kSumsUnit<T> * products[c]);
    }
  }
};

// The sums must be close to the CPU's. Everything else, computed from the same sums, must have the
// CPU's bits.
template <typename T>
void check_variant(const Problem<T>& p, OnDevice<T>* device, const std::vector<Statistics>& s,
                   const Variant& variant, int64_t shift) {
  using A = Arithmetic<T>;
  const int64_t size = p.view.size();
  const Kernels& cpu = kernels<T>();
  Array<T> residual = p.dy;
  std::reverse(residual.data(), residual.data() + size);
  DeviceArray<T> residual_on_device(residual.data(), size, shift);
  Array<T> y(size);
  for (const Store how : {Store::kWrite, Store::kAdd}) {
    const bool gamma = how == Store::kWrite;
    const auto adapt = [&](auto shard, const T* added, const T* output) {
      shard.epilogue = variant.epilogue;
      if (!gamma) shard.gamma = nullptr;
      if constexpr (std::is_same<decltype(shard), ForwardShard>::value) {
        if (variant.residual) shard.residual = added;
      } else {
        shard.residual_store = how;
        if (variant.in_place) shard.x = nullptr;
        if (variant.in_place || variant.residual) shard.y = output;
      }
      return shard;
    };
    DeviceArray<T> to(p.x.data(), size, shift ? shift + 2 : 0);
    Array<T> expected = p.x;
    device->forward(
        adapt(device->forward_shard(to.data(), how), residual_on_device.data(), nullptr), s);
    cpu.forward(adapt(forward_shard(p, expected.data(), how), residual.data(), nullptr), s.data());
    CHECK(same_bits(to.get(), expected));

    cpu.forward(adapt(forward_shard(p, y.data()), residual.data(), nullptr), s.data());
    DeviceArray<T> y_on_device(y.data(), size, shift ? shift + 3 : 0);
    DeviceArray<T> dresidual(p.x.data(), size, shift);
    Array<T> expected_dresidual = p.x;
    to.set(p.x.data());
    expected = p.x;
    BackwardShard shard =
        adapt(device->backward_shard(to.data(), how), nullptr, y_on_device.data());
    BackwardShard host = adapt(backward_shard(p, expected.data(), how), nullptr, y.data());
    if (variant.residual) {
      shard.dresidual = dresidual.data();
      host.dresidual = expected_dresidual.data();
    }
    const BackwardSums<T> sums(host, s);
    const Sums own = device->backward_sums(shard, s);
    sums.check(own);

    const double count = 2 * p.count();
    Sums all = own;
    for (ChannelSums& c : all) c.add({{1, 0, 0}, {-2, 0, 0}});
    const auto parameters = device->backward(shard, s, own, &all, count);
    cpu.backward(host, s.data(), all.data(), count);
    CHECK(same_bits(to.get(), expected));
    CHECK(same_bits(dresidual.get(), expected_dresidual));
    for (int64_t c = 0; c < p.view.C; ++c) {
      const double before = gamma ? 0 : p.beta[c];
      const double inverse =
          variant.in_place ? 1 / effective_gamma(p.gamma[c], variant.epilogue) : s[c].inv_std;
      const double dgamma = gamma ? own[c].second.value() * inverse : 0;
      CHECK_EQ(parameters.first[c], static_cast<A>(before + dgamma));
      CHECK_EQ(parameters.second[c], static_cast<A>(before + own[c].first.value()));
    }

    // Constant statistics, and only the gradient of the residual.
    if (variant.residual) shard.dx = host.dx = nullptr;
    device->backward(shard, s, own, nullptr, 0);
    const Sums zeros(s.size());
    cpu.backward(host, s.data(), zeros.data(), 0);
    CHECK(same_bits(to.get(), expected));
    CHECK(same_bits(dresidual.get(), expected_dresidual));
  }
}

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
  check_variant(p, &device, s, kPlain, shift);
  const std::string where = check::context;
  for (const Variant& variant : kVariants) {
    check::context = where + ", variant " + std::to_string(&variant - kVariants);
    check_variant(p, &device, s, variant, shift);
  }
}

// dx in the array of dy, and y in that of x.
template <typename T>
void in_place(const Problem<T>& p) {
  for (const Epilogue& epilogue : {Epilogue{}, kRelu}) {
    OnDevice<T> device(p);
    const std::vector<Statistics> s = statistics_of(p, device.forward_sums());
    const Sums sums = device.backward_sums(s);
    const Kernels& cpu = kernels<T>();
    Array<T> expected = p.dy;
    BackwardShard shard = device.backward_shard(device.dy.data(), Store::kWrite);
    BackwardShard host = backward_shard(p, expected.data());
    shard.epilogue = host.epilogue = epilogue;
    device.backward(shard, s, sums, &sums, p.count());
    cpu.backward(host, s.data(), sums.data(), p.count());
    CHECK(same_bits(device.dy.get(), expected));
    ForwardShard forth = device.forward_shard(device.x.data(), Store::kWrite);
    ForwardShard host_forth = forward_shard(p, expected.data());
    forth.epilogue = host_forth.epilogue = epilogue;
    device.forward(forth, s);
    cpu.forward(host_forth, s.data());
    CHECK(same_bits(device.x.get(), expected));
  }
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

// The blocks of a kernel of sums that runs two at a time on each multiprocessor, as sum_tiles, or
// one where shared memory is small: no other number takes much less time by the model.
void blocks_fit_every_generation() {
#if !defined(SBN_REAL_CUDA)
  struct Generation {
    const char* name;
    int multiprocessors, resident;
  };
  const Generation generations[] = {{"5.2", 24, 2},  {"6.1", 28, 2},  {"7.0", 80, 2},
                                    {"7.5", 40, 1},  {"8.0", 108, 2}, {"8.6", 82, 2},
                                    {"9.0", 132, 2}, {"12.0", 170, 2}};
  for (const Generation& gpu : generations) {
    check::context = std::string("blocks on ") + gpu.name;
    const int64_t resident = gpu.resident * gpu.multiprocessors;
    for (const int64_t blocks : {1, 3, 16, 64, 100, 256, 512, 2048}) {
      for (const int64_t units : {1, 2, 7, 16, 49, 128, 1000, 12544}) {
        for (const int64_t at_once : {1, 4, 8, 64}) {
          const int64_t slices = choose_slices(blocks, resident, units, at_once);
          int64_t least = time_of_slices(blocks, resident, units, at_once, 1);
          for (int64_t other = 2; other <= units; ++other) {
            least = std::min(least, time_of_slices(blocks, resident, units, at_once, other));
          }
          const int64_t time = time_of_slices(blocks, resident, units, at_once, slices);
          CHECK_SAY(time <= 1.1 * least, blocks << " blocks, " << units << " units, " << at_once
                                                << " at once: " << slices << " slices take " << time
                                                << ", others " << least);
        }
      }
    }
    cuda_on_host::resident_blocks = gpu.resident;
    const SumsPlan<float, 1> plan({64, 256, 49}, gpu.multiprocessors);
    const int64_t tiles = plan.grid.x;
    CHECK_EQ(plan.task.slices, choose_slices(tiles, resident, 64, kWarps));
  }
  cuda_on_host::resident_blocks = 2;
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
  blocks_fit_every_generation();
  test_all<float>();
  test_all<double>();
  test_all<Half>();
  test_all<BFloat16>();
  return check::finish("cuda_kernels");
}
