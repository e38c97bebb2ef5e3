// Races between streams in the memory of the devices: for each two bytes, which operations (kernels
// and copies) were the last to write and to read them, and by vector clocks which operations are
// ordered.
#ifndef GLUON_SYNCBN_TESTS_PTXSIM_RACES_H_
#define GLUON_SYNCBN_TESTS_PTXSIM_RACES_H_

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

namespace ptxsim {

// How many operations of each timeline come before a point of the program. A timeline is a stream,
// or the host, all of whose threads count as one.
using Clock = std::vector<uint32_t>;
void join(Clock* clock, const Clock& other);

// One that was queued, and what comes before it (with itself).
struct Operation {
  uint32_t number = 0;
  Clock clock{};
};

// Who has accessed an allocation.
struct Shadow {
  // A cell for each two bytes: the operation that wrote last, and the readers since then (a list of
  // Races). Both are 0 at first. No cells: the memory is not watched.
  struct Free {
    void operator()(void* memory) const { std::free(memory); }
  };
  std::unique_ptr<uint64_t[], Free> cells{};
  uintptr_t begin = 0;
  size_t bytes = 0;
  // The operations that were queued before it was allocated cannot mean this memory.
  uint32_t first_operation = 0;
};

class Races {
 public:
  // `report` does not return.
  explicit Races(std::function<void(const std::string&)> report);

  // Returns its number; that of the host is 0.
  uint32_t add_timeline(const std::string& name);
  // `clock` is that of the timeline, which goes on. The name is that of a kernel, or "a copy".
  Operation add(const char* name, uint32_t timeline, Clock* clock);

  Shadow watch(uintptr_t begin, size_t bytes, bool written_by_host) const;
  // Accesses from now on are by this operation.
  void start(Operation operation);
  // Reports an access that is not ordered with an earlier one, if one of both writes, a read of
  // what nobody has written, and an operation that was queued before there was this memory.
  void access(const Shadow& shadow, uintptr_t begin, size_t bytes, bool writes);

 private:
  struct Known {
    const char* name;
    uint32_t timeline, time;
  };
  struct Reader {
    uint32_t operation, next;
  };
  // What cells become by an access of the current operation, and the last of them.
  struct Changes {
    std::unordered_map<uint64_t, uint64_t> all{};
    uint64_t from = ~uint64_t{0}, to = ~uint64_t{0};
  };

  uint64_t after(uint64_t cell, bool writes);
  void check(uint64_t cell, const Shadow& shadow, size_t place, bool writes) const;
  bool is_ordered(uint32_t operation) const;
  std::string describe(uint32_t operation) const;

  std::function<void(const std::string&)> report_;
  std::vector<std::string> timelines_;
  // By number. 0 is nobody; 1 the host, whose accesses to page-locked memory are not seen.
  std::vector<Known> operations_{2};
  std::vector<Reader> readers_{1};
  Operation current_;
  Changes reads_{}, writes_{};
};

}  // namespace ptxsim

#endif  // GLUON_SYNCBN_TESTS_PTXSIM_RACES_H_
