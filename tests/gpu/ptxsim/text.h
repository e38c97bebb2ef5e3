// Small functions for text.
#ifndef GLUON_SYNCBN_TESTS_PTXSIM_TEXT_H_
#define GLUON_SYNCBN_TESTS_PTXSIM_TEXT_H_

#include <algorithm>
#include <string>
#include <vector>

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

}  // namespace ptxsim

#endif  // GLUON_SYNCBN_TESTS_PTXSIM_TEXT_H_
