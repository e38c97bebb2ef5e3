#include "races.h"

#include <algorithm>
#include <utility>

namespace ptxsim {
namespace {

constexpr size_t kCellBytes = 2;

uint32_t writer_of(uint64_t cell) { return static_cast<uint32_t>(cell >> 32); }
uint32_t readers_of(uint64_t cell) { return static_cast<uint32_t>(cell); }
uint64_t cell_of(uint32_t writer, uint32_t readers) { return uint64_t{writer} << 32 | readers; }

}  // namespace

void join(Clock* clock, const Clock& other) {
  if (clock->size() < other.size()) clock->resize(other.size());
  for (size_t i = 0; i < other.size(); ++i) (*clock)[i] = std::max((*clock)[i], other[i]);
}

Races::Races(std::function<void(const std::string&)> report) : report_(std::move(report)) {}

uint32_t Races::add_timeline(const std::string& name) {
  timelines_.push_back(name);
  return static_cast<uint32_t>(timelines_.size() - 1);
}

Operation Races::add(const char* name, uint32_t timeline, Clock* clock) {
  if (clock->size() <= timeline) clock->resize(timeline + 1);
  const uint32_t time = ++(*clock)[timeline];
  operations_.push_back({name, timeline, time});
  return {static_cast<uint32_t>(operations_.size() - 1), *clock};
}

Shadow Races::watch(uintptr_t begin, size_t bytes, bool written_by_host) const {
  constexpr size_t kTooMuch = size_t{1} << 30;
  Shadow shadow;
  shadow.begin = begin;
  shadow.bytes = bytes;
  shadow.first_operation = static_cast<uint32_t>(operations_.size());
  // Cells take no memory before they are used.
  if (bytes < kTooMuch) {
    shadow.cells.reset(
        static_cast<uint64_t*>(std::calloc(bytes / kCellBytes + 1, sizeof(uint64_t))));
  }
  if (shadow.cells && written_by_host) {
    std::fill_n(shadow.cells.get(), bytes / kCellBytes + 1, cell_of(1, 0));
  }
  return shadow;
}

void Races::start(Operation operation) {
  current_ = std::move(operation);
  reads_ = writes_ = {};
}

// Most cells are like the one before.
void Races::access(const Shadow& shadow, uintptr_t begin, size_t bytes, bool writes) {
  if (!shadow.cells || bytes == 0) return;
  if (current_.number < shadow.first_operation) {
    report_("memory was given back that is used by " + describe(current_.number));
  }
  const size_t offset = begin - shadow.begin;
  Changes& changes = writes ? writes_ : reads_;
  for (size_t i = offset / kCellBytes; i <= (offset + bytes - 1) / kCellBytes; ++i) {
    uint64_t& cell = shadow.cells[i];
    if (cell == changes.to) continue;
    if (cell != changes.from) {
      changes.from = cell;
      const auto [found, is_new] = changes.all.try_emplace(cell);
      if (is_new) {
        check(cell, shadow, i, writes);
        found->second = after(cell, writes);
      }
      changes.to = found->second;
    }
    cell = changes.to;
  }
}

void Races::check(uint64_t cell, const Shadow& shadow, size_t place, bool writes) const {
  const auto report = [&](const std::string& what) {
    report_(std::string(writes ? "a write" : "a read") + " by " + describe(current_.number) +
            " of byte " + std::to_string(place * kCellBytes) + " of " +
            std::to_string(shadow.bytes) + what);
  };
  const uint32_t writer = writer_of(cell);
  if (!writer && !writes) report(", which nobody has written");
  if (!is_ordered(writer)) report(" is not ordered with the write by " + describe(writer));
  for (uint32_t r = writes ? readers_of(cell) : 0; r; r = readers_[r].next) {
    const uint32_t reader = readers_[r].operation;
    if (!is_ordered(reader)) report(" is not ordered with the read by " + describe(reader));
  }
}

// Of the readers, those stay that are not ordered with the current one.
uint64_t Races::after(uint64_t cell, bool writes) {
  if (writes) return cell_of(current_.number, 0);
  uint32_t list = 0;
  const auto add = [&](uint32_t reader) {
    readers_.push_back({reader, list});
    list = static_cast<uint32_t>(readers_.size() - 1);
  };
  for (uint32_t r = readers_of(cell); r; r = readers_[r].next) {
    if (readers_[r].operation == current_.number) return cell;
    if (!is_ordered(readers_[r].operation)) add(readers_[r].operation);
  }
  add(current_.number);
  return cell_of(writer_of(cell), list);
}

bool Races::is_ordered(uint32_t operation) const {
  const Known& known = operations_[operation];
  const Clock& clock = current_.clock;
  return known.timeline < clock.size() && known.time <= clock[known.timeline];
}

std::string Races::describe(uint32_t operation) const {
  const Known& known = operations_[operation];
  return std::string(known.name) + " (" + timelines_[known.timeline] + ")";
}

}  // namespace ptxsim
