// Compares the CUDA kernels with those of the CPU, and their bits for different splits, alignments
// and devices. They run on a GPU or, as PTX, on the simulator.
#include <algorithm>
#include <cmath>
#include <limits>
#include <type_traits>

#include "cpu/thread_pool.h"
#include "cuda/device_fixture.h"
#include "cuda/plans.h"

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
    // Of vectors of two doubles, one is aligned like x, and one is not.
    DeviceArray<T> to(p.x.data(), size, shift_by(shift, gamma == (shift < 4) ? 2 : 1));
    Array<T> expected = p.x;
    device->forward(
        adapt(device->forward_shard(to.data(), how), residual_on_device.data(), nullptr), s);
    cpu.forward(adapt(forward_shard(p, expected.data(), how), residual.data(), nullptr), s.data());
    CHECK(same_bits(to.get(), expected));

    cpu.forward(adapt(forward_shard(p, y.data()), residual.data(), nullptr), s.data());
    DeviceArray<T> y_on_device(y.data(), size, shift_by(shift, 3));
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
  for (const View& view : {View{30, 99, 3}, View{3, 1, 9}, View{11, 37, 49}, View{4, 34, 121},
                           View{3, 9, 225}, View{2, 5, 283}, View{2, 3, 12545}}) {
    for (const int64_t shift : {0, 1, 7}) {
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
  // Aligned vectors after some values.
  for (const View& view : {View{3, 3, 49}, View{2, 2, 600}, View{2 * 49, 40, 1, 49}}) {
    check::context = name_of<T>(view, kAlike + 1);
    check_problem(Problem<T>(view, 3), kAlike + 1);
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

// The sums of backward with an epilogue, on the device, compared with the host's if `compared`.
template <typename T>
Sums check_backward_sums(const Problem<T>& p, const std::vector<Statistics>& s,
                         const Variant& variant, int64_t shift, bool compared) {
  const int64_t size = p.view.size();
  OnDevice<T> device(p, shift);
  Array<T> y(size);
  ForwardShard forth = forward_shard(p, y.data());
  forth.epilogue = variant.epilogue;
  kernels<T>().forward(forth, s.data());
  DeviceArray<T> y_on_device(y.data(), size, shift_by(shift, 3));
  BackwardShard shard = device.backward_shard(nullptr, Store::kWrite);
  BackwardShard host = backward_shard<T>(p, nullptr);
  shard.epilogue = host.epilogue = variant.epilogue;
  if (variant.in_place) shard.x = host.x = nullptr;
  if (variant.in_place || variant.residual) {
    shard.y = y_on_device.data();
    host.y = y.data();
  }
  const Sums sums = device.backward_sums(shard, s);
  if (compared) BackwardSums<T>(host, s).check(sums);
  return sums;
}

// The other pairs of an activation and the array that decides on its derivative.
const Variant kMoreVariants[] = {{kLeaky, false, false}, {kRelu, true, false}};
const Variant kSumsVariants[] = {kPlain, kVariants[0], kVariants[3], kMoreVariants[0],
                                 kMoreVariants[1]};

template <typename T>
void results_match_the_cpu_for_more_variants() {
  for (const View& view : {View{5, 3, 3}, View{5, 3, 49}, View{3, 3, 600}, View{2, 2, 3000},
                           View{3 * 49, 40, 1, 49}, View{600, 12, 1, 200}, View{40, 33, 1}}) {
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

// Sums over samples of many sizes, of which a block takes several, and over many samples, of which
// a warp takes several.
template <typename T>
void sums_match_the_cpu_for_every_size_of_samples() {
  std::vector<View> views{{300, 40, 1}, {150, 70, 7}, {9000, 8, 1, 9000}};
  for (const int64_t C : {12, 40, 136, 304}) {
    for (const int64_t R : {5, 20, 40, 70, 200}) views.push_back({3 * R, C, 1, R});
  }
  for (const View& view : views) {
    const Problem<T> p(view, 1);
    const std::vector<Statistics> s = statistics_of(p, forward_sums(p));
    for (const int64_t shift : {0, 1}) {
      check::context = name_of<T>(view, shift) + ", sums";
      check_statistics<T>(statistics_of(p, OnDevice<T>(p, shift).forward_sums()), s);
      for (const Variant& variant : kSumsVariants) {
        check_backward_sums(p, s, variant, shift, true);
      }
    }
  }
}

// The sums of rows begin..end, forward, and backward without and with an activation.
template <typename T>
std::vector<Sums> all_sums(OnDevice<T>* device, const View& view, int64_t begin, int64_t end,
                           const std::vector<Statistics>& s) {
  BackwardShard shard = device->backward_shard(nullptr, Store::kWrite);
  shard.view.N = end - begin;
  shard.dy = device->dy.data() + begin * view.C * view.S;
  shard.x = device->x.data() + begin * view.C * view.S;
  std::vector<Sums> all{device->forward_sums(begin, end)};
  for (const Epilogue& epilogue : {Epilogue{}, kRelu}) {
    shard.epilogue = epilogue;
    all.push_back(device->backward_sums(shard, s));
  }
  return all;
}

bool same_sums(const std::vector<Sums>& a, const std::vector<Sums>& b) {
  for (size_t i = 0; i < a.size(); ++i) {
    if (rounded(a[i]) != rounded(b[i])) return false;
  }
  return true;
}

// Blocks that share a channel: some, more than a warp adds, and as many as samples.
template <typename T>
void sums_of_many_slices_are_those_of_few() {
  for (const View& view : {View{700, 2, 64}, View{600, 2, 7}, View{600, 40, 3},
                           View{30 * 40, 8, 1, 30}, View{300, 40, 1}}) {
    const Problem<T> p(view, 1);
    const std::vector<Statistics> s = statistics_of(p, forward_sums(p));
    for (const int64_t shift : {0, 1}) {
      check::context = name_of<T>(view, shift) + ", many slices";
      OnDevice<T> few(p, shift), many(p, shift, 132);
      CHECK(same_sums(all_sums(&few, view, 0, view.N, s), all_sums(&many, view, 0, view.N, s)));
    }
  }
  if (!std::is_same<T, float>::value) return;
  const Problem<T> p({2 * 1100, 2, 1, 2}, 1);
  CHECK(rounded(OnDevice<T>(p, 0, 1000).forward_sums()) == rounded(OnDevice<T>(p).forward_sums()));
}

// The sums of dy of a layer with an activation have the bits of a layer without one that gets the
// gradient of the activation's argument.
template <typename T>
void gated_sums_have_the_bits_of_sums_of_the_gated_gradient() {
  using A = Arithmetic<T>;
  for (const View& view : {View{5, 3, 49}, View{3, 3, 600}, View{2, 2, 3000}, View{3, 2, 77},
                           View{3 * 49, 40, 1, 49}, View{600, 12, 1, 200}, View{40, 33, 1}}) {
    const Problem<T> p(view, 1);
    const std::vector<Statistics> s = statistics_of(p, forward_sums(p));
    for (const Epilogue& epilogue : {kRelu, Epilogue{Activation::kLeakyRelu, 0.25, 0}}) {
      // A quarter of the smallest halves is none.
      if (std::is_same<T, Half>::value && epilogue.slope != 0) continue;
      Problem<T> gated = p;
      for (int64_t i = 0; i < view.size(); ++i) {
        const auto c = static_cast<size_t>(i / view.S % view.C);
        const auto normalize = Normalize<A>::of(s[c], p.gamma[c], p.beta[c]);
        const auto gate = Gate<A>::of_x(normalize, kLargestZero<T>, epilogue.slope);
        narrow(gate(widen(p.dy[i]), widen(p.x[i])), &gated.dy[i]);
      }
      for (const int64_t shift : {0, 1}) {
        check::context = name_of<T>(view, shift) + ", gated";
        OnDevice<T> device(p, shift), plain(gated, shift);
        BackwardShard shard = device.backward_shard(nullptr, Store::kWrite);
        shard.epilogue = epilogue;
        CHECK(rounded(device.backward_sums(shard, s)) == rounded(plain.backward_sums(s)));
      }
    }
  }
}

// Samples whose values differ by many orders of magnitude, and some that are constant.
template <typename T>
void sums_of_samples_of_all_sizes_are_independent_of_splits() {
  constexpr bool kHalf = std::is_same<T, Half>::value;
  for (const View& view : {View{23, 3, 49}, View{12, 2, 600}, View{40, 33, 4}, View{9, 2, 2100},
                           View{9, 2, 77}, View{23 * 30, 40, 1, 30}, View{9 * 600, 3, 1, 600},
                           View{600, 2, 8}, View{300, 2, 64}, View{200, 2, 73}}) {
    const int64_t samples = view.N / view.R, size = view.size() / samples;
    for (const double step : {1.5, 8.0, 1e3}) {
      check::context = name_of<T>(view, step) + ", samples of all sizes";
      Problem<T> p(view, 1);
      for (int64_t n = 0; n < samples; ++n) {
        const double power = static_cast<double>(n * 187 % samples) - samples / 2.0;
        const double scale =
            std::min(std::max(std::pow(step, power), kHalf ? 3e-7 : 1e-15), kHalf ? 3e3 : 1e15);
        // Some constant samples, of which the first are zero.
        for (int64_t i = n * size; i < (n + 1) * size; ++i) {
          p.x[i] = value_of<T>(n % 6 == 3 ? (n < 4 ? 0 : scale) : to_double(p.x[i]) * scale);
          p.dy[i] = value_of<T>(n % 6 == 4 ? 0 : to_double(p.dy[i]) * scale);
        }
      }
      const std::vector<Statistics> s = statistics_of(p, forward_sums(p));
      OnDevice<T> device(p);
      const std::vector<Sums> whole = all_sums(&device, view, 0, view.N, s);
      check_statistics<T>(statistics_of(p, whole[0]), s);
      std::vector<Sums> added(whole.size(), Sums(s.size()));
      const int64_t parts = std::min<int64_t>(samples, 40);
      for (int64_t n = parts - 1; n >= 0; --n) {
        const std::vector<Sums> part = all_sums(&device, view, samples * n / parts * view.R,
                                                samples * (n + 1) / parts * view.R, s);
        for (size_t i = 0; i < added.size(); ++i) {
          for (size_t c = 0; c < s.size(); ++c) added[i][c].add(part[i][c]);
        }
      }
      CHECK(same_sums(added, whole));
      for (const int64_t shift : {0, 1}) {
        for (const int multiprocessors : {1, 132}) {
          OnDevice<T> other(p, shift, multiprocessors);
          CHECK(same_sums(all_sums(&other, view, 0, view.N, s), whole));
        }
      }
    }
  }
}

bool is_infinite(int64_t channel) { return channel % 3 == 1; }

bool finite_channels_are_same(Sums a, Sums b) {
  for (size_t c = 0; c < a.size(); ++c) {
    if (is_infinite(static_cast<int64_t>(c))) a[c] = b[c] = {};
  }
  return rounded(a) == rounded(b);
}

// Where float is not enough: values whose sums overflow, and infinite ones, which must not change
// the sums of other channels.
template <typename T>
void sums_of_extreme_values_are_right() {
  for (const View& view : {View{4, 3, 600}, View{9, 40, 9}, View{5, 6, 49}, View{300, 40, 1, 150},
                           View{5 * 49, 136, 1, 49}, View{40, 33, 1}, View{600, 2, 8},
                           View{400, 2, 7}, View{600, 2, 64}, View{420, 2, 73}}) {
    const Problem<T> p(view, 0);
    const std::vector<Statistics> s = statistics_of(p, forward_sums(p));
    Problem<T> infinite = p, large = p;
    for (int64_t i = 0; i < view.size(); ++i) {
      // Between finite values.
      if (is_infinite(i / view.S % view.C) && i >= view.size() / 4 && i < 2 * view.size() / 3) {
        infinite.x[i] = infinite.dy[i] = value_of<T>(std::numeric_limits<double>::infinity());
      }
      if (i % 40 == 0) large.dy[i] = value_of<T>(1e38);
    }
    Problem<T> infinite_dy = p;
    infinite_dy.dy = infinite.dy;
    for (const int64_t shift : {0, 1}) {
      check::context = name_of<T>(view, shift) + ", extreme values";
      const Sums forward = OnDevice<T>(p, shift).forward_sums();
      const Sums of_infinite = OnDevice<T>(infinite, shift).forward_sums();
      CHECK(finite_channels_are_same(of_infinite, forward));
      CHECK(!std::isfinite(of_infinite[1].first.value()));
      for (const Variant& variant : kSumsVariants) {
        const Sums sums = check_backward_sums(p, s, variant, shift, true);
        CHECK(finite_channels_are_same(check_backward_sums(infinite_dy, s, variant, shift, false),
                                       sums));
        // Half has no numbers as large.
        if (!std::is_same<T, Half>::value) check_backward_sums(large, s, variant, shift, true);
      }
    }
  }
}

// Samples of growing magnitude, far from zero: whole numbers of several words, times powers of 2
// that differ between the chunks of a thread.
template <typename T>
void sums_of_growing_samples_are_right() {
  const int64_t most = std::is_same<T, Half>::value ? 5 : 14;
  for (const View& view : {View{40, 3, 600}, View{40, 6, 49}, View{60, 5, 7}, View{300, 16, 1, 10},
                           View{30 * 49, 33, 1, 49}}) {
    Problem<T> p(view, 1000);
    for (int64_t i = 0; i < view.size(); ++i) {
      const int64_t sample = i / (view.C * view.S * view.R);
      const auto scale = static_cast<double>(int64_t{1} << std::min(sample, most));
      p.x[i] = value_of<T>(static_cast<double>(widen(p.x[i])) * scale);
      p.dy[i] = value_of<T>(static_cast<double>(widen(p.dy[i])) * scale);
    }
    const std::vector<Statistics> s = statistics_of(p, forward_sums(p));
    for (const int64_t shift : {0, 1}) {
      check::context = name_of<T>(view, shift) + ", growing samples";
      check_statistics<T>(statistics_of(p, OnDevice<T>(p, shift).forward_sums()), s);
      for (const Variant& variant : kSumsVariants) check_backward_sums(p, s, variant, shift, true);
    }
  }
}

// Sums of dy of zero, and of products that cancel up to bits that only a pair of floats holds.
void products_that_cancel_leave_their_low_bits() {
  check::context = "products that cancel";
  constexpr int64_t kSize = 2048, kLanes = 32, kVector = 4;
  Random random(5);
  for (int i = 0; i < 200; ++i) {
    Problem<float> p({1, 1, kSize}, 0);
    std::fill_n(p.x.data(), kSize, 0.0f);
    std::fill_n(p.dy.data(), kSize, 0.0f);
    // Added by a lane each.
    int64_t lanes[4];
    for (int k = 0; k < 4; ++k) {
      do lanes[k] = random.below(kLanes);
      while (std::find(lanes, lanes + k, lanes[k]) != lanes + k);
    }
    const float rest = std::ldexp(1.0f, -24 - static_cast<int>(random.below(12)));
    const float gradients[] = {1, 1, -1, -1}, values[] = {1, rest, 1, 0};
    for (int k = 0; k < 4; ++k) {
      p.dy[lanes[k] * kVector] = gradients[k];
      p.x[lanes[k] * kVector] = values[k];
    }
    const ChannelSums sums = OnDevice<float>(p).backward_sums({Statistics{0, 0, 1, 1}})[0];
    CHECK_EQ(sums.first.value(), 0);
    CHECK_EQ(sums.second.value(), double{rest});
  }
}

template <typename T>
void given_statistics_are_those_of_the_host() {
  using A = Arithmetic<T>;
  const std::vector<A> mean{0, 3, -5}, variance{1, 0, 7};
  DeviceArray<A> means(mean.data(), 3), variances(variance.data(), 3);
  DeviceArray<Statistics> device(3);
  const ForwardFinish finish{
      3, 1,  {device.data()}, nullptr,         means.data(), {}, false, nullptr, 0, kEpsilon, {},
      0, {}, means.data(),    variances.data()};
  MUST(cuda_backend()->kernels(Type<T>::kDType).finish_forward(finish, {}, the_stream()));
  const std::vector<Statistics> result = device.get();
  for (size_t c = 0; c < 3; ++c) {
    const Statistics host = given_statistics(mean[c], variance[c], kEpsilon);
    CHECK(std::memcmp(&result[c], &host, sizeof(host)) == 0);
  }
}

// An array of 2^31 values or more, of which the first and the last sample have values.
template <typename T>
class LargeArray {
 public:
  // Null memory if there is not that much.
  LargeArray(int64_t size, int64_t sample, const Array<T>& values, int64_t shift)
      : size_(size), sample_(sample), shift_(shift) {
    if (cuda().malloc(&memory_, static_cast<size_t>(size + 16) * sizeof(T))) {
      cuda().clear_error();
      memory_ = nullptr;
    }
    if (memory_) set(values);
  }
  LargeArray(const LargeArray&) = delete;
  ~LargeArray() {
    if (memory_) MUST(cuda().free(memory_));
  }

  T* data() { return memory_ ? static_cast<T*>(memory_) + shift_ : nullptr; }

  void set(const Array<T>& values) {
    const size_t bytes = static_cast<size_t>(sample_) * sizeof(T);
    MUST(cuda().copy_to_device(data(), values.data(), bytes, the_stream()));
    MUST(cuda().copy_to_device(last(), values.data() + sample_, bytes, the_stream()));
    MUST(cuda().synchronize(the_stream()));
  }

  std::vector<T> get() {
    std::vector<T> values(static_cast<size_t>(2 * sample_));
    const size_t bytes = values.size() / 2 * sizeof(T);
    MUST(cuda().copy_to_host(values.data(), data(), bytes, the_stream()));
    MUST(cuda().copy_to_host(values.data() + sample_, last(), bytes, the_stream()));
    MUST(cuda().synchronize(the_stream()));
    return values;
  }

 private:
  T* last() { return data() + size_ - sample_; }

  int64_t size_, sample_, shift_;
  void* memory_ = nullptr;
};

template <typename T>
void check_large(int64_t S, const Variant& variant, Store how, int64_t shift) {
  // A sample reaches each of a thread's vectors, and takes no more than 33 blocks: the simulator
  // runs only the first and the last of many.
  const Problem<T> p({2, 16000 / static_cast<int64_t>(sizeof(T)) / S, S}, 3);
  const int64_t sample = p.view.C * S, size = ((int64_t{1} << 31) / sample + 1) * sample;
  const View view{size / sample, p.view.C, S};
  LargeArray<T> x(size, sample, p.x, 0), dy(size, sample, p.dy, shift);
  LargeArray<T> to(size, sample, p.x, shift), second(size, sample, p.x, shift);
  if (!x.data() || !dy.data() || !to.data() || !second.data()) {
    std::cout << "too little memory for arrays of 2^31 " << Type<T>::kName << "\n";
    return;
  }
  OnDevice<T> device(p);
  const std::vector<Statistics> s = statistics_of(p, forward_sums(p));
  const Kernels& cpu = kernels<T>();

  Array<T> expected = p.x, expected_second = p.x;
  ForwardShard forth = device.forward_shard(to.data(), how);
  ForwardShard host_forth = forward_shard(p, expected.data(), how);
  forth.view = view;
  forth.x = x.data();
  forth.epilogue = host_forth.epilogue = variant.epilogue;
  if (variant.residual) {
    forth.residual = dy.data();
    host_forth.residual = p.dy.data();
  }
  device.forward(forth, s);
  cpu.forward(host_forth, s.data());
  CHECK(same_bits(to.get(), expected));

  expected = p.x;
  to.set(p.x);
  BackwardShard back = device.backward_shard(to.data(), how);
  BackwardShard host_back = backward_shard(p, expected.data(), how);
  back.view = view;
  back.x = x.data();
  back.dy = dy.data();
  back.epilogue = host_back.epilogue = variant.epilogue;
  back.residual_store = host_back.residual_store = how;
  if (variant.residual) {
    back.y = dy.data();
    back.dresidual = second.data();
    host_back.y = p.dy.data();
    host_back.dresidual = expected_second.data();
  }
  const Sums sums = backward_sums(p, s);
  device.backward(back, s, sums, &sums, p.count());
  cpu.backward(host_back, s.data(), sums.data(), p.count());
  CHECK(same_bits(to.get(), expected));
  CHECK(same_bits(second.get(), expected_second));
}

// Planes that are shorter than a vector, that most warps have the end of (at each place of a
// vector), and larger ones.
template <typename T>
void large_arrays_are_written() {
  for (const int64_t S : {3, 21, 600}) {
    for (const Variant& variant :
         {kPlain, kVariants[0], kVariants[2], kMoreVariants[0], kMoreVariants[1]}) {
      for (const Store how : {Store::kWrite, Store::kAdd}) {
        for (const int64_t shift : {0, 7}) {
          check::context = name_of<T>({int64_t{1} << 31, 2, S}, shift) + ", large";
          check_large<T>(S, variant, how, shift);
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

// The blocks of a kernel of sums that runs two at a time on each multiprocessor, as sum_tiles, or
// one where shared memory is small: no other number takes much less time by the model.
void blocks_fit_every_generation() {
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
  }
}

template <typename T>
void test_all() {
  results_match_the_cpu_for_every_shape<T>();
  sums_are_independent_of_splits_alignment_and_multiprocessors<T>();
  results_are_right_for_extreme_data<T>();
  results_are_right_with_zeros<T>();
  results_match_the_cpu_for_more_variants<T>();
  sums_match_the_cpu_for_every_size_of_samples<T>();
  sums_of_many_slices_are_those_of_few<T>();
  sums_of_extreme_values_are_right<T>();
  sums_of_growing_samples_are_right<T>();
  gated_sums_have_the_bits_of_sums_of_the_gated_gradient<T>();
  sums_of_samples_of_all_sizes_are_independent_of_splits<T>();
  given_statistics_are_those_of_the_host<T>();
  large_arrays_are_written<T>();
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

// --small is for compute-sanitizer. --type=Half, for example, leaves out the others.
int main(int count, char** arguments) {
  using namespace gluon_syncbn;
  if (!cuda_backend()) return 1;
  set_num_threads(2);
  bool small = false;
  std::string type, all = "cuda_kernels";
  for (int i = 1; i < count; ++i) {
    const std::string argument = arguments[i];
    if (argument == "--small") small = true;
    if (argument.rfind("--type=", 0) == 0) type = argument.substr(7);
    all += " " + argument;
  }
  if (!small) {
    divisions_are_exact();
    blocks_fit_every_generation();
    products_that_cancel_leave_their_low_bits();
  }
  for_each_type([&](auto zero) {
    using T = decltype(zero);
    if (!type.empty() && type != Type<T>::kName) return;
    small ? test_few<T>() : test_all<T>();
  });
  return check::finish(all.c_str());
}
