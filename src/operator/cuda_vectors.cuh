// 16 bytes at a time, from any address that a value may have.
//
// These headers are CUDA. tests/native/cuda_on_host.h runs the same text without a GPU.
#ifndef GLUON_SYNCBN_CUDA_VECTORS_CUH_
#define GLUON_SYNCBN_CUDA_VECTORS_CUH_

#include <stdint.h>

#include "half.h"

#define SBN_DEVICE __device__ __forceinline__

namespace gluon_syncbn {

// Values of T in 16 bytes.
template <typename T>
constexpr int kPack = 16 / static_cast<int>(sizeof(T));

// 16 bytes in registers. Values are taken out by shifts, as an array of 16-bit values would be kept
// in memory.
struct Words {
  uint32_t w[4];
};

SBN_DEVICE void get_value(const Words& words, int i, float* value) {
  *value = float_of_bits(words.w[i]);
}
SBN_DEVICE void get_value(const Words& words, int i, double* value) {
  const uint64_t bits = static_cast<uint64_t>(words.w[2 * i + 1]) << 32 | words.w[2 * i];
  memcpy(value, &bits, sizeof(bits));
}
template <typename T>
SBN_DEVICE void get_value(const Words& words, int i, T* value) {
  value->bits = static_cast<uint16_t>(words.w[i / 2] >> (16 * (i % 2)));
}

SBN_DEVICE void set_value(Words* words, int i, float value) { words->w[i] = bits_of_float(value); }
SBN_DEVICE void set_value(Words* words, int i, double value) {
  uint64_t bits;
  memcpy(&bits, &value, sizeof(bits));
  words->w[2 * i] = static_cast<uint32_t>(bits);
  words->w[2 * i + 1] = static_cast<uint32_t>(bits >> 32);
}
template <typename T>
SBN_DEVICE void set_value(Words* words, int i, T value) {
  const uint32_t bits = static_cast<uint32_t>(value.bits) << (16 * (i % 2));
  words->w[i / 2] = i % 2 ? (words->w[i / 2] | bits) : bits;
}

// Value i, in the type that it is computed in. `i` has to be known to the compiler.
template <typename T>
SBN_DEVICE Arithmetic<T> value_at(const Words& words, int i) {
  T value;
  get_value(words, i, &value);
  return widen(value);
}

template <typename T>
SBN_DEVICE void put_value(Words* words, int i, Arithmetic<T> value) {
  T narrowed;
  narrow(value, &narrowed);
  set_value(words, i, narrowed);
}

SBN_DEVICE Words zero_words() { return {{0, 0, 0, 0}}; }

SBN_DEVICE unsigned misalignment(const void* p) {
  return static_cast<unsigned>(reinterpret_cast<uintptr_t>(p) % 16);
}

// From an address that is a multiple of 16.
SBN_DEVICE Words load_words(const void* p) {
#if defined(__CUDA_ARCH__)
  const uint4 v = *static_cast<const uint4*>(p);
  return {{v.x, v.y, v.z, v.w}};
#elif defined(__CUDACC__)
  return zero_words();
#else
  return checked_load(p);
#endif
}

// In assembly, as compilers make four stores of one of a uint4.
SBN_DEVICE void store_words(void* p, const Words& words) {
#if defined(__CUDA_ARCH__)
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(p), "r"(words.w[0]),
               "r"(words.w[1]), "r"(words.w[2]), "r"(words.w[3])
               : "memory");
#elif !defined(__CUDACC__)
  checked_store(p, words);
#endif
}

// Where an array lies: vectors that are put together of two may not reach out of it.
struct Extent {
  const void *begin, *end;
};

// The first `count` values at p, one by one; zeros behind them.
template <typename T>
SBN_DEVICE Words load_some(const T* p, int count) {
  Words words = zero_words();
#pragma unroll
  for (int i = 0; i < kPack<T>; ++i) {
    if (i < count) set_value(&words, i, p[i]);
  }
  return words;
}

// The 16 bytes at p, put together of the two vectors that they lie in where p is no multiple of 16.
// The neighbour in the warp reads the second vector for its first, so memory is read once.
template <typename T, bool kAligned>
SBN_DEVICE Words load_values(const T* p, const Extent& extent) {
  if (kAligned) return load_words(p);
  const unsigned shift = misalignment(p);
  if (shift == 0) return load_words(p);
  const char* const low = reinterpret_cast<const char*>(p) - shift;
  if (low < static_cast<const char*>(extent.begin) ||
      low + 32 > static_cast<const char*>(extent.end)) {
    return load_some(p, kPack<T>);
  }
  const Words a = load_words(low), b = load_words(low + 16);
  const bool two = shift & 8, one = shift & 4;
  uint32_t t[6], u[5];
  t[0] = two ? a.w[2] : a.w[0];
  t[1] = two ? a.w[3] : a.w[1];
  t[2] = two ? b.w[0] : a.w[2];
  t[3] = two ? b.w[1] : a.w[3];
  t[4] = two ? b.w[2] : b.w[0];
  t[5] = two ? b.w[3] : b.w[1];
#pragma unroll
  for (int i = 0; i < 5; ++i) u[i] = one ? t[i + 1] : t[i];
  if (sizeof(T) >= 4) return {{u[0], u[1], u[2], u[3]}};
  const unsigned bits = 8 * (shift & 3);
  return {{__funnelshift_r(u[0], u[1], bits), __funnelshift_r(u[1], u[2], bits),
           __funnelshift_r(u[2], u[3], bits), __funnelshift_r(u[3], u[4], bits)}};
}

}  // namespace gluon_syncbn

#endif  // GLUON_SYNCBN_CUDA_VECTORS_CUH_
