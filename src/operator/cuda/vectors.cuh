// Vectors of 16 bytes, the most that a thread loads at a time. One at an unaligned address is
// assembled from the two aligned ones that contain it.
#ifndef GLUON_SYNCBN_CUDA_VECTORS_CUH_
#define GLUON_SYNCBN_CUDA_VECTORS_CUH_

#include <stdint.h>

#include "numerics/half.h"

#define SBN_DEVICE __device__ __forceinline__

namespace gluon_syncbn {

// Values of T in 16 bytes.
template <typename T>
constexpr int kPack = 16 / static_cast<int>(sizeof(T));

// 16 bytes in registers. 16-bit values are extracted by shifts, as the compiler would put an array
// of them into local memory.
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

// Value i, in the type that it is computed in. `i` must be a constant after unrolling.
template <typename T>
SBN_DEVICE Arithmetic<T> value_at(const Words& words, int i) {
  T value;
  get_value(words, i, &value);
  return widen(value);
}

// Two 16-bit values, of which the first is in the lower half.
SBN_DEVICE void widen_pair(BFloat16, uint32_t pair, float* first, float* second) {
  *first = float_of_bits(pair << 16);
  *second = float_of_bits(pair & 0xffff0000u);
}
SBN_DEVICE void widen_pair(Half, uint32_t pair, float* first, float* second) {
  asm("{.reg .b16 low, high; mov.b32 {low, high}, %2; cvt.f32.f16 %0, low; "
      "cvt.f32.f16 %1, high;}"
      : "=f"(*first), "=f"(*second)
      : "r"(pair));
}

// All values of a vector.
template <typename T>
struct Values {
  Arithmetic<T> v[kPack<T>];

  SBN_DEVICE explicit Values(const Words& words) {
    if constexpr (sizeof(T) == 2) {
#pragma unroll
      for (int i = 0; i < kPack<T>; i += 2) widen_pair(T{}, words.w[i / 2], &v[i], &v[i + 1]);
    } else {
#pragma unroll
      for (int i = 0; i < kPack<T>; ++i) v[i] = value_at<T>(words, i);
    }
  }
  SBN_DEVICE Arithmetic<T> operator()(int i) const { return v[i]; }
};

template <typename T>
SBN_DEVICE Words words_of(const Arithmetic<T> (&values)[kPack<T>]) {
  Words words = {{0, 0, 0, 0}};
#pragma unroll
  for (int i = 0; i < kPack<T>; ++i) {
    T narrowed;
    narrow(values[i], &narrowed);
    set_value(&words, i, narrowed);
  }
  return words;
}

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
// Two values per instruction. All NaNs become the same one.
template <>
SBN_DEVICE Words words_of<Half>(const float (&values)[8]) {
  Words words;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;"
        : "=r"(words.w[i])
        : "f"(values[2 * i + 1]), "f"(values[2 * i]));
  }
  return words;
}
template <>
SBN_DEVICE Words words_of<BFloat16>(const float (&values)[8]) {
  Words words;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;"
        : "=r"(words.w[i])
        : "f"(values[2 * i + 1]), "f"(values[2 * i]));
  }
  return words;
}
#endif

SBN_DEVICE Words zero_words() { return {{0, 0, 0, 0}}; }

SBN_DEVICE unsigned misalignment(const void* p) {
  return static_cast<unsigned>(reinterpret_cast<uintptr_t>(p) % 16);
}

// The address must be a multiple of 16.
SBN_DEVICE Words load_words(const void* p) {
  const uint4 v = *static_cast<const uint4*>(p);
  return {{v.x, v.y, v.z, v.w}};
}

// For a vector of whose words some are selected. In assembly, as nvcc would load the words one by
// one for sm_100 and later.
SBN_DEVICE Words load_whole_words(const void* p) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
  Words words;
  asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(words.w[0]), "=r"(words.w[1]), "=r"(words.w[2]), "=r"(words.w[3])
               : "l"(p));
  return words;
#else
  return load_words(p);
#endif
}

// In assembly, as nvcc would split the store of a uint4 into four.
SBN_DEVICE void store_words(void* p, const Words& words) {
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(p), "r"(words.w[0]),
               "r"(words.w[1]), "r"(words.w[2]), "r"(words.w[3])
               : "memory");
}

// The first `count` values at p, loaded one by one, and zeros.
template <typename T>
SBN_DEVICE Words load_some(const T* p, int count) {
  Words words = zero_words();
#pragma unroll
  for (int i = 0; i < kPack<T>; ++i) {
    if (i < count) set_value(&words, i, p[i]);
  }
  return words;
}

// 16 bytes at any address, in two steps, so that a thread can issue several loads before it waits
// for the first: load() reads the two aligned vectors around them, words() combines these. The next
// thread of the warp reads the second vector as its first, so memory is read once.
template <bool kAligned>
struct Fetched {
  Words low, high;

  SBN_DEVICE static Fetched load(const void* p) {
    return load(p, [](const void* at) { return load_words(at); });
  }
  SBN_DEVICE static Fetched load_whole(const void* p) {
    return load(p, [](const void* at) { return load_whole_words(at); });
  }

  // `shift` is misalignment(p).
  template <typename T>
  SBN_DEVICE Words words(unsigned shift) const {
    if (kAligned) return low;
    const bool two = shift & 8, one = shift & 4;
    uint32_t t[6], u[5];
    t[0] = two ? low.w[2] : low.w[0];
    t[1] = two ? low.w[3] : low.w[1];
    t[2] = two ? high.w[0] : low.w[2];
    t[3] = two ? high.w[1] : low.w[3];
    t[4] = two ? high.w[2] : high.w[0];
    t[5] = two ? high.w[3] : high.w[1];
#pragma unroll
    for (int i = 0; i < 5; ++i) u[i] = one ? t[i + 1] : t[i];
    if (sizeof(T) >= 4) return {{u[0], u[1], u[2], u[3]}};
    const unsigned bits = 8 * (shift & 3);
    return {{__funnelshift_r(u[0], u[1], bits), __funnelshift_r(u[1], u[2], bits),
             __funnelshift_r(u[2], u[3], bits), __funnelshift_r(u[3], u[4], bits)}};
  }

 private:
  template <typename Load>
  SBN_DEVICE static Fetched load(const void* p, const Load& load_at) {
    const unsigned shift = kAligned ? 0 : misalignment(p);
    const char* const at = static_cast<const char*>(p) - shift;
    Fetched fetched;
    fetched.low = load_at(at);
    if (!kAligned) fetched.high = load_at(at + (shift ? 16 : 0));
    return fetched;
  }
};

// The bounds of an array, which Fetched must not exceed.
struct Extent {
  const void *begin, *end;

  // Whether Fetched stays inside for `vectors` contiguous vectors from p.
  SBN_DEVICE bool holds(const void* p, int64_t vectors) const {
    const unsigned shift = misalignment(p);
    const char* const low = static_cast<const char*>(p) - shift;
    return low >= static_cast<const char*>(begin) &&
           low + 16 * (vectors + (shift ? 1 : 0)) <= static_cast<const char*>(end);
  }
};

}  // namespace gluon_syncbn

#endif  // GLUON_SYNCBN_CUDA_VECTORS_CUH_
