// Turns a statement of PTX into an instruction.
#ifndef GLUON_SYNCBN_TESTS_PTXSIM_DECODER_H_
#define GLUON_SYNCBN_TESTS_PTXSIM_DECODER_H_

#include <map>
#include <string>
#include <unordered_map>
#include <vector>

#include "ptx.h"

namespace ptxsim {

// Whether there is such a type, for example "f32".
bool find_type(const std::string& name, Type* type);

// What names and literals of one kernel mean: each has a register.
class Names {
 public:
  explicit Names(Kernel* kernel) : kernel_(kernel) {}

  void declare_register(const std::string& name);
  // A parameter or an array in shared memory, with its offset there.
  void declare_symbol(const std::string& name, int offset) { symbols_[name] = offset; }

  int result(const std::string& name);
  int operand(const std::string& text, Type type);

 private:
  int new_register() { return kernel_->registers++; }
  int constant(uint64_t value);

  Kernel* kernel_;
  std::unordered_map<std::string, int> registers_, symbols_;
  std::map<uint64_t, int> constants_;
};

// A statement that is not a directive. Stops at all that is unknown.
Instruction decode(const std::string& statement, int line, Names* names);

}  // namespace ptxsim

#endif  // GLUON_SYNCBN_TESTS_PTXSIM_DECODER_H_
