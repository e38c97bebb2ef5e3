// Compares the results of the CUDA kernels with those of the CPU.
#ifndef GLUON_SYNCBN_TESTS_COMPARE_H_
#define GLUON_SYNCBN_TESTS_COMPARE_H_

#include <algorithm>
#include <cmath>
#include <iostream>

#include "cpu/kernels.h"
#include "cuda/device_fixture.h"

namespace gluon_syncbn {

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

// What follows the normalization, whether backward has y in place of x, and whether of dx and
// dresidual one is written and the other added to what is there.
struct Variant {
  Epilogue epilogue;
  bool residual, in_place, mixed = false;
};

inline constexpr Epilogue kRelu{Activation::kRelu, 0, 0}, kLeaky{Activation::kLeakyRelu, 0.01, 0};
inline const Variant kPlain{{}, false, false};
inline const Variant kVariants[] = {{kRelu, false, false},
                                    {{}, true, false},
                                    {kLeaky, true, false, true},
                                    {{Activation::kLeakyRelu, 0.01, 0.1}, false, true}};
// The other pairs of an activation and the array that decides on its derivative, and modes.
inline const Variant kMoreVariants[] = {{kLeaky, false, false},
                                        {kRelu, true, false},
                                        {kRelu, true, false, true},
                                        {kLeaky, true, false}};
inline const Variant kSumsVariants[] = {kPlain, kVariants[0], kVariants[3], kMoreVariants[0],
                                        kMoreVariants[1]};

template <typename T>
ForwardShard adapted(ForwardShard shard, const Variant& variant, const T* residual) {
  shard.epilogue = variant.epilogue;
  if (variant.residual) shard.residual = residual;
  return shard;
}

template <typename T>
BackwardShard adapted(BackwardShard shard, const Variant& variant, const T* y, T* dresidual) {
  shard.epilogue = variant.epilogue;
  const bool adds = (shard.mode == WriteMode::kAdd) != variant.mixed;
  shard.residual_mode = adds ? WriteMode::kAdd : WriteMode::kWrite;
  if (variant.in_place) shard.x = nullptr;
  if (variant.in_place || variant.residual) shard.y = y;
  if (variant.residual) shard.dresidual = dresidual;
  return shard;
}

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
    const bool activates = e.activation != Activation::kNone;
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
      const double y = shard.y ? at(shard.y, i) : 0;
      const double x = shard.x ? at(shard.x, i) - s[c].mean
                               : (y > 0 ? y : y / e.slope) - parameter(shard.beta, c);
      double gradient = at(shard.dy, i);
      if (activates) gradient = gates[c](at(shard.dy, i), at(shard.y ? shard.y : shard.x, i));
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
  for (const WriteMode mode : {WriteMode::kWrite, WriteMode::kAdd}) {
    const bool gamma = mode == WriteMode::kWrite;
    const auto scaled = [&](auto shard) {
      if (!gamma) shard.gamma = nullptr;
      return shard;
    };
    const auto forward = [&](ForwardShard shard, const T* added) {
      return adapted(scaled(shard), variant, added);
    };
    // Of vectors of two doubles, one is aligned like x, and one is not.
    DeviceArray<T> to(p.x.data(), size, shift_by(shift, gamma == (shift < 4) ? 2 : 1));
    Array<T> expected = p.x;
    device->forward(forward(device->forward_shard(to.data(), mode), residual_on_device.data()), s);
    cpu.forward(forward(forward_shard(p, expected.data(), mode), residual.data()), s.data());
    CHECK(same_bits(to.get(), expected));

    cpu.forward(forward(forward_shard(p, y.data()), residual.data()), s.data());
    DeviceArray<T> y_on_device(y.data(), size, shift_by(shift, 3));
    DeviceArray<T> dresidual(p.x.data(), size, shift);
    Array<T> expected_dresidual = p.x;
    to.set(p.x.data());
    expected = p.x;
    BackwardShard shard = adapted(scaled(device->backward_shard(to.data(), mode)), variant,
                                  y_on_device.data(), dresidual.data());
    BackwardShard host = adapted(scaled(backward_shard(p, expected.data(), mode)), variant,
                                 y.data(), expected_dresidual.data());
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
      const A before = gamma ? 0 : p.beta[c];
      const double inverse =
          variant.in_place ? 1 / effective_gamma(p.gamma[c], variant.epilogue) : s[c].inv_std;
      const double dgamma = gamma ? own[c].second.value() * inverse : 0;
      CHECK_EQ(parameters.first[c], before + static_cast<A>(dgamma));
      CHECK_EQ(parameters.second[c], before + static_cast<A>(own[c].first.value()));
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
void check_in_place(const Problem<T>& p) {
  for (const Variant& variant : {kPlain, kVariants[0]}) {
    OnDevice<T> device(p);
    const std::vector<Statistics> s = statistics_of(p, device.forward_sums());
    const Sums sums = device.backward_sums(s);
    const Kernels& cpu = kernels<T>();
    const T* const none = nullptr;
    T* const no_gradient = nullptr;
    Array<T> expected = p.dy;
    device.backward(adapted(device.backward_shard(device.dy.data(), WriteMode::kWrite), variant,
                            none, no_gradient),
                    s, sums, &sums, p.count());
    cpu.backward(adapted(backward_shard(p, expected.data()), variant, none, no_gradient), s.data(),
                 sums.data(), p.count());
    CHECK(same_bits(device.dy.get(), expected));
    device.forward(adapted(device.forward_shard(device.x.data(), WriteMode::kWrite), variant, none),
                   s);
    cpu.forward(adapted(forward_shard(p, expected.data()), variant, none), s.data());
    CHECK(same_bits(device.x.get(), expected));
  }
}

template <typename T>
void check_views(const std::vector<View>& views, const std::vector<int64_t>& shifts) {
  for (const View& view : views) {
    for (const int64_t shift : shifts) {
      check::context = name_of<T>(view, shift);
      check_problem(Problem<T>(view, 3), shift);
    }
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
void check_large(int64_t S, const Variant& variant, WriteMode mode, int64_t shift) {
  // A sample reaches each of a thread's vectors, and takes no more than 33 blocks: the simulator
  // runs only the first and the last of many.
  const Problem<T> p({2, 16000 / static_cast<int64_t>(sizeof(T)) / S, S}, 3);
  const int64_t sample = p.view.C * S, size = ((int64_t{1} << 31) / sample + 1) * sample;
  const View view{size / sample, p.view.C, S};
  LargeArray<T> x(size, sample, p.x, 0), dy(size, sample, p.dy, shift);
  LargeArray<T> to(size, sample, p.x, shift), dresidual(size, sample, p.x, shift);
  if (!x.data() || !dy.data() || !to.data() || !dresidual.data()) {
    std::cout << "too little memory for arrays of 2^31 " << Type<T>::kName << "\n";
    return;
  }
  OnDevice<T> device(p);
  const std::vector<Statistics> s = statistics_of(p, forward_sums(p));
  const Kernels& cpu = kernels<T>();

  Array<T> expected = p.x, expected_dresidual = p.x;
  ForwardShard forth = adapted(device.forward_shard(to.data(), mode), variant, dy.data());
  forth.view = view;
  forth.x = x.data();
  device.forward(forth, s);
  cpu.forward(adapted(forward_shard(p, expected.data(), mode), variant, p.dy.data()), s.data());
  CHECK(same_bits(to.get(), expected));

  expected = p.x;
  to.set(p.x);
  BackwardShard back =
      adapted(device.backward_shard(to.data(), mode), variant, dy.data(), dresidual.data());
  back.view = view;
  back.x = x.data();
  back.dy = dy.data();
  const Sums sums = backward_sums(p, s);
  device.backward(back, s, sums, &sums, p.count());
  cpu.backward(adapted(backward_shard(p, expected.data(), mode), variant, p.dy.data(),
                       expected_dresidual.data()),
               s.data(), sums.data(), p.count());
  CHECK(same_bits(to.get(), expected));
  CHECK(same_bits(dresidual.get(), expected_dresidual));
}

}  // namespace gluon_syncbn

#endif  // GLUON_SYNCBN_TESTS_COMPARE_H_
