#include <algorithm>
#include <bit>
#include <cmath>
#include <functional>
#include <limits>
#include <type_traits>

#include "decoder.h"

namespace ptxsim {
namespace {

template <typename T>
using Unsigned =
    std::conditional_t<sizeof(T) == 1, uint8_t,
                       std::conditional_t<sizeof(T) == 2, uint16_t,
                                          std::conditional_t<sizeof(T) == 4, uint32_t, uint64_t>>>;

// Between values and registers.
template <typename T>
T get(uint64_t bits) {
  return std::bit_cast<T>(static_cast<Unsigned<T>>(bits));
}
template <typename T>
uint64_t put(T value) {
  return std::bit_cast<Unsigned<T>>(value);
}

template <typename F>
void for_active(uint32_t active, const F& f) {
  if (active == kAllLanes) {
    for (int l = 0; l < kLanes; ++l) f(l);
  } else {
    for (uint32_t rest = active; rest; rest &= rest - 1) f(std::countr_zero(rest));
  }
}

// Functions for all lanes from one for a lane. F is a lambda without captures.
template <typename T, typename F, size_t... kOperand>
void compute_each(const Instruction& i, uint64_t* registers, uint32_t active) {
  uint64_t* const to = registers + i.results[0] * kLanes;
  const uint64_t* const from[] = {registers + i.operands[kOperand] * kLanes...};
  for_active(active, [&](int l) { to[l] = put(F{}(get<T>(from[kOperand][l])...)); });
}

template <typename T, int kOperands, typename F>
Compute each(F) {
  if constexpr (kOperands == 1) return compute_each<T, F, 0>;
  if constexpr (kOperands == 2) return compute_each<T, F, 0, 1>;
  if constexpr (kOperands == 3) return compute_each<T, F, 0, 1, 2>;
  if constexpr (kOperands == 4) return compute_each<T, F, 0, 1, 2, 3>;
}
// Of registers as they are.
template <int kOperands, typename F>
Compute raw(F f) {
  return each<uint64_t, kOperands>(f);
}

// f(T{}) for the type; null for types that f does not take.
template <typename F>
Compute with_unsigned(Type type, const F& f) {
  if (type.size == 2) return f(uint16_t{});
  return type.size == 4 ? f(uint32_t{}) : type.size == 8 ? f(uint64_t{}) : nullptr;
}
template <typename F>
Compute with_integer(Type type, const F& f) {
  if (type.is_real() || type.kind == Type::kPredicate) return nullptr;
  return with_unsigned(type, [&](auto zero) {
    using Signed = std::make_signed_t<decltype(zero)>;
    return type.kind == Type::kSigned ? f(Signed{}) : f(zero);
  });
}
template <typename F>
Compute with_real(Type type, const F& f) {
  if (type.kind != Type::kFloat || type.size < 4) return nullptr;
  return type.size == 4 ? f(float{}) : f(double{});
}
template <typename F>
Compute with_number(Type type, const F& f) {
  return type.is_real() ? with_real(type, f) : with_integer(type, f);
}

template <typename T, typename F>
T wrapped(T a, T b, const F& f) {
  if constexpr (std::is_floating_point_v<T>) return f(a, b);
  return static_cast<T>(f(static_cast<uint64_t>(a), static_cast<uint64_t>(b)));
}

// Arithmetic on floats, doubles and integers.
Compute find_arithmetic(const std::string& name, Type type) {
  return with_number(type, [&](auto zero) -> Compute {
    using T = decltype(zero);
    if (name == "add") return each<T, 2>([](T a, T b) { return wrapped(a, b, std::plus<>()); });
    if (name == "sub") return each<T, 2>([](T a, T b) { return wrapped(a, b, std::minus<>()); });
    if (name == "mul") {
      return each<T, 2>([](T a, T b) { return wrapped(a, b, std::multiplies<>()); });
    }
    if (name == "div") {
      return each<T, 2>([](T a, T b) {
        const bool has_none = !std::is_floating_point_v<T> && b == 0;
        return has_none ? static_cast<T>(-1) : static_cast<T>(a / b);
      });
    }
    return nullptr;
  });
}

Compute find_real(const std::string& name, Type type) {
  return with_real(type, [&](auto zero) -> Compute {
    using T = decltype(zero);
    if (name == "fma") return each<T, 3>([](T a, T b, T c) { return std::fma(a, b, c); });
    if (name == "sqrt") return each<T, 1>([](T a) { return std::sqrt(a); });
    if (name == "rcp") return each<T, 1>([](T a) { return 1 / a; });
    if (name == "abs") return each<T, 1>([](T a) { return std::fabs(a); });
    if (name == "neg") return each<T, 1>([](T a) { return -a; });
    // The sign is that of the first operand.
    if (name == "copysign") return each<T, 2>([](T a, T b) { return std::copysign(b, a); });
    return nullptr;
  });
}

template <typename T>
T insert_bits(T from, T to, unsigned position, unsigned length) {
  constexpr unsigned kBits = 8 * sizeof(T);
  if (length == 0 || position >= kBits) return to;
  const unsigned most = std::min(length, kBits - position);
  const uint64_t ones = most >= 64 ? ~uint64_t{0} : (uint64_t{1} << most) - 1;
  return static_cast<T>((to & ~(ones << position)) | ((from & ones) << position));
}

Compute find_integer(const std::string& name, const std::vector<std::string>& modifiers,
                     Type type) {
  if (name == "mul" && contains(modifiers, "hi")) {
    if (type.kind != Type::kSigned || type.size != 8) return nullptr;
    return each<int64_t, 2>([](int64_t a, int64_t b) {
      return static_cast<int64_t>((static_cast<__int128>(a) * static_cast<__int128>(b)) >> 64);
    });
  }
  return with_integer(type, [&](auto zero) -> Compute {
    using T = decltype(zero);
    constexpr unsigned kBits = 8 * sizeof(T);
    if (name == "mul" && contains(modifiers, "wide") && sizeof(T) == 4) {
      return raw<2>([](uint64_t a, uint64_t b) {
        return static_cast<uint64_t>(get<T>(a)) * static_cast<uint64_t>(get<T>(b));
      });
    }
    if (name == "mad" && contains(modifiers, "lo")) {
      return each<T, 3>([](T a, T b, T c) {
        return wrapped(wrapped(a, b, std::multiplies<>()), c, std::plus<>());
      });
    }
    if (name == "min") return each<T, 2>([](T a, T b) { return std::min(a, b); });
    if (name == "max") return each<T, 2>([](T a, T b) { return std::max(a, b); });
    if (name == "rem") {
      return each<T, 2>([](T a, T b) { return b == 0 ? a : static_cast<T>(a % b); });
    }
    if (name == "abs") {
      return each<T, 1>([](T a) { return a < 0 ? wrapped(T{0}, a, std::minus<>()) : a; });
    }
    if (name == "neg") {
      return each<T, 1>([](T a) { return wrapped(T{0}, a, std::minus<>()); });
    }
    if (name == "shr") {
      return raw<2>([](uint64_t a, uint64_t by) {
        if (by < kBits) return put(static_cast<T>(get<T>(a) >> by));
        return put(get<T>(a) < 0 ? static_cast<T>(-1) : T{0});
      });
    }
    if (name == "bfe" && !std::is_signed_v<T>) {
      return raw<3>([](uint64_t a, uint64_t position, uint64_t length) {
        const uint64_t from = (position & 255) < kBits ? get<T>(a) >> (position & 255) : 0;
        return (length & 255) < kBits ? from & ((uint64_t{1} << (length & 255)) - 1) : from;
      });
    }
    return nullptr;
  });
}

Compute find_bits(const std::string& name, const std::vector<std::string>& modifiers, Type type) {
  const bool inverts = type.kind == Type::kPredicate && name == "not";
  if (inverts) return raw<1>([](uint64_t a) { return a == 0; });
  if (name == "and") return raw<2>([](uint64_t a, uint64_t b) { return a & b; });
  if (name == "or") return raw<2>([](uint64_t a, uint64_t b) { return a | b; });
  if (name == "xor") return raw<2>([](uint64_t a, uint64_t b) { return a ^ b; });
  if (name == "selp") {
    return raw<3>([](uint64_t a, uint64_t b, uint64_t predicate) { return predicate ? a : b; });
  }
  if (name == "shf" && contains(modifiers, "wrap")) {
    if (contains(modifiers, "r")) {
      return raw<3>([](uint64_t low, uint64_t high, uint64_t by) {
        return (high << 32 | low) >> (by & 31) & 0xffffffffu;
      });
    }
    return raw<3>([](uint64_t low, uint64_t high, uint64_t by) {
      return (high << 32 | low) << (by & 31) >> 32;
    });
  }
  return with_unsigned(type, [&](auto zero) -> Compute {
    using T = decltype(zero);
    constexpr unsigned kBits = 8 * sizeof(T);
    if (name == "not") return each<T, 1>([](T a) { return static_cast<T>(~a); });
    if (name == "clz") return each<T, 1>([](T a) { return static_cast<T>(std::countl_zero(a)); });
    if (name == "shl") {
      return raw<2>([](uint64_t a, uint64_t by) {
        return by < kBits ? put(static_cast<T>(a << by)) : uint64_t{0};
      });
    }
    if (name == "bfi") {
      return raw<4>([](uint64_t from, uint64_t to, uint64_t position, uint64_t length) {
        return put(insert_bits(get<T>(from), get<T>(to), position & 255, length & 255));
      });
    }
    return nullptr;
  });
}

Compute find_comparison(const std::string& how, Type type) {
  return with_number(type, [&](auto zero) -> Compute {
    using T = decltype(zero);
    constexpr bool kOrdered = !std::is_floating_point_v<T>;
    if (how == "eq") return each<T, 2>([](T a, T b) { return a == b; });
    // False of a NaN.
    if (how == "ne") return each<T, 2>([](T a, T b) { return a < b || a > b; });
    if (how == "lt") return each<T, 2>([](T a, T b) { return a < b; });
    if (how == "le") return each<T, 2>([](T a, T b) { return a <= b; });
    if (how == "gt") return each<T, 2>([](T a, T b) { return a > b; });
    if (how == "ge") return each<T, 2>([](T a, T b) { return a >= b; });
    if (kOrdered) return nullptr;
    // True of a NaN.
    if (how == "equ") return each<T, 2>([](T a, T b) { return !(a < b || a > b); });
    if (how == "neu") return each<T, 2>([](T a, T b) { return !(a == b); });
    if (how == "ltu") return each<T, 2>([](T a, T b) { return !(a >= b); });
    if (how == "leu") return each<T, 2>([](T a, T b) { return !(a > b); });
    if (how == "gtu") return each<T, 2>([](T a, T b) { return !(a <= b); });
    if (how == "geu") return each<T, 2>([](T a, T b) { return !(a < b); });
    return nullptr;
  });
}

// bfloat16, of which there are only conversions from float.
uint16_t bfloat_of(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  if (std::isnan(x)) return 0x7fff;
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

// The nearest integer. Of what has none, what GPUs give.
int64_t to_whole(float x) {
  using Limits = std::numeric_limits<int64_t>;
  if (std::isnan(x) || x <= static_cast<float>(Limits::min())) return Limits::min();
  if (x >= std::ldexp(1.0f, Limits::digits)) return Limits::max();
  return static_cast<int64_t>(std::nearbyint(x));
}

Compute find_conversion(const Instruction& i, const std::vector<std::string>& modifiers) {
  const Type to = i.type, from = i.from;
  const auto is_real = [](Type type, int size) {
    return type.kind == Type::kFloat && type.size == size && type.packed == 1;
  };
  // Two floats to a register of two, whose upper half is the first operand.
  if (to.packed > 1 && is_real(from, 4) && i.operands.size() == 2) {
    if (to.kind == Type::kBFloat) {
      return each<float, 2>(
          [](float high, float low) { return uint32_t{bfloat_of(high)} << 16 | bfloat_of(low); });
    }
    return each<float, 2>([](float high, float low) {
      const auto half = [](float x) { return put(static_cast<_Float16>(x)); };
      return static_cast<uint32_t>(half(high) << 16 | half(low));
    });
  }
  if (is_real(from, 4) && is_real(to, 2)) {
    return each<float, 1>([](float x) { return static_cast<_Float16>(x); });
  }
  if (is_real(from, 2) && is_real(to, 4)) {
    return each<_Float16, 1>([](_Float16 x) { return static_cast<float>(x); });
  }
  if (from.is_real() && !to.is_real()) {
    const bool is_known = is_real(from, 4) && to.kind == Type::kSigned && to.size == 8;
    return is_known && contains(modifiers, "rni")
               ? each<float, 1>([](float x) { return to_whole(x); })
               : nullptr;
  }
  return with_number(from, [&](auto f) {
    using From = decltype(f);
    return with_number(to, [&](auto t) -> Compute {
      return each<From, 1>([](From x) { return static_cast<decltype(t)>(x); });
    });
  });
}

// Several registers from one, or one from several, the lowest first.
void unpack(const Instruction& i, uint64_t* registers, uint32_t active) {
  const int bits = 8 * i.type.size / static_cast<int>(i.results.size());
  for_active(active, [&](int l) {
    const uint64_t whole = registers[i.operands[0] * kLanes + l];
    for (size_t n = 0; n < i.results.size(); ++n) {
      const uint64_t part = whole >> (bits * n) & ((uint64_t{1} << bits) - 1);
      registers[i.results[n] * kLanes + l] = part;
    }
  });
}

void pack(const Instruction& i, uint64_t* registers, uint32_t active) {
  const int bits = 8 * i.type.size / static_cast<int>(i.operands.size());
  for_active(active, [&](int l) {
    uint64_t whole = 0;
    for (size_t n = 0; n < i.operands.size(); ++n) {
      const uint64_t part = registers[i.operands[n] * kLanes + l];
      whole |= (part & ((uint64_t{1} << bits) - 1)) << (bits * n);
    }
    registers[i.results[0] * kLanes + l] = whole;
  });
}

Compute find_move(const Instruction& i) {
  if (i.results.size() > 1) return unpack;
  if (i.operands.size() > 1) return pack;
  return raw<1>([](uint64_t a) { return a; });
}

}  // namespace

Compute find_compute(const std::string& name, const std::vector<std::string>& modifiers,
                     const Instruction& i) {
  if (name == "mov" || name == "cvta") return find_move(i);
  if (name == "cvt") return find_conversion(i, modifiers);
  if (name == "setp" && !modifiers.empty()) return find_comparison(modifiers[0], i.type);
  if (i.type.packed > 1) return nullptr;
  // The product of two integers has twice the bits, of which "lo" is a half.
  if (name == "mul" && !i.type.is_real() && !contains(modifiers, "lo")) {
    return find_integer(name, modifiers, i.type);
  }
  for (const Compute found :
       {find_arithmetic(name, i.type), find_real(name, i.type),
        find_integer(name, modifiers, i.type), find_bits(name, modifiers, i.type)}) {
    if (found) return found;
  }
  return nullptr;
}

}  // namespace ptxsim
