#include "memory.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstring>

namespace ptxsim {

Memory::Block Memory::filled(size_t bytes) {
  char* const memory = new char[bytes];
  std::memset(memory, 0xff, bytes);
  return {{}, {memory, [](char* p) { delete[] p; }}};
}

Memory::Block Memory::reserved(size_t bytes) {
  void* const memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE,
                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (memory == MAP_FAILED) return {};
  return {{}, {static_cast<char*>(memory), [bytes](char* p) { munmap(p, bytes); }}};
}

void* Memory::allocate(size_t bytes, int device) {
  constexpr size_t kAlignment = 512, kMuch = size_t{1} << 30;
  // With a gap behind it, so that one array does not end where the next begins.
  const size_t all = bytes + 2 * kAlignment;
  Block block = all < kMuch ? filled(all) : reserved(all);
  if (!block.memory) return nullptr;
  const auto start = reinterpret_cast<uintptr_t>(block.memory.get());
  const uintptr_t begin = (start + kAlignment - 1) / kAlignment * kAlignment;
  block.allocation = {begin, begin + std::max<size_t>(bytes, 1), device};
  Block& kept = blocks_[begin] = std::move(block);
  if (races_) {
    kept.shadow = races_->watch(begin, bytes, device == kHost);
    kept.allocation.shadow = &kept.shadow;
  }
  return reinterpret_cast<void*>(begin);
}

bool Memory::release(void* memory) {
  if (!memory) return true;
  const auto found = blocks_.find(reinterpret_cast<uintptr_t>(memory));
  if (found == blocks_.end()) return false;
  // As if it wrote there: no other operation may still use it.
  const Shadow& shadow = found->second.shadow;
  if (races_) races_->access(shadow, shadow.begin, shadow.bytes, true);
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
  if (races_ && found) races_->access(*found->shadow, begin, bytes, writes);
}

}  // namespace ptxsim
