// The two 16-bit floating-point types of data, and the type that each type of data is computed in.
#ifndef GLUON_SYNCBN_NUMERICS_HALF_H_
#define GLUON_SYNCBN_NUMERICS_HALF_H_

#include "numerics/sums.h"

namespace gluon_syncbn {

// IEEE 754 binary16: 1 sign, 5 exponent, 10 fraction bits.
struct Half {
  uint16_t bits;
};

// The upper half of a float: 1 sign, 8 exponent, 7 fraction bits.
struct BFloat16 {
  uint16_t bits;
};

SBN_HOST_DEVICE float float_of_bits(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof(value));
  return value;
}

SBN_HOST_DEVICE uint32_t bits_of_float(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof(bits));
  return bits;
}

// Exact. Without branches, so that compilers vectorize it.
SBN_HOST_DEVICE float widen(float x) { return x; }
SBN_HOST_DEVICE double widen(double x) { return x; }
SBN_HOST_DEVICE float widen(BFloat16 x) {
  return float_of_bits(static_cast<uint32_t>(x.bits) << 16);
}
SBN_HOST_DEVICE float widen(Half x) {
#if defined(__CUDA_ARCH__)
  float wide;
  asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(x.bits));
  return wide;
#else
  // Exponent and fraction at their positions in a float. Infinities and NaN need the largest
  // exponent.
  const uint32_t magnitude = static_cast<uint32_t>(x.bits & 0x7fff) << 13;
  uint32_t special = magnitude >= 0x7c00u << 13 ? 0x7f800000u : 0;
  // A signaling NaN becomes quiet, as in hardware.
  special = magnitude > 0x7c00u << 13 ? 0x7fc00000u : special;
  // Normal numbers are rebiased. Subnormal ones are the fraction of 2^-14 * (1 + fraction / 2^10).
  // No float here is subnormal, as processors may be set to treat such floats as zero.
  const uint32_t normal = magnitude + (112u << 23);
  const float small = float_of_bits(magnitude + (113u << 23)) - 0x1p-14f;
  const uint32_t value = magnitude < 1u << 23 ? bits_of_float(small) : normal;
  const uint32_t sign = static_cast<uint32_t>(x.bits & 0x8000) << 16;
  return float_of_bits(value | special | sign);
#endif
}

// Rounds to nearest, ties to even.
SBN_HOST_DEVICE void narrow(float x, float* result) { *result = x; }
SBN_HOST_DEVICE void narrow(double x, double* result) { *result = x; }

SBN_HOST_DEVICE void narrow(float x, BFloat16* result) {
  const uint32_t bits = bits_of_float(x), magnitude = bits & 0x7fffffff;
  const uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
  // Rounding could turn a NaN into an infinity.
  result->bits = static_cast<uint16_t>(magnitude > 0x7f800000 ? (bits >> 16 | 0x40) : rounded);
}

SBN_HOST_DEVICE void narrow(float x, Half* result) {
#if defined(__CUDA_ARCH__)
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(result->bits) : "f"(x));
#else
  const uint32_t bits = bits_of_float(x), magnitude = bits & 0x7fffffff;
  const uint32_t sign = bits >> 16 & 0x8000;
  // Normal halves, from 2^-14: the exponent is rebiased and 13 bits are rounded off, which may
  // carry into the exponent and up to infinity.
  const uint32_t normal = (magnitude - (112u << 23) + 0xfff + (magnitude >> 13 & 1)) >> 13;
  // Subnormal halves are multiples of 2^-24, the last bit of floats in [0.5, 1). So adding 0.5
  // rounds.
  const uint32_t small = bits_of_float(float_of_bits(magnitude) + 0.5f) - 0x3f000000u;
  uint32_t half = magnitude < 113u << 23 ? small : normal;
  half = magnitude >= 143u << 23 ? 0x7c00 : half;
  half = magnitude > 0x7f800000 ? 0x7e00 | (magnitude >> 13 & 0x3ff) : half;
  result->bits = static_cast<uint16_t>(half | sign);
#endif
}

// a + b as MXNet adds arrays, which truncates bfloat16.
SBN_HOST_DEVICE float added(float a, float b) { return a + b; }
SBN_HOST_DEVICE double added(double a, double b) { return a + b; }
SBN_HOST_DEVICE BFloat16 added(BFloat16 a, BFloat16 b) {
  return {static_cast<uint16_t>(bits_of_float(widen(a) + widen(b)) >> 16)};
}
SBN_HOST_DEVICE Half added(Half a, Half b) {
  Half sum;
  narrow(widen(a) + widen(b), &sum);
  return sum;
}

// Data of T is computed in Arithmetic<T>, which is also the type of gamma, beta, their gradients
// and the running statistics.
template <typename T>
struct ArithmeticOf {
  using Type = float;
};
template <>
struct ArithmeticOf<double> {
  using Type = double;
};
template <typename T>
using Arithmetic = typename ArithmeticOf<T>::Type;

}  // namespace gluon_syncbn

#endif  // GLUON_SYNCBN_NUMERICS_HALF_H_
