#include <algorithm>
#include <cstring>

#include "warp.h"

namespace ptxsim {

SharedMemory::SharedMemory(int size)
    : memory_(static_cast<size_t>(size)), touched_(static_cast<size_t>(size)) {}

void SharedMemory::reset() {
  std::fill(memory_.begin(), memory_.end(), static_cast<char>(0xff));
  std::fill(touched_.begin(), touched_.end(), Touch());
}

bool SharedMemory::Touch::is_by_warp_alone(int warp) const {
  const auto fits = [&](int thread) { return thread < 0 || thread / kLanes == warp; };
  return fits(writer) && fits(reader) && fits(other_reader);
}

int SharedMemory::race(const Touch& touch, int thread, uint32_t phase_of_warp, bool writes) {
  const auto races = [&](int other) {
    if (other < 0 || other == thread) return false;
    return other / kLanes != thread / kLanes || touch.phase_of_warp == phase_of_warp;
  };
  if (races(touch.writer)) return touch.writer;
  if (writes && races(touch.reader)) return touch.reader;
  if (writes && races(touch.other_reader)) return touch.other_reader;
  return -1;
}

int SharedMemory::touch(int thread, uint32_t phase_of_warp, uint64_t address, int bytes,
                        bool writes) {
  for (int i = 0; i < bytes; ++i) {
    Touch& touch = touched_[address + i];
    if (touch.phase != phase_) touch = {phase_, phase_of_warp, -1, -1, -1};
    const int other = race(touch, thread, phase_of_warp, writes);
    if (other >= 0) return other;
    if (touch.phase_of_warp != phase_of_warp && touch.is_by_warp_alone(thread / kLanes)) {
      touch = {phase_, phase_of_warp, -1, -1, -1};
    }
    const auto me = static_cast<int16_t>(thread);
    if (writes) {
      touch.writer = me;
    } else if (touch.reader < 0 || touch.reader == me) {
      touch.reader = me;
    } else {
      touch.other_reader = me;
    }
  }
  return -1;
}

}  // namespace ptxsim
