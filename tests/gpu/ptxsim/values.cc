#include "values.h"

#include <bit>
#include <cmath>
#include <functional>
#include <limits>
#include <type_traits>

#include "text.h"

namespace ptxsim {
namespace {

struct BFloat {
  uint16_t bits;
};

template <typename T>
constexpr bool kReal =
    std::is_floating_point_v<T> || std::is_same_v<T, _Float16> || std::is_same_v<T, BFloat>;

template <int kSize>
struct UnsignedOf;
template <>
struct UnsignedOf<1> {
  using type = uint8_t;
};
template <>
struct UnsignedOf<2> {
  using type = uint16_t;
};
template <>
struct UnsignedOf<4> {
  using type = uint32_t;
};
template <>
struct UnsignedOf<8> {
  using type = uint64_t;
};
template <typename T>
using Unsigned = typename UnsignedOf<sizeof(T)>::type;

// Between values and registers.
template <typename T>
T get(uint64_t bits) {
  return std::bit_cast<T>(static_cast<Unsigned<T>>(bits));
}
template <typename T>
uint64_t put(T value) {
  return std::bit_cast<Unsigned<T>>(value);
}

// Functions for all lanes from one for a lane. F is a lambda without captures.
template <typename T, int kOperands, typename F>
void compute_each(const Instruction& i, uint64_t* registers, uint32_t active) {
  const auto of = [&](int n) { return registers + i.operands[n] * kLanes; };
  uint64_t* const to = registers + i.results[0] * kLanes;
  const uint64_t* const a = of(0);
  const uint64_t* const b = kOperands > 1 ? of(1) : a;
  const uint64_t* const c = kOperands > 2 ? of(2) : a;
  const uint64_t* const d = kOperands > 3 ? of(3) : a;
  const auto lane = [&](int l) {
    if constexpr (kOperands == 1) {
      to[l] = put(F{}(get<T>(a[l])));
    } else if constexpr (kOperands == 2) {
      to[l] = put(F{}(get<T>(a[l]), get<T>(b[l])));
    } else if constexpr (kOperands == 3) {
      to[l] = put(F{}(get<T>(a[l]), get<T>(b[l]), get<T>(c[l])));
    } else {
      to[l] = put(F{}(get<T>(a[l]), get<T>(b[l]), get<T>(c[l]), get<T>(d[l])));
    }
  };
  if (active == kAllLanes) {
    for (int l = 0; l < kLanes; ++l) lane(l);
  } else {
    for (uint32_t rest = active; rest; rest &= rest - 1) lane(std::countr_zero(rest));
  }
}

template <typename T, int kOperands, typename F>
Compute each(F) {
  return compute_each<T, kOperands, F>;
}
// Of registers as they are.
template <int kOperands, typename F>
Compute raw(F) {
  return compute_each<uint64_t, kOperands, F>;
}

// f(T{}) for the type; null for types that f does not take.
template <typename F>
Compute with_unsigned(Type type, const F& f) {
  switch (type.size) {
    case 1:
      return f(uint8_t{});
    case 2:
      return f(uint16_t{});
    case 4:
      return f(uint32_t{});
    default:
      return f(uint64_t{});
  }
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
template <typename F>
Compute with_any(Type type, const F& f) {
  if (type.kind == Type::kBFloat) return f(BFloat{});
  if (type.kind == Type::kFloat && type.size == 2) return f(_Float16{});
  return with_number(type, f);
}

template <typename T, typename F>
T wrapped(T a, T b, const F& f) {
  if constexpr (std::is_floating_point_v<T>) {
    return f(a, b);
  } else {
    return static_cast<T>(f(static_cast<uint64_t>(a), static_cast<uint64_t>(b)));
  }
}

template <typename T>
T divide(T a, T b) {
  if constexpr (std::is_floating_point_v<T>) {
    return a / b;
  } else {
    if (b == 0) return static_cast<T>(~uint64_t{0});
    if (std::is_signed_v<T> && b == static_cast<T>(-1)) return wrapped(T{0}, a, std::minus<>());
    return static_cast<T>(a / b);
  }
}

template <typename T>
T smaller(T a, T b) {
  if constexpr (std::is_floating_point_v<T>) {
    if (std::isnan(a)) return b;
    if (std::isnan(b)) return a;
    if (a == b) return std::signbit(a) ? a : b;
  }
  return a < b ? a : b;
}

template <typename T>
T larger(T a, T b) {
  if constexpr (std::is_floating_point_v<T>) {
    if (std::isnan(a)) return b;
    if (std::isnan(b)) return a;
    if (a == b) return std::signbit(a) ? b : a;
  }
  return a > b ? a : b;
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
    if (name == "div") return each<T, 2>([](T a, T b) { return divide(a, b); });
    if (name == "min") return each<T, 2>([](T a, T b) { return smaller(a, b); });
    if (name == "max") return each<T, 2>([](T a, T b) { return larger(a, b); });
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
T high_product(T a, T b) {
  using Wide = std::conditional_t<std::is_signed_v<T>, __int128, unsigned __int128>;
  return static_cast<T>((static_cast<Wide>(a) * static_cast<Wide>(b)) >> (8 * sizeof(T)));
}

template <typename T>
uint64_t extract_bits(T a, unsigned position, unsigned length) {
  constexpr unsigned kBits = 8 * sizeof(T);
  if (length == 0) return 0;
  const T sign = a < 0 ? static_cast<T>(-1) : T{0};
  const T shifted = position >= kBits ? sign : static_cast<T>(a >> position);
  if (length >= kBits) return put(shifted);
  const uint64_t mask = (uint64_t{1} << length) - 1, field = put(shifted) & mask;
  const bool negative = std::is_signed_v<T> && (field >> (length - 1) & 1);
  return put(static_cast<T>(negative ? field | ~mask : field));
}

template <typename T>
T insert_bits(T from, T to, unsigned position, unsigned length) {
  constexpr unsigned kBits = 8 * sizeof(T);
  if (length == 0 || position >= kBits) return to;
  const unsigned most = std::min(length, kBits - position);
  const uint64_t ones = most >= 64 ? ~uint64_t{0} : (uint64_t{1} << most) - 1;
  const T mask = static_cast<T>(ones << position);
  return static_cast<T>((to & ~mask) | ((uint64_t{from} << position) & mask));
}

Compute find_integer(const std::string& name, const std::vector<std::string>& modifiers,
                     Type type) {
  const bool wide = contains(modifiers, "wide"), high = contains(modifiers, "hi");
  return with_integer(type, [&](auto zero) -> Compute {
    using T = decltype(zero);
    constexpr unsigned kBits = 8 * sizeof(T);
    if (name == "mul" && wide) {
      return raw<2>([](uint64_t a, uint64_t b) {
        const uint64_t product =
            static_cast<uint64_t>(get<T>(a)) * static_cast<uint64_t>(get<T>(b));
        return sizeof(T) == 2 ? product & 0xffffffffu : product;
      });
    }
    if (name == "mad" && wide) {
      return raw<3>([](uint64_t a, uint64_t b, uint64_t c) {
        const uint64_t sum =
            static_cast<uint64_t>(get<T>(a)) * static_cast<uint64_t>(get<T>(b)) + c;
        return sizeof(T) == 2 ? sum & 0xffffffffu : sum;
      });
    }
    if (name == "mul" && high) return each<T, 2>([](T a, T b) { return high_product(a, b); });
    if (name == "mad" && high) {
      return each<T, 3>(
          [](T a, T b, T c) { return wrapped(high_product(a, b), c, std::plus<>()); });
    }
    if (name == "mad") {
      return each<T, 3>([](T a, T b, T c) {
        return wrapped(wrapped(a, b, std::multiplies<>()), c, std::plus<>());
      });
    }
    if (name == "rem") {
      return each<T, 2>([](T a, T b) {
        if (b == 0) return a;
        if (std::is_signed_v<T> && b == static_cast<T>(-1)) return T{0};
        return static_cast<T>(a % b);
      });
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
    if (name == "bfe") {
      return raw<3>([](uint64_t a, uint64_t position, uint64_t length) {
        return extract_bits(get<T>(a), position & 255, length & 255);
      });
    }
    return nullptr;
  });
}

uint64_t permute(uint64_t a, uint64_t b, uint64_t selectors) {
  const uint64_t bytes = b << 32 | a;
  uint64_t result = 0;
  for (int i = 0; i < 4; ++i) {
    const unsigned selector = selectors >> (4 * i) & 15;
    uint64_t byte = bytes >> (8 * (selector & 7)) & 255;
    if (selector & 8) byte = byte & 128 ? 255 : 0;
    result |= byte << (8 * i);
  }
  return result;
}

// The table of a bit's values is the fourth operand.
uint32_t look_up_bits(uint32_t a, uint32_t b, uint32_t c, uint32_t table) {
  uint32_t result = 0;
  for (int i = 0; i < 8; ++i) {
    if (!(table >> i & 1)) continue;
    result |= (i & 4 ? a : ~a) & (i & 2 ? b : ~b) & (i & 1 ? c : ~c);
  }
  return result;
}

Compute find_funnel_shift(const std::vector<std::string>& modifiers) {
  const auto joined = [](uint64_t low, uint64_t high) { return high << 32 | low; };
  using Both = decltype(joined);
  if (contains(modifiers, "wrap")) {
    if (contains(modifiers, "l")) {
      return raw<3>([](uint64_t low, uint64_t high, uint64_t by) {
        return Both{}(low, high) << (by & 31) >> 32;
      });
    }
    return raw<3>([](uint64_t low, uint64_t high, uint64_t by) {
      return Both{}(low, high) >> (by & 31) & 0xffffffffu;
    });
  }
  if (contains(modifiers, "l")) {
    return raw<3>([](uint64_t low, uint64_t high, uint64_t by) {
      return by >= 32 ? low : Both{}(low, high) << by >> 32;
    });
  }
  return raw<3>([](uint64_t low, uint64_t high, uint64_t by) {
    return Both{}(low, high) >> std::min<uint64_t>(by, 32) & 0xffffffffu;
  });
}

Compute find_bits(const std::string& name, const std::vector<std::string>& modifiers, Type type) {
  if (type.kind == Type::kPredicate && name == "not") {
    return raw<1>([](uint64_t a) { return uint64_t{a == 0}; });
  }
  if (name == "and") return raw<2>([](uint64_t a, uint64_t b) { return a & b; });
  if (name == "or") return raw<2>([](uint64_t a, uint64_t b) { return a | b; });
  if (name == "xor") return raw<2>([](uint64_t a, uint64_t b) { return a ^ b; });
  if (name == "selp") {
    return raw<3>([](uint64_t a, uint64_t b, uint64_t predicate) { return predicate ? a : b; });
  }
  if (name == "shf") return find_funnel_shift(modifiers);
  // Only the general form, without a mode.
  if (name == "prmt" && modifiers.size() == 1) {
    return raw<3>([](uint64_t a, uint64_t b, uint64_t s) { return permute(a, b, s); });
  }
  if (name == "lop3") {
    using U = uint32_t;
    return each<U, 4>([](U a, U b, U c, U table) { return look_up_bits(a, b, c, table); });
  }
  return with_unsigned(type, [&](auto zero) -> Compute {
    using T = decltype(zero);
    constexpr unsigned kBits = 8 * sizeof(T);
    if (name == "not") return each<T, 1>([](T a) { return static_cast<T>(~a); });
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
    if (name == "popc") {
      return each<T, 1>([](T a) { return static_cast<uint32_t>(std::popcount(a)); });
    }
    if (name == "clz") {
      return each<T, 1>([](T a) { return static_cast<uint32_t>(std::countl_zero(a)); });
    }
    if (name == "brev") {
      return each<T, 1>([](T a) {
        T reversed = 0;
        for (unsigned b = 0; b < kBits; ++b) {
          reversed |= static_cast<T>(static_cast<T>(a >> b & 1) << (kBits - 1 - b));
        }
        return reversed;
      });
    }
    return nullptr;
  });
}

// Comparisons, which have one or two results (the second is the negation), and may be combined with
// a predicate.
template <typename T, typename F>
void compare_each(const Instruction& i, uint64_t* registers, uint32_t active) {
  const auto at = [&](const std::vector<int>& list, size_t n) {
    return n < list.size() ? registers + list[n] * kLanes : nullptr;
  };
  const uint64_t *const a = at(i.operands, 0), *const b = at(i.operands, 1);
  const uint64_t* const with = at(i.operands, 2);
  uint64_t *const result = at(i.results, 0), *const negated = at(i.results, 1);
  const char how = i.mode.empty() ? ' ' : i.mode[0];
  const auto join = [&](bool x, bool y) {
    return how == 'a' ? x && y : how == 'o' ? x || y : how == 'x' ? x != y : x;
  };
  for (uint32_t rest = active; rest; rest &= rest - 1) {
    const int l = std::countr_zero(rest);
    const bool holds = F{}(get<T>(a[l]), get<T>(b[l])), other = with && with[l] != 0;
    if (negated) negated[l] = join(!holds, other);
    result[l] = join(holds, other);
  }
}

template <typename T, typename F>
Compute comparison_of(F) {
  return compare_each<T, F>;
}

Compute find_comparison(const std::string& how, Type type) {
  return with_number(type, [&](auto zero) -> Compute {
    using T = decltype(zero);
    constexpr bool kOrdered = !std::is_floating_point_v<T>;
    if (how == "eq") return comparison_of<T>([](T a, T b) { return a == b; });
    // False of a NaN.
    if (how == "ne") return comparison_of<T>([](T a, T b) { return a < b || a > b; });
    if (how == "lt" || how == "lo") return comparison_of<T>([](T a, T b) { return a < b; });
    if (how == "le" || how == "ls") return comparison_of<T>([](T a, T b) { return a <= b; });
    if (how == "gt" || how == "hi") return comparison_of<T>([](T a, T b) { return a > b; });
    if (how == "ge" || how == "hs") return comparison_of<T>([](T a, T b) { return a >= b; });
    if (kOrdered) return nullptr;
    // True of a NaN.
    if (how == "equ") return comparison_of<T>([](T a, T b) { return !(a < b || a > b); });
    if (how == "neu") return comparison_of<T>([](T a, T b) { return !(a == b); });
    if (how == "ltu") return comparison_of<T>([](T a, T b) { return !(a >= b); });
    if (how == "leu") return comparison_of<T>([](T a, T b) { return !(a > b); });
    if (how == "gtu") return comparison_of<T>([](T a, T b) { return !(a <= b); });
    if (how == "geu") return comparison_of<T>([](T a, T b) { return !(a < b); });
    if (how == "num") return comparison_of<T>([](T a, T b) { return a == a && b == b; });
    if (how == "nan") return comparison_of<T>([](T a, T b) { return !(a == a && b == b); });
    return nullptr;
  });
}

float widen(float x) { return x; }
double widen(double x) { return x; }
float widen(_Float16 x) { return static_cast<float>(x); }
float widen(BFloat x) { return std::bit_cast<float>(uint32_t{x.bits} << 16); }

template <typename To>
struct Narrow {
  template <typename From>
  static To of(From x) {
    return static_cast<To>(x);
  }
};
template <>
struct Narrow<BFloat> {
  static BFloat of(float x) {
    const uint32_t bits = std::bit_cast<uint32_t>(x);
    if (std::isnan(x)) return {0x7fff};
    return {static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
  }
};

template <typename T>
T to_whole(T x, char rounding) {
  return rounding == 'n'   ? std::nearbyint(x)
         : rounding == 'z' ? std::trunc(x)
         : rounding == 'm' ? std::floor(x)
         : rounding == 'p' ? std::ceil(x)
                           : x;
}

// The nearest integer of the type; of a NaN, what GPUs give.
template <typename To>
To saturated(double whole) {
  using Limits = std::numeric_limits<To>;
  if (std::isnan(whole)) return sizeof(To) == 8 ? static_cast<To>(uint64_t{1} << 63) : To{0};
  if (whole >= std::ldexp(1.0, Limits::digits)) return Limits::max();
  if (whole <= static_cast<double>(Limits::min())) return Limits::min();
  return static_cast<To>(whole);
}

template <typename To, typename From>
To convert(From x, char rounding) {
  if constexpr (!kReal<From>) {
    return static_cast<To>(x);
  } else if constexpr (kReal<To>) {
    return Narrow<To>::of(to_whole(widen(x), rounding));
  } else {
    return saturated<To>(to_whole(widen(x), rounding));
  }
}

template <typename To, typename From>
void convert_each(const Instruction& i, uint64_t* registers, uint32_t active) {
  const uint64_t* const from = registers + i.operands[0] * kLanes;
  uint64_t* const to = registers + i.results[0] * kLanes;
  const char rounding = i.mode.empty() ? ' ' : i.mode[1];
  for (uint32_t rest = active; rest; rest &= rest - 1) {
    const int l = std::countr_zero(rest);
    to[l] = put(convert<To, From>(get<From>(from[l]), rounding));
  }
}

// Two floats to a register of two, whose upper half is the first operand.
template <typename To>
Compute packed_conversion() {
  return each<float, 2>([](float high, float low) {
    const auto half = [](float x) { return static_cast<uint32_t>(put(Narrow<To>::of(x))); };
    return half(high) << 16 | half(low);
  });
}

Compute find_conversion(const Instruction& i) {
  const Type to = i.type, from = i.from;
  if (from.packed > 1) return nullptr;
  if (to.packed > 1) {
    if (from.kind != Type::kFloat || from.size != 4 || i.operands.size() != 2) return nullptr;
    return to.kind == Type::kBFloat ? packed_conversion<BFloat>() : packed_conversion<_Float16>();
  }
  // Without a way of rounding there is no integer, and integers become only float or double.
  if (from.is_real() && !to.is_real() && i.mode.empty()) return nullptr;
  if (!from.is_real() && to.is_real() && to.size == 2) return nullptr;
  if (to.kind == Type::kBFloat && from.size == 8) return nullptr;
  return with_any(from, [&](auto f) {
    return with_any(to, [&](auto t) -> Compute {
      using From = decltype(f);
      using To = decltype(t);
      if constexpr (std::is_same_v<To, BFloat> && !(kReal<From> && sizeof(From) <= 4)) {
        return nullptr;
      } else {
        return convert_each<To, From>;
      }
    });
  });
}

// Several registers from one, or one from several, the lowest first.
void unpack(const Instruction& i, uint64_t* registers, uint32_t active) {
  const int bits = 8 * i.type.size / static_cast<int>(i.results.size());
  for (uint32_t rest = active; rest; rest &= rest - 1) {
    const int l = std::countr_zero(rest);
    const uint64_t whole = registers[i.operands[0] * kLanes + l];
    for (size_t n = 0; n < i.results.size(); ++n) {
      const uint64_t part = whole >> (bits * n) & ((uint64_t{1} << bits) - 1);
      registers[i.results[n] * kLanes + l] = part;
    }
  }
}

void pack(const Instruction& i, uint64_t* registers, uint32_t active) {
  const int bits = 8 * i.type.size / static_cast<int>(i.operands.size());
  for (uint32_t rest = active; rest; rest &= rest - 1) {
    const int l = std::countr_zero(rest);
    uint64_t whole = 0;
    for (size_t n = 0; n < i.operands.size(); ++n) {
      const uint64_t part = registers[i.operands[n] * kLanes + l];
      whole |= (part & ((uint64_t{1} << bits) - 1)) << (bits * n);
    }
    registers[i.results[0] * kLanes + l] = whole;
  }
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
  if (name == "cvt") return find_conversion(i);
  if (name == "setp") return find_comparison(modifiers[0], i.type);
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
