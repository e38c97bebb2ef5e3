// Sums over processes, in messages whose size does not depend on how many there are.
//
// All processes know the last sums of a message, and derive from them the same window for each sum:
// 170 bits or more, from 2^24 times the last magnitude of the sum down. Each process writes its sum
// as a multiple of the window's lowest bit, in limbs so small that the store adds them exactly, in
// any order. A header before the limbs tells all processes whether every sum fitted. If not, they
// exchange the values of each process instead. docs/precision.md says what is exact.
#ifndef GLUON_SYNCBN_PROCESSES_FIXED_POINT_H_
#define GLUON_SYNCBN_PROCESSES_FIXED_POINT_H_

#include <cstdint>
#include <vector>

#include "numerics/sums.h"

namespace gluon_syncbn {

// The values of a message: the sequence of the call, the count of values of a channel, then
// ChannelSums.
constexpr int kCallSize = 2, kSumsSize = 6;
static_assert(sizeof(ChannelSums) == kSumsSize * sizeof(double), "sums travel as they are");

// Adds the count and the sums of a message of this size to those of another.
void add_message(const double* from, int64_t size, double* to);

// A number in limbs of `width` bits, each with a sign.
struct Limbs {
  int width = 0, count = 0;

  // For a store that adds integers of up to `exact_bits` bits exactly. Returns no limbs if that is
  // too few for the number of processes.
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

  // Writes the numbers for the store to add up. T: float or double.
  template <typename T>
  void pack(const double* message, T* packed);
  // Writes the message with the sums of all processes. Returns false, in all processes, if a sum
  // did not fit its window or the processes are at different calls.
  template <typename T>
  bool unpack(const T* packed, double* message);
  // Called instead of unpack() after an exchange of values, with the messages of all processes, by
  // rank.
  void follow(const double* messages);

 private:
  size_t sums() const { return windows_.size(); }
  // Moves the windows to the sums in highs_ and middles_.
  void move_windows();

  const int processes_;
  const Limbs limbs_;
  const int count_limbs_;
  // The longest step between two calls whose square the store adds exactly.
  const double longest_step_;
  int64_t packed_size_ = 0;
  bool ready_ = false;
  // The last call that all processes know.
  double call_ = 0;
  // Per sum: the value of its window's lowest bit; 0 if the sum has always been zero.
  std::vector<double> windows_;
  // Per sum: the parts of the sums in progress.
  std::vector<double> highs_, middles_, lows_;
};

}  // namespace gluon_syncbn

#endif  // GLUON_SYNCBN_PROCESSES_FIXED_POINT_H_
