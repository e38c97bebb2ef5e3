// Sums over processes, in messages whose size does not depend on how many there are.
//
// All processes know the last sums of a message, and so, without asking, a window of 170 bits or
// more for each sum: from 2^24 times its last magnitude down. Each process writes its sum as a
// whole number of the window's lowest bit, in limbs so small that the store adds them exactly, in
// any order. Numbers before the limbs say whether that did for all processes. Where it did not, all
// know, and exchange the values of each process instead. docs/design.md says what is exact.
#ifndef GLUON_SYNCBN_EXCHANGE_FIXED_POINT_H_
#define GLUON_SYNCBN_EXCHANGE_FIXED_POINT_H_

#include <cstdint>
#include <vector>

#include "numerics/sums.h"

namespace gluon_syncbn {

// The values of a message: the sequence of the call, the count of samples, then ChannelSums.
constexpr int kCallSize = 2, kSumsSize = 6;
static_assert(sizeof(ChannelSums) == kSumsSize * sizeof(double), "sums travel as they are");

// A number in limbs of `width` bits, each with a sign.
struct Limbs {
  int width = 0, count = 0;

  // For a store that adds whole numbers of up to `exact_bits` bits exactly. None if that is too few
  // for so many processes.
  static Limbs choose(int exact_bits, int processes);
  int bits() const { return width * count; }
};

// The sums of one kind of message. All processes call the functions in the same order.
class FixedPoint {
 public:
  // size: of the message. exact_bits: see Limbs.
  FixedPoint(int64_t size, int processes, int exact_bits);

  // How many numbers pack() writes; 0 if the store cannot add this message.
  int64_t size() const { return packed_size_; }
  // Whether there are windows, as there are after the first exchange.
  bool ready() const { return size() > 0 && ready_; }

  // What the store is to add up. T: float or double.
  template <typename T>
  void pack(const double* message, T* packed);
  // The message with the sums of all processes. False, for all processes, if the windows do not do
  // for all, or if they are at different calls.
  template <typename T>
  bool unpack(const T* packed, double* message);
  // Instead of unpack: the messages of all processes, by rank.
  void follow(const double* messages);
  // As at the beginning, for processes that may have failed at different calls.
  void restart();

 private:
  size_t sums() const { return windows_.size(); }
  // To the sums in highs_ and middles_.
  void move_windows();

  const int processes_;
  const Limbs limbs_;
  const int count_limbs_;
  // Between two calls, so that its square can be added.
  const double longest_step_;
  int64_t packed_size_ = 0;
  bool ready_ = false;
  // The last call that all processes know.
  double call_ = 0;
  // By sum: the value of its lowest bit. 0 for a sum that has been nothing but zero yet.
  std::vector<double> windows_;
  // By sum, for pack and unpack.
  std::vector<double> highs_, middles_, lows_;
};

}  // namespace gluon_syncbn

#endif  // GLUON_SYNCBN_EXCHANGE_FIXED_POINT_H_
