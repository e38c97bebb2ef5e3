// Tests of the sums of the CUDA kernels: against those of the CPU, and their bits.
#ifndef GLUON_SYNCBN_TESTS_CUDA_SUMS_H_
#define GLUON_SYNCBN_TESTS_CUDA_SUMS_H_

#include <limits>
#include <numeric>
#include <type_traits>

#include "cuda/compare.h"

namespace gluon_syncbn {

// The sums of rows begin..end, forward, and backward without and with an activation.
template <typename T>
std::vector<Sums> all_sums(OnDevice<T>* device, const View& view, int64_t begin, int64_t end,
                           const std::vector<Statistics>& s) {
  BackwardShard shard = device->backward_shard(nullptr, WriteMode::kWrite);
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

inline bool same_sums(const std::vector<Sums>& a, const std::vector<Sums>& b) {
  for (size_t i = 0; i < a.size(); ++i) {
    if (rounded(a[i]) != rounded(b[i])) return false;
  }
  return true;
}

// Alignment, and splits into parts leave the bits of sums alone.
// Returns those of forward.
template <typename T>
Sums check_independence(const Problem<T>& p, const std::vector<int64_t>& shifts,
                        const std::vector<int64_t>& splits) {
  const View& view = p.view;
  const std::vector<Statistics> s = statistics_of(p, forward_sums(p));
  OnDevice<T> device(p);
  const std::vector<Sums> whole = all_sums(&device, view, 0, view.N, s);
  for (const int64_t shift : shifts) {
    OnDevice<T> other(p, shift);
    CHECK(same_sums(all_sums(&other, view, 0, view.N, s), whole));
  }
  const int64_t samples = view.N / view.R;
  for (const int64_t split : splits) {
    const int64_t parts = std::min(samples, split);
    std::vector<Sums> added(whole.size(), Sums(s.size()));
    for (int64_t n = parts - 1; n >= 0; --n) {
      const std::vector<Sums> part = all_sums(&device, view, samples * n / parts * view.R,
                                              samples * (n + 1) / parts * view.R, s);
      for (size_t i = 0; i < added.size(); ++i) {
        for (size_t c = 0; c < s.size(); ++c) added[i][c].add(part[i][c]);
      }
    }
    CHECK(same_sums(added, whole));
  }
  return whole[0];
}

template <typename T>
void sums_are_independent_of_splits_and_alignment() {
  for (const View& view : {View{8, 3, 49}, View{6, 40, 25}, View{6, 2, 2048}, View{7, 5, 6},
                           View{8 * 30, 20, 1, 30}, View{5 * 600, 3, 1, 600},
                           View{2 * 700, 40, 1, 700}, View{9 * 20, 300, 1, 20}, View{40, 33, 1}}) {
    check::context = name_of<T>(view, 0);
    check_independence(Problem<T>(view, Type<T>::kLargestOffset), {0, 1, 2, 3, 5},
                       {2, 3, 4, 5, 6, 7, 8});
  }
  // Many records of a channel, which a warp or a block adds.
  for (const View& view : {View{700, 2, 64}, View{600, 2, 7}, View{600, 40, 3},
                           View{30 * 40, 8, 1, 30}, View{300, 40, 1}, View{17000, 2, 1}}) {
    check::context = name_of<T>(view, 1) + ", many records";
    check_independence(Problem<T>(view, 1), {0, 1}, {});
  }
  if (!std::is_same<T, float>::value) return;
  check_independence(Problem<T>({2 * 1100, 2, 1, 2}, 1), {0}, {});
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
  T* const none = nullptr;
  const BackwardShard host = adapted(backward_shard(p, none), variant, y.data(), none);
  const Sums sums = device.backward_sums(
      adapted(device.backward_shard(none, WriteMode::kWrite), variant, y_on_device.data(), none),
      s);
  if (compared) BackwardSums<T>(host, s).check(sums);
  return sums;
}

template <typename T>
void check_sums(const Problem<T>& p, const char* data) {
  const std::vector<Statistics> s = statistics_of(p, forward_sums(p));
  for (const int64_t shift : {0, 1}) {
    check::context = name_of<T>(p.view, shift) + ", sums of " + data;
    check_statistics<T>(statistics_of(p, OnDevice<T>(p, shift).forward_sums()), s);
    for (const Variant& variant : kSumsVariants) check_backward_sums(p, s, variant, shift, true);
  }
}

// Samples of many sizes, of which a block takes several, and many samples, of which a warp takes
// several.
template <typename T>
void sums_match_the_cpu_for_every_size_of_samples() {
  std::vector<View> views{{300, 40, 1}, {150, 70, 7}, {9000, 8, 1, 9000}};
  for (const int64_t C : {12, 40, 136, 304}) {
    for (const int64_t R : {5, 20, 40, 70, 200}) views.push_back({3 * R, C, 1, R});
  }
  for (const View& view : views) check_sums(Problem<T>(view, 1), "many sizes");
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
      const Sums sums = check_independence(p, {0, 1}, {40});
      check_statistics<T>(statistics_of(p, sums), statistics_of(p, forward_sums(p)));
    }
  }
}

inline bool is_infinite(int64_t channel) { return channel % 3 == 1; }

inline bool finite_channels_are_same(Sums a, Sums b) {
  for (size_t c = 0; c < a.size(); ++c) {
    if (is_infinite(static_cast<int64_t>(c))) a[c] = b[c] = {};
  }
  return rounded(a) == rounded(b);
}

// Large gradients, and infinite values, which must not change the sums of other channels.
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
      if (i % 40 == 0) large.dy[i] = value_of<T>(1e36);
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
// that differ between the chunks of a thread. The largest are of floats where one of a sample's
// values differs from the others, by a unit in the last place.
template <typename T>
void sums_of_growing_samples_are_right(bool almost_constant) {
  const int64_t most = std::is_same<T, Half>::value ? 5 : 14;
  for (const View& view : {View{40, 3, 600}, View{40, 6, 49}, View{60, 5, 7}, View{300, 16, 1, 10},
                           View{30 * 49, 33, 1, 49}}) {
    Problem<T> p(view, 1000);
    const int64_t size = view.C * view.S * view.R;
    for (int64_t i = 0; i < view.size(); ++i) {
      const auto scale = static_cast<double>(int64_t{1} << std::min(i / size, most));
      double value = to_double(p.x[i]);
      if (almost_constant) {
        const bool is_first = i % size < view.C * view.S && i % view.S == 0;
        value = is_first ? 1.5 + std::numeric_limits<float>::epsilon() : 1.5;
      }
      p.x[i] = value_of<T>(value * scale);
      p.dy[i] = value_of<T>(to_double(p.dy[i]) * scale);
    }
    check_sums(p, "growing samples");
  }
}

// Sums of dy of zero, and of products that cancel up to bits that only a pair of floats holds.
inline void products_that_cancel_leave_their_low_bits() {
  check::context = "products that cancel";
  constexpr int64_t kSize = 2048, kLanes = 32, kVector = 4;
  Random random(5);
  for (int i = 0; i < 200; ++i) {
    Problem<float> p({1, 1, kSize}, 0);
    std::fill_n(p.x.data(), kSize, 0.0f);
    std::fill_n(p.dy.data(), kSize, 0.0f);
    // Added by a lane each.
    std::vector<int64_t> lanes(kLanes);
    std::iota(lanes.begin(), lanes.end(), 0);
    random.shuffle(&lanes);
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
void test_sums() {
  sums_are_independent_of_splits_and_alignment<T>();
  sums_match_the_cpu_for_every_size_of_samples<T>();
  sums_of_extreme_values_are_right<T>();
  for (const bool almost_constant : {false, true}) {
    sums_of_growing_samples_are_right<T>(almost_constant);
  }
  sums_of_samples_of_all_sizes_are_independent_of_splits<T>();
}

}  // namespace gluon_syncbn

#endif  // GLUON_SYNCBN_TESTS_CUDA_SUMS_H_
