// Values that lie side by side in memory and that a thread loads or stores at once: 16 bytes, which
// is the most, 8, or one value.
#ifndef GLUON_SYNCBN_CUDA_VECTORS_CUH_
#define GLUON_SYNCBN_CUDA_VECTORS_CUH_

#include <stdint.h>

#include "numerics/half.h"

#define SBN_DEVICE __device__ __forceinline__

namespace gluon_syncbn {

// Values are in 32-bit words, and 16-bit ones are extracted by shifts, as the compiler would put an
// array of them into local memory. `i` must be a constant after unrolling.
SBN_DEVICE void get_value(const uint32_t* words, int i, float* value) {
  *value = float_of_bits(words[i]);
}
SBN_DEVICE void get_value(const uint32_t* words, int i, double* value) {
  const uint64_t bits = static_cast<uint64_t>(words[2 * i + 1]) << 32 | words[2 * i];
  memcpy(value, &bits, sizeof(bits));
}
template <typename T>
SBN_DEVICE void get_value(const uint32_t* words, int i, T* value) {
  value->bits = static_cast<uint16_t>(words[i / 2] >> (16 * (i % 2)));
}

SBN_DEVICE void set_value(uint32_t* words, int i, float value) { words[i] = bits_of_float(value); }
SBN_DEVICE void set_value(uint32_t* words, int i, double value) {
  uint64_t bits;
  memcpy(&bits, &value, sizeof(bits));
  words[2 * i] = static_cast<uint32_t>(bits);
  words[2 * i + 1] = static_cast<uint32_t>(bits >> 32);
}
template <typename T>
SBN_DEVICE void set_value(uint32_t* words, int i, T value) {
  const uint32_t bits = static_cast<uint32_t>(value.bits) << (16 * (i % 2));
  words[i / 2] = i % 2 ? (words[i / 2] | bits) : bits;
}

// 16 bytes of anything.
SBN_DEVICE void load_words(const void* p, uint32_t* words) {
  const uint4 v = *static_cast<const uint4*>(p);
  words[0] = v.x, words[1] = v.y, words[2] = v.z, words[3] = v.w;
}
// In assembly, as nvcc would split the store of a uint4 into four.
SBN_DEVICE void store_words(void* p, const uint32_t* words) {
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(p), "r"(words[0]), "r"(words[1]),
               "r"(words[2]), "r"(words[3])
               : "memory");
}

template <typename T, int kWidth>
class Vector {
 public:
  // aligned: whether p is a multiple of the size of a vector.
  SBN_DEVICE void load(const T* p, bool aligned = true) {
    if constexpr (kWidth > 1) {
      if (aligned) {
        if constexpr (kBytes == 16) {
          load_words(p, words_);
        } else {
          const uint2 v = *reinterpret_cast<const uint2*>(p);
          words_[0] = v.x, words_[1] = v.y;
        }
        return;
      }
    }
#pragma unroll
    for (int i = 0; i < kWidth; ++i) set_value(words_, i, p[i]);
  }

  SBN_DEVICE void store(T* p) const {
    if constexpr (kWidth == 1) {
      get_value(words_, 0, p);
    } else if constexpr (kBytes == 16) {
      store_words(p, words_);
    } else {
      *reinterpret_cast<uint2*>(p) = make_uint2(words_[0], words_[1]);
    }
  }

  SBN_DEVICE T get(int i) const {
    T value;
    get_value(words_, i, &value);
    return value;
  }
  // Once for each value, in order.
  SBN_DEVICE void set(int i, T value) { set_value(words_, i, value); }

  // Value i, in the type that it is computed in.
  SBN_DEVICE Arithmetic<T> operator[](int i) const { return widen(get(i)); }

 private:
  static constexpr int kBytes = kWidth * static_cast<int>(sizeof(T));
  static_assert(kWidth == 1 || kBytes == 8 || kBytes == 16, "what a thread loads at once");

  uint32_t words_[kBytes < 4 ? 1 : kBytes / 4];
};

}  // namespace gluon_syncbn

#endif  // GLUON_SYNCBN_CUDA_VECTORS_CUH_
