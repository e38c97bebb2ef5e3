// Memory of the devices and of the host, as kernels and copies may use it.
#ifndef GLUON_SYNCBN_TESTS_PTXSIM_MEMORY_H_
#define GLUON_SYNCBN_TESTS_PTXSIM_MEMORY_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <utility>

#include "ptxsim.h"
#include "races.h"

namespace ptxsim {

// The device of page-locked memory, which all devices can access.
constexpr int kHost = -1;

struct Allocation {
  uintptr_t begin = 1, end = 0;
  int device = kHost;
  const Shadow* shadow = nullptr;

  bool holds(uintptr_t address, size_t bytes) const {
    return begin <= address && address + bytes <= end;
  }
};

// Memory of the operating system.
void* take_pages(size_t bytes);
void give_pages(void* memory, size_t bytes);

class Memory {
 public:
  explicit Memory(Races* races) : races_(races) {}
  // New memory is full of NaN, or, if there is very much of it, of zeros, which take no memory
  // until they are written. Null if there is not that much.
  void* allocate(size_t bytes, int device);
  // Whether there was such memory.
  bool release(void* memory);

  // Whether a device may access this memory, which is then a part of `last`.
  bool allows(uintptr_t address, size_t bytes, int device, Allocation* last) const;
  // Whether there is memory of a device, or page-locked memory, at [address, address + bytes).
  bool holds(const void* address, size_t bytes) const;
  // Tells `races` of an access, if there is memory.
  void access(const void* address, size_t bytes, bool writes) const;

  // For later allocations.
  void set_pages(Pages pages) { pages_ = pages; }

  Races& races() const { return *races_; }
  // Whether that was new.
  bool enable_peer_access(int device, int peer) { return peers_.insert({device, peer}).second; }

 private:
  struct Block {
    Allocation allocation{};
    std::unique_ptr<char, std::function<void(char*)>> memory{};
    Shadow shadow{};
  };
  const Allocation* around(uintptr_t address) const;

  Races* const races_;
  Pages pages_{take_pages, give_pages};
  std::map<uintptr_t, Block> blocks_;
  std::set<std::pair<int, int>> peers_;
};

}  // namespace ptxsim

#endif  // GLUON_SYNCBN_TESTS_PTXSIM_MEMORY_H_
