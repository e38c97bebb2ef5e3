// Texts in messages to the user.
#ifndef GLUON_SYNCBN_PROCESSES_TEXT_H_
#define GLUON_SYNCBN_PROCESSES_TEXT_H_

#include <cmath>
#include <cstdint>
#include <sstream>
#include <string>
#include <vector>

#include "threads/patience.h"

namespace gluon_syncbn {

// "cpu(0), cpu(1)", or "none".
inline std::string comma_separated(const std::vector<std::string>& names) {
  std::string text;
  for (const std::string& name : names) text += (text.empty() ? "" : ", ") + name;
  return text.empty() ? "none" : text;
}

// "0.35 s", "12 s".
inline std::string seconds_text(Patience::Seconds seconds) {
  const double digits = seconds.count() < 10 ? 100 : 1;
  std::ostringstream text;
  text.precision(15);
  text << std::round(seconds.count() * digits) / digits << " s";
  return text.str();
}

// An error for `sizes`, by rank, that differ.
inline std::string different_sizes(const std::string& key, const std::vector<int64_t>& sizes) {
  std::string text = "The processes bring different amounts of numbers to " + key + ", by rank:";
  for (const int64_t size : sizes) text += ' ' + std::to_string(size);
  return text +
         ". Bring arrays of one size, and make the same layers in the same order, in every "
         "process.";
}

}  // namespace gluon_syncbn

#endif  // GLUON_SYNCBN_PROCESSES_TEXT_H_
