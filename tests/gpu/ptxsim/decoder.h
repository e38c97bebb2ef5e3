// Turns a statement of PTX into an instruction, and small functions for its text.
#ifndef GLUON_SYNCBN_TESTS_PTXSIM_DECODER_H_
#define GLUON_SYNCBN_TESTS_PTXSIM_DECODER_H_

#include <algorithm>
#include <map>
#include <string>
#include <unordered_map>
#include <vector>

#include "ptx.h"

namespace ptxsim {

inline std::string trim(const std::string& s) {
  const char* const spaces = " \t\r\n";
  const size_t begin = s.find_first_not_of(spaces);
  return begin == s.npos ? "" : s.substr(begin, s.find_last_not_of(spaces) - begin + 1);
}

inline bool contains(const std::vector<std::string>& words, const std::string& word) {
  return std::find(words.begin(), words.end(), word) != words.end();
}

// The parts between separators that are in no brackets.
inline std::vector<std::string> split(const std::string& s, char separator) {
  std::vector<std::string> parts{""};
  int depth = 0;
  for (const char c : s) {
    if (c == '{' || c == '[') ++depth;
    if (c == '}' || c == ']') --depth;
    if (c == separator && depth == 0) {
      parts.emplace_back();
    } else {
      parts.back() += c;
    }
  }
  for (std::string& part : parts) part = trim(part);
  if (parts.back().empty()) parts.pop_back();
  return parts;
}

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
