// Adds the sums of a channel's chunks, exactly and so in any order.
//
// Most GPUs are slow at double arithmetic. So the sums of float data are rounded to multiples of a
// power of 2 that depends on the chunk alone, and added as integers. Sums whose range is too large
// for that are added in Sum3.
#ifndef GLUON_SYNCBN_CUDA_SUMS_CHUNKS_CUH_
#define GLUON_SYNCBN_CUDA_SUMS_CHUNKS_CUH_

#include "cuda/sums/integers.cuh"
#include "cuda/sums/runs.cuh"

namespace gluon_syncbn {

SBN_DEVICE Sum3 from_lane(const Sum3& sum, int mask) {
  return {__shfl_xor_sync(kAllLanes, sum.high, mask), __shfl_xor_sync(kAllLanes, sum.middle, mask),
          __shfl_xor_sync(kAllLanes, sum.low, mask)};
}

SBN_DEVICE ChannelSums from_lane(const ChannelSums& sums, int mask) {
  return {from_lane(sums.first, mask), from_lane(sums.second, mask)};
}

// Adds up each group of `lanes` lanes, a power of 2. Its first lane has the sum.
template <typename Sum>
SBN_DEVICE void add_lanes(Sum* sum, int lanes, int lane) {
  for (int mask = lanes / 2; mask > 0; mask /= 2) {
    const Sum other = from_lane(*sum, mask);
    if ((lane & (lanes - 1)) < mask) sum->add(other);
  }
}

SBN_DEVICE void put_sums(const ChannelSums& sums, double* to) {
  to[0] = sums.first.high, to[1] = sums.first.middle, to[2] = sums.first.low;
  to[3] = sums.second.high, to[4] = sums.second.middle, to[5] = sums.second.low;
}
SBN_DEVICE ChannelSums get_sums(const double* from) {
  return {{from[0], from[1], from[2]}, {from[3], from[4], from[5]}};
}

// The sums of n values of a channel; none if n is 0.
template <typename A>
struct Chunk {
  int n = 0;
  A origin = 0;
  Share<A> sums;
};

// A chunk's sums as integers, times powers of 2. Forward: sum(x) and sum(x^2).
template <bool kBackward>
struct RoundedSums {
  // Far below the exponents of all numbers.
  static constexpr int kZero = -1000;
  Integer<2> first, second;
  int first_exponent = kZero, second_exponent = kZero;

  // Whether the sums of a chunk of at most 2^13 values can be rounded. If both are zero, the values
  // are equal.
  SBN_DEVICE static bool fits(float origin, const Share<float>& sums) {
    const bool first_is_zero = sums.first.is_zero(), second_is_zero = sums.second.is_zero();
    const int first = exponent_of(sums.first.high), second = exponent_of(sums.second.high);
    if (kBackward) {
      const auto in_range = [](int exponent) { return exponent >= -85 && exponent <= 120; };
      return (first_is_zero || in_range(first)) &&
             (in_range(second) || (first_is_zero && second_is_zero));
    }
    if (sums.second.high > 0) return second >= -80 && second <= 120;
    // Either all deviations from the origin are zero, or their squares underflow, which they do not
    // if the origin is as large as this.
    const int scale = exponent_of(origin);
    return second_is_zero && (origin == 0 || scale >= -100) &&
           (first_is_zero || (scale >= -49 && scale < 128));
  }

  SBN_DEVICE static RoundedSums of(const Chunk<float>& chunk) {
    const Share<float>& sums = chunk.sums;
    const auto round = [](const Partial<float>& sum, float scale) -> int64_t {
      return llrintf(sum.high * scale) + llrintf(sum.low * scale);
    };
    RoundedSums result;
    if constexpr (kBackward) {
      // 40 bits each.
      const auto set = [&](const Partial<float>& sum, int* exponent) -> int64_t {
        if (sum.is_zero()) return 0;
        *exponent = exponent_of(sum.high) - 39;
        return round(sum, power_of_2(-*exponent));
      };
      result.first = Integer<2>::of(set(sums.first, &result.first_exponent));
      result.second = Integer<2>::of(set(sums.second, &result.second_exponent));
    } else {
      // The sum of squares is less than 2^(2 * half), so the sum is less than 2^(half + 7), and
      // takes 31 bits. A deviation is no less than half a unit in the last place of the origin,
      // which therefore takes no more than 49 bits.
      const bool is_constant = sums.second.high == 0;
      const int half = (exponent_of(sums.second.high) + 2) >> 1;
      const int exponent = is_constant ? exponent_of(chunk.origin) - 23 : half - 24;
      if (is_constant && chunk.origin == 0) return result;
      const float scale = power_of_2(-exponent);
      int64_t first = is_constant ? 0 : round(sums.first, scale);
      int64_t second = is_constant ? 0 : round(sums.second, scale * scale);
      // The origin is rounded too, and the sums are corrected for the remainder.
      const float origin = chunk.origin * scale;
      const int64_t whole = llrintf(origin);
      const float rest = origin - static_cast<float>(whole), moved = chunk.n * rest;
      second += llrintf((2 * static_cast<float>(first) + moved) * rest);
      first += llrintf(moved);
      const int64_t total = chunk.n * whole;
      result.first = Integer<2>::of(first + total);
      result.second = Integer<2>::product(2 * first + total, whole);
      result.second.add(Integer<2>::of(second));
      result.first_exponent = exponent;
      result.second_exponent = 2 * exponent;
    }
    return result;
  }
};

constexpr int kOwnWords = 6;

// The sums of a channel that one thread has added, in kOwnWords words of shared memory.
template <typename A, bool kBackward>
class ChannelTotal {
 public:
  SBN_DEVICE explicit ChannelTotal(double* own) : own_(own) {
    put_sums({}, own_);
    if (kFloat) put_exponents({RoundedSums<kBackward>::kZero, RoundedSums<kBackward>::kZero});
  }

  // Whether add() takes such sums of float.
  SBN_DEVICE static bool is_narrow(A origin, const Share<A>& sums) {
    if constexpr (kFloat) return RoundedSums<kBackward>::fits(origin, sums);
    return true;
  }

  SBN_DEVICE void add(const Chunk<A>& chunk) {
    if (chunk.n == 0) return;
    if constexpr (kFloat) {
      const auto rounded = RoundedSums<kBackward>::of(chunk);
      begin(rounded.first_exponent, rounded.second_exponent);
      add(rounded);
    } else {
      add_wide(chunk.n, chunk.origin, chunk.sums.first.high, chunk.sums.second.high);
    }
  }

  // The same for all lanes of a warp, where each group of `lanes` lanes has one channel.
  SBN_DEVICE void add(const Chunk<A>& chunk, int lanes) {
    if constexpr (kFloat) {
      RoundedSums<kBackward> rounded;
      if (chunk.n > 0) rounded = RoundedSums<kBackward>::of(chunk);
      const auto largest = [&](int exponent) {
#pragma unroll
        for (int mask = kWarp / 2; mask > 0; mask /= 2) {
          if (mask >= lanes) continue;
          const int other = __shfl_xor_sync(kAllLanes, exponent, mask);
          exponent = other > exponent ? other : exponent;
        }
        return exponent;
      };
      begin(largest(rounded.first_exponent), kBackward ? largest(rounded.second_exponent) : 0);
      if (chunk.n > 0) add(rounded);
    } else {
      add(chunk);
    }
  }

  // Adds sums that were computed in double, including that of the squares or products.
  SBN_DEVICE void add_wide(int n, A origin, double first, double second) {
    ChannelSums sums = value();
    if (kBackward) {
      sums.first.add(first);
      sums.second.add(second);
    } else {
      add_shifted<A>(n, origin, first, second, &sums.first, &sums.second);
    }
    put_sums(sums, own_);
  }

  // The sum over `lanes` lanes, a power of 2, in the first of them. In each group of `group` lanes,
  // only the first `used` have sums.
  SBN_DEVICE ChannelSums value_of_lanes(int lanes, int group, int used, int lane) {
    const bool as_integers = kFloat && __all_sync(kAllLanes, is_rounded_);
    if (as_integers) {
      Integer<2> first;
      Second second;
      get(&first, &second);
#pragma unroll
      for (int mask = kWarp / 2; mask > 0; mask /= 2) {
        if (mask >= lanes || (mask < group && mask >= used)) continue;
        first.add(first.from_lane(mask));
        second.add(second.from_lane(mask));
      }
      put(first, second);
    }
    ChannelSums sums;
    if (!as_integers || (lane & (lanes - 1)) == 0) sums = value();
    if (!as_integers) add_lanes(&sums, lanes, lane);
    return sums;
  }

  // For value_of_warp() in the same lane of the first warp.
  SBN_DEVICE void put(const ChannelSums& sums) { put_sums(sums, own_); }
  // What the same lane of a later warp has put.
  SBN_DEVICE ChannelSums value_of_warp(int i) const {
    return get_sums(own_ + i * kWarp * kOwnWords);
  }

  // The sums so far. `own_` holds doubles from now on, which the caller must put there.
  SBN_DEVICE ChannelSums value() {
    if (!is_rounded_) return get_sums(own_);
    is_rounded_ = false;
    Integer<2> first;
    Second second;
    get(&first, &second);
    const Exponents exponents = get_exponents();
    return {first.times_power_of_2(exponents.first), second.times_power_of_2(exponents.second)};
  }

 private:
  // How far the exponent of the integers lies below that of the first chunk. It is in the middle of
  // the shifts that can be added. The sums of up to 2^16 chunks, of at most 62 and 111 bits, or of
  // 40 and 40 in backward, take at most 127 and 191 bits, or 127 each.
  static constexpr int kMiddle = kBackward ? 30 : 15;
  static constexpr int kWords = kBackward ? 2 : 3;
  using Second = Integer<kWords>;

  static constexpr bool kFloat = sizeof(A) == sizeof(float);

  struct Exponents {
    int first, second;
  };

  double* const own_;
  // Whether `own_` holds integers and their exponents, or ChannelSums.
  bool is_rounded_ = kFloat;

  SBN_DEVICE Exponents get_exponents() const {
    Exponents exponents;
    memcpy(&exponents, own_ + 5, sizeof(exponents));
    return exponents;
  }
  SBN_DEVICE void put_exponents(const Exponents& exponents) {
    memcpy(own_ + 5, &exponents, sizeof(exponents));
  }

  SBN_DEVICE void begin(int first, int second) {
    if (!is_rounded_) return;
    constexpr int kZero = RoundedSums<kBackward>::kZero;
    Exponents own = get_exponents();
    if (own.first == kZero && first != kZero) own.first = first - kMiddle;
    if (kBackward && own.second == kZero && second != kZero) own.second = second - kMiddle;
    if (!kBackward) own.second = own.first == kZero ? kZero : 2 * own.first;
    put_exponents(own);
  }

  SBN_DEVICE void add(const RoundedSums<kBackward>& rounded) {
    constexpr int kZero = RoundedSums<kBackward>::kZero;
    const auto shift_of = [](int exponent, int own) {
      return exponent == kZero ? 0 : exponent - own;
    };
    const Exponents own = get_exponents();
    const int first_shift = shift_of(rounded.first_exponent, own.first);
    const int second_shift = shift_of(rounded.second_exponent, own.second);
    const auto fits = [](int shift) { return shift >= 0 && shift <= 2 * kMiddle; };
    if (is_rounded_ && fits(first_shift) && (!kBackward || fits(second_shift))) {
      Integer<2> first;
      Second second;
      get(&first, &second);
      first.add(rounded.first.shifted(first_shift));
      second.add(rounded.second.template widened<kWords>().shifted(second_shift));
      put(first, second);
      return;
    }
    ChannelSums sums = value();
    sums.first.add(rounded.first.times_power_of_2(rounded.first_exponent));
    sums.second.add(rounded.second.times_power_of_2(rounded.second_exponent));
    put_sums(sums, own_);
  }

  SBN_DEVICE void get(Integer<2>* first, Second* second) const {
    memcpy(static_cast<void*>(first), own_, sizeof(*first));
    memcpy(static_cast<void*>(second), own_ + 2, sizeof(*second));
  }
  SBN_DEVICE void put(const Integer<2>& first, const Second& second) {
    memcpy(own_, &first, sizeof(first));
    memcpy(own_ + 2, &second, sizeof(second));
  }
};

// A warp's chunks, with `lanes` lanes for each. Once each lane has the sums of a chunk, all lanes
// add theirs to the channel's at the same time.
template <typename A, bool kBackward>
class ChunkBuffer {
 public:
  SBN_DEVICE ChunkBuffer(double* own, PowerOf2 lanes, int lane)
      : total_(own), lanes_(lanes), lane_(lane) {}

  // Adds a lane's share of a chunk. is_last: the warp calls it no more. each(f) calls f with the
  // value, or the gradient and the value, of every element of the share.
  template <typename Each>
  SBN_DEVICE void add(Chunk<A> chunk, const Center<A>& center, PowerOf2 lanes_of_channel,
                      bool is_last, const Each& each) {
    chunk.sums.add_lanes(lanes_, lane_);
    if (kBackward) center.correct(&chunk.sums);
    const bool is_keeper = lane_ % lanes_ == turn_;
    if constexpr (sizeof(A) == sizeof(float)) add_if_wide(&chunk, center, is_keeper, each);
    if (is_keeper) chunk_ = chunk;
    if (++turn_ < lanes_ && !is_last) return;
    total_.add(chunk_, lanes_of_channel);
    chunk_.n = 0;
    if (turn_ > used_) used_ = turn_;
    turn_ = 0;
  }

  // Stores the sums of a channel, to which `lanes_of_channel` lanes of each of `warps` warps
  // belong. All threads of the block call it, each with its channel, if that exists.
  SBN_DEVICE void finish(PowerOf2 lanes_of_channel, PowerOf2 warps, const SumsTask& task,
                         int64_t c) {
    ChannelSums sums;
    // A warp without chunks has no sums.
    if (used_ > 0) sums = total_.value_of_lanes(lanes_of_channel, lanes_, used_, lane_);
    if (warps > 1) {
      if (lane_ % lanes_of_channel == 0) total_.put(sums);
      __syncthreads();
    }
    if (lane_ % lanes_of_channel != 0 || threadIdx.x / kWarp % warps != 0 || c >= task.C) return;
    for (int i = 1; i < warps; ++i) sums.add(total_.value_of_warp(i));
    task.store(c, blockIdx.y, sums);
  }

 private:
  ChannelTotal<A, kBackward> total_;
  const PowerOf2 lanes_;
  const int lane_;
  // The lane of each `lanes_` that keeps the next chunk, and how many have kept any.
  int turn_ = 0, used_ = 0;
  Chunk<A> chunk_;

  // If the chunk is too wide for add(), adds it and makes it empty.
  template <typename Each>
  SBN_DEVICE void add_if_wide(Chunk<A>* chunk, const Center<A>& center, bool is_keeper,
                              const Each& each) {
    const bool is_wide =
        chunk->n > 0 && !ChannelTotal<A, kBackward>::is_narrow(chunk->origin, chunk->sums);
    if (!__any_sync(kAllLanes, is_wide)) return;
    double first = 0, second = 0;
    if constexpr (kBackward) {
      each([&](double gradient, double value) {
        first += gradient;
        second = fma(gradient, (value - center.mean) - center.mean_low, second);
      });
    } else {
      each([&](double value) {
        const double deviation = value - chunk->origin;
        first += deviation;
        second = fma(deviation, deviation, second);
      });
    }
    for (int mask = lanes_ / 2; mask > 0; mask /= 2) {
      first += __shfl_xor_sync(kAllLanes, first, mask);
      second += __shfl_xor_sync(kAllLanes, second, mask);
    }
    if (!is_wide) return;
    if (is_keeper) total_.add_wide(chunk->n, chunk->origin, first, second);
    chunk->n = 0;
  }
};

}  // namespace gluon_syncbn

#endif  // GLUON_SYNCBN_CUDA_SUMS_CHUNKS_CUH_
