#include "memory.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstring>

namespace ptxsim {

void* take_pages(size_t bytes) {
  void* const memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  return memory == MAP_FAILED ? nullptr : memory;
}
void give_pages(void* memory, size_t bytes) { munmap(memory, bytes); }

void* Memory::allocate(size_t bytes, int device) {
  // With a gap behind it, so that one array does not end where the next begins.
  constexpr size_t kGap = 512, kMuch = size_t{1} << 30;
  const size_t all = bytes + kGap;
  void* const memory = pages_.take(all);
  if (!memory) return nullptr;
  if (all < kMuch) std::memset(memory, 0xff, all);
  const auto begin = reinterpret_cast<uintptr_t>(memory);
  Block& block = blocks_[begin];
  block.memory = {static_cast<char*>(memory), [all, give = pages_.give](char* p) { give(p, all); }};
  block.allocation = {begin, begin + std::max<size_t>(bytes, 1), device};
  // Others, who are not seen, use memory that is not the system's.
  if (pages_.take == take_pages) block.shadow = races_->watch(begin, bytes, device == kHost);
  block.allocation.shadow = &block.shadow;
  return memory;
}

bool Memory::release(void* memory) {
  if (!memory) return true;
  const auto found = blocks_.find(reinterpret_cast<uintptr_t>(memory));
  if (found == blocks_.end()) return false;
  // As if it wrote there: no other operation may still use it.
  const Shadow& shadow = found->second.shadow;
  races_->access(shadow, shadow.begin, shadow.bytes, true);
  blocks_.erase(found);
  return true;
}

const Allocation* Memory::around(uintptr_t address) const {
  auto after = blocks_.upper_bound(address);
  if (after == blocks_.begin()) return nullptr;
  const Allocation& before = (--after)->second.allocation;
  return address < before.end ? &before : nullptr;
}

bool Memory::allows(uintptr_t address, size_t bytes, int device, Allocation* last) const {
  const Allocation* const found = around(address);
  if (!found) return false;
  const bool own = found->device == kHost || found->device == device;
  if (!found->holds(address, bytes)) return false;
  if (!own && !peers_.count({device, found->device})) return false;
  *last = *found;
  return true;
}

bool Memory::holds(const void* address, size_t bytes) const {
  const auto begin = reinterpret_cast<uintptr_t>(address);
  const Allocation* const found = around(begin);
  return bytes == 0 || (found && found->holds(begin, bytes));
}

void Memory::access(const void* address, size_t bytes, bool writes) const {
  const auto begin = reinterpret_cast<uintptr_t>(address);
  const Allocation* const found = around(begin);
  if (found) races_->access(*found->shadow, begin, bytes, writes);
}

}  // namespace ptxsim
