// Data for the kernels, and their results.
#ifndef GLUON_SYNCBN_TESTS_KERNELS_FIXTURE_H_
#define GLUON_SYNCBN_TESTS_KERNELS_FIXTURE_H_

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "check.h"
#include "cpu/kernels.h"
#include "reference.h"

namespace gluon_syncbn {

inline constexpr double kEpsilon = 1e-5;

// A type of data, and the largest offset of data in tests.
template <typename T>
struct Type;
template <>
struct Type<float> {
  static constexpr DType kDType = DType::kFloat32;
  static constexpr const char* kName = "float";
  static constexpr double kLargestOffset = 1e5;
};
template <>
struct Type<double> {
  static constexpr DType kDType = DType::kFloat64;
  static constexpr const char* kName = "double";
  static constexpr double kLargestOffset = 1e10;
};
template <>
struct Type<Half> {
  static constexpr DType kDType = DType::kFloat16;
  static constexpr const char* kName = "Half";
  static constexpr double kLargestOffset = 6e4;
};
template <>
struct Type<BFloat16> {
  static constexpr DType kDType = DType::kBFloat16;
  static constexpr const char* kName = "BFloat16";
  static constexpr double kLargestOffset = 1e5;
};

// Calls f with a zero of each type of data.
template <typename F>
void for_each_type(const F& f) {
  f(float{});
  f(double{});
  f(Half{});
  f(BFloat16{});
}

template <typename T>
const Kernels& kernels() {
  return cpu_kernels(Type<T>::kDType);
}

// x rounded to T, via float unless T is double.
template <typename T>
T value_of(double x) {
  T value;
  narrow(to_float(x), &value);
  return value;
}
template <>
inline double value_of(double x) {
  return x;
}

template <typename T>
T rounded_to(Arithmetic<T> value) {
  T result;
  narrow(value, &result);
  return result;
}

template <typename T>
double to_double(T x) {
  return double{widen(x)};
}

// Values between guard zones of NaN: writes there are detected, and reads make the result a NaN.
// `shift` changes the alignment of the values.
template <typename T>
class Array {
 public:
  explicit Array(int64_t size, int64_t shift = 0) : size_(size), begin_(kGuard + shift) {
    memory_.resize(static_cast<size_t>(begin_ + size + kGuard));
    std::memset(memory_.data(), kNaNByte, memory_.size() * sizeof(T));
  }

  int64_t size() const { return size_; }
  T* data() { return memory_.data() + begin_; }
  const T* data() const { return memory_.data() + begin_; }
  T& operator[](int64_t i) { return data()[i]; }
  const T& operator[](int64_t i) const { return data()[i]; }

  Array shifted(int64_t shift) const {
    Array copy(size_, shift);
    std::copy(data(), data() + size_, copy.data());
    return copy;
  }

  bool guards_intact() const {
    const auto untouched = [](const T* from, const T* to) {
      const auto* bytes = reinterpret_cast<const unsigned char*>(from);
      return std::all_of(bytes, reinterpret_cast<const unsigned char*>(to),
                         [](unsigned char byte) { return byte == kNaNByte; });
    };
    return untouched(memory_.data(), data()) &&
           untouched(data() + size_, memory_.data() + memory_.size());
  }

  // The same values in the type that they are computed in.
  Array<Arithmetic<T>> widened() const {
    Array<Arithmetic<T>> copy(size_);
    for (int64_t i = 0; i < size_; ++i) copy[i] = widen((*this)[i]);
    return copy;
  }

  static Array rounded(const Array<Arithmetic<T>>& values) {
    Array copy(values.size());
    for (int64_t i = 0; i < copy.size_; ++i) copy[i] = rounded_to<T>(values[i]);
    return copy;
  }

  // With other values added, as MXNet does.
  Array plus(const Array& more) const {
    Array sum(size_);
    for (int64_t i = 0; i < size_; ++i) {
      const Arithmetic<T> exact = widen((*this)[i]) + widen(more[i]);
      sum[i] = rounded_to<T>(exact);
      // Truncated, not rounded: the next number towards zero, where it was rounded away from it.
      if constexpr (std::is_same_v<T, BFloat16>) {
        if (std::abs(widen(sum[i])) > std::abs(exact)) --sum[i].bits;
      }
    }
    return sum;
  }

  bool operator==(const Array& other) const {
    return size_ == other.size_ &&
           std::memcmp(data(), other.data(), static_cast<size_t>(size_) * sizeof(T)) == 0;
  }

 private:
  static constexpr int64_t kGuard = 64;
  static constexpr unsigned char kNaNByte = 0xff;
  std::vector<T> memory_;
  int64_t size_, begin_;
};

template <typename T>
struct Problem {
  using Parameter = Arithmetic<T>;

  View view;
  Array<T> x, dy;
  Array<Parameter> gamma, beta;

  Problem(View v, double offset) : view(v), x(v.size()), dy(v.size()), gamma(v.C), beta(v.C) {
    Random random(1);
    for (int64_t i = 0; i < v.size(); ++i) {
      // Mean and deviation differ between channels.
      const int64_t c = i / v.S % v.C;
      x[i] = value_of<T>(offset * (c % 2 ? -1 : 1) + 0.1 * c + (1 + c % 3) * random.normal());
      dy[i] = value_of<T>(0.3 + random.normal());
    }
    for (int64_t c = 0; c < v.C; ++c) {
      gamma[c] = value_of<Parameter>(random.normal());
      beta[c] = value_of<Parameter>(random.normal());
    }
  }

  Problem(View v, Array<T> data, Array<T> gradient, Array<Parameter> scale, Array<Parameter> shift)
      : view(v),
        x(std::move(data)),
        dy(std::move(gradient)),
        gamma(std::move(scale)),
        beta(std::move(shift)) {}

  Problem<Parameter> widened() const { return {view, x.widened(), dy.widened(), gamma, beta}; }

  Problem shifted(int64_t by) const {
    Problem copy = *this;
    copy.x = x.shifted(by);
    copy.dy = dy.shifted(by + 1);
    return copy;
  }

  double count() const { return static_cast<double>(view.N * view.S); }

  bool guards_intact() const {
    return x.guards_intact() && dy.guards_intact() && gamma.guards_intact() && beta.guards_intact();
  }
};

using Sums = std::vector<ChannelSums>;

// The rounded sums, which do not depend on the order.
inline std::vector<Rounded> rounded(const Sums& sums) {
  std::vector<Rounded> result;
  for (const ChannelSums& s : sums) {
    result.emplace_back(s.first);
    result.emplace_back(s.second);
  }
  return result;
}

template <typename T>
Sums forward_sums(const Problem<T>& p) {
  Sums sums(static_cast<size_t>(p.view.C));
  kernels<T>().forward_sums(p.view, p.x.data(), sums.data());
  return sums;
}

template <typename Shard, typename T>
Shard shard_of(const Problem<T>& p, WriteMode mode) {
  Shard shard;
  shard.view = p.view;
  shard.x = p.x.data();
  shard.gamma = p.gamma.data();
  shard.beta = p.beta.data();
  shard.mode = mode;
  return shard;
}

template <typename T>
ForwardShard forward_shard(const Problem<T>& p, T* y, WriteMode mode = WriteMode::kWrite) {
  auto shard = shard_of<ForwardShard>(p, mode);
  shard.y = y;
  return shard;
}

template <typename T>
BackwardShard backward_shard(const Problem<T>& p, T* dx, WriteMode mode = WriteMode::kWrite) {
  auto shard = shard_of<BackwardShard>(p, mode);
  shard.dy = p.dy.data();
  shard.dx = dx;
  return shard;
}

template <typename T>
Sums backward_sums(const Problem<T>& p, const std::vector<Statistics>& s) {
  Sums sums(static_cast<size_t>(p.view.C));
  BackwardShard shard = backward_shard<T>(p, nullptr);
  shard.sums = sums.data();
  kernels<T>().backward_sums(shard, s.data());
  return sums;
}

template <typename T>
std::vector<Statistics> statistics_of(const Problem<T>& p, const Sums& sums) {
  std::vector<Statistics> s;
  for (const ChannelSums& sum : sums) s.push_back(batch_statistics(sum, p.count(), kEpsilon));
  return s;
}

// All results of the kernels for a problem.
template <typename T>
struct Results {
  Sums sums, gradient_sums;
  std::vector<Statistics> s;
  Array<T> y, dx, constant_dx;

  explicit Results(const Problem<T>& p, int64_t shift = 0)
      : sums(forward_sums(p)),
        s(statistics_of(p, sums)),
        y(p.view.size(), shift),
        dx(p.view.size(), shift + 1),
        constant_dx(p.view.size(), shift + 2) {
    gradient_sums = backward_sums(p, s);
    const Kernels& k = kernels<T>();
    k.forward(forward_shard(p, y.data()), s.data());
    k.backward(backward_shard(p, dx.data()), s.data(), gradient_sums.data(), p.count());
    const Sums zeros(static_cast<size_t>(p.view.C));
    k.backward(backward_shard(p, constant_dx.data()), s.data(), zeros.data(), 0);
    CHECK(y.guards_intact() && dx.guards_intact() && constant_dx.guards_intact());
    CHECK(p.guards_intact());
  }

  void check_same_bits(const Results& other) const {
    CHECK(rounded(sums) == rounded(other.sums));
    CHECK(rounded(gradient_sums) == rounded(other.gradient_sums));
    CHECK(y == other.y);
    CHECK(dx == other.dx);
    CHECK(constant_dx == other.constant_dx);
  }
};

template <typename T>
std::string name_of(View v, double offset) {
  return std::string(Type<T>::kName) + " (" + std::to_string(v.N) + ", " + std::to_string(v.C) +
         ", " + std::to_string(v.S) + "), rows of a sample: " + std::to_string(v.R) + ", at " +
         std::to_string(offset);
}

}  // namespace gluon_syncbn

#endif  // GLUON_SYNCBN_TESTS_KERNELS_FIXTURE_H_
