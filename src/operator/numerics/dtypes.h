// The dtypes of data, and dispatch over them.
#ifndef GLUON_SYNCBN_NUMERICS_DTYPES_H_
#define GLUON_SYNCBN_NUMERICS_DTYPES_H_

#include <stdexcept>
#include <type_traits>

#include "numerics/half.h"

namespace gluon_syncbn {

// MXNet's numbers (mshadow/base.h).
enum class DType : int { kFloat32 = 0, kFloat64 = 1, kFloat16 = 2, kBFloat16 = 12 };

// Returns f(T{}) for data of this type. There is no default case, so that the compiler warns if a
// new type is missing here.
template <typename F>
decltype(auto) with_dtype(DType dtype, const F& f) {
  switch (dtype) {
    case DType::kFloat32:
      return f(float{});
    case DType::kFloat64:
      return f(double{});
    case DType::kFloat16:
      return f(Half{});
    case DType::kBFloat16:
      return f(BFloat16{});
  }
  throw std::invalid_argument("no kernels for this dtype");
}

// Returns f(A{}) for the type of gamma, beta and the running statistics with data of this type.
template <typename F>
decltype(auto) with_parameters(DType dtype, const F& f) {
  return with_dtype(dtype, [&](auto zero) { return f(Arithmetic<decltype(zero)>{}); });
}

inline bool has_double_parameters(DType dtype) {
  return with_parameters(dtype, [](auto zero) { return std::is_same_v<decltype(zero), double>; });
}

// Value i of an array of parameters.
inline double parameter(DType dtype, const void* values, int64_t i) {
  return with_parameters(dtype, [&](auto zero) {
    return static_cast<double>(static_cast<const decltype(zero)*>(values)[i]);
  });
}

// Rounds it, and writes it or adds it.
inline void write_parameter(DType dtype, void* values, int64_t i, double value, bool add = false) {
  with_parameters(dtype, [&](auto zero) {
    auto* const to = static_cast<decltype(zero)*>(values) + i;
    const auto rounded = static_cast<decltype(zero)>(value);
    *to = add ? *to + rounded : rounded;
  });
}

}  // namespace gluon_syncbn

#endif  // GLUON_SYNCBN_NUMERICS_DTYPES_H_
