// Kernels in PTX, as the simulator runs them.
#ifndef GLUON_SYNCBN_TESTS_PTXSIM_PTX_H_
#define GLUON_SYNCBN_TESTS_PTXSIM_PTX_H_

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace ptxsim {

constexpr int kLanes = 32;
constexpr uint32_t kAllLanes = 0xffffffffu;

// Ends the process with a message.
[[noreturn]] void stop(const std::string& what);

struct Type {
  enum Kind : uint8_t { kBits, kUnsigned, kSigned, kFloat, kBFloat, kPredicate };
  Kind kind = kBits;
  // Bytes of one value, and the number of values that a register has.
  uint8_t size = 4, packed = 1;

  bool is_real() const { return kind == kFloat || kind == kBFloat; }
};

struct Instruction;

// Computes results from operands for the active lanes. A register is kLanes values of 64 bits;
// shorter ones are extended by zeros.
using Compute = void (*)(const Instruction&, uint64_t* registers, uint32_t active);

enum class Op : uint8_t {
  kCompute,
  kLoad,
  kStore,
  kLoadParameter,
  kBranch,
  kReturn,
  kBlockBarrier,
  kWarpBarrier,
  kShuffle,
  kVote
};

enum class Space : uint8_t { kGlobal, kShared };

struct Instruction {
  Op op = Op::kCompute;
  Compute compute = nullptr;
  // Of the result; and of the operand of a conversion.
  Type type, from;
  Space space = Space::kGlobal;
  // The register of the predicate under which it runs, or -1.
  int guard = -1;
  // Registers. Of a memory access the first operand is the address.
  std::vector<int> results, operands;
  // Added to an address.
  int64_t offset = 0;
  // The index of the instruction that a branch goes to, once `label` is known.
  int target = -1;
  std::string label;
  // Of a vote: whether any lane is asked for, or all.
  bool any = false;
  // Whether it takes a unit for double.
  bool computes_double = false;
  std::string text;
  int line = 0;

  // Values that a memory access moves per lane.
  int width() const {
    return static_cast<int>(op == Op::kStore ? operands.size() - 1 : results.size());
  }
};

struct Kernel {
  struct Parameter {
    int size, offset;
  };

  std::string name;
  std::vector<Parameter> parameters;
  int parameters_size = 0, shared_size = 0, registers = 0;
  std::vector<Instruction> code;
  // Whether a branch goes to the instruction.
  std::vector<char> has_label;
  // Registers of constants, and of what a thread is, such as "%tid.x".
  std::vector<std::pair<int, uint64_t>> constants;
  std::vector<std::pair<int, std::string>> specials;
  // How often each instruction ran for at least one lane.
  mutable std::vector<uint64_t> ran;
  // The registers of each warp of a block, kLanes values each. There are many of them, so they are
  // kept between launches.
  mutable std::vector<std::unique_ptr<uint64_t[]>> register_files;
};

// The function for an instruction such as "add", {"rn", "f32"}; null if there is none. `i` has the
// rest of it.
Compute find_compute(const std::string& name, const std::vector<std::string>& modifiers,
                     const Instruction& i);

// The kernels of a text, by name.
std::map<std::string, Kernel> parse(const std::string& text);

}  // namespace ptxsim

#endif  // GLUON_SYNCBN_TESTS_PTXSIM_PTX_H_
