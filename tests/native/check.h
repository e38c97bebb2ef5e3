// Checks for test programs, which count them and continue after a failure.
#ifndef GLUON_SYNCBN_TESTS_CHECK_H_
#define GLUON_SYNCBN_TESTS_CHECK_H_

#include <unistd.h>

#include <atomic>
#include <initializer_list>
#include <iomanip>
#include <iostream>
#include <string>
#include <vector>

namespace check {
inline std::atomic<int> passed{0}, failed{0};
// Describes the next checks in the message of a failure. Must not be set while threads check.
inline std::string context;

// Counts the check and returns whether to print a failure.
inline bool fails(bool holds) { return holds ? (++passed, false) : ++failed <= 20; }

template <typename E, typename F>
void throws(const F& f, std::initializer_list<std::string> texts, int line) {
  std::string text = "nothing";
  bool holds = false;
  try {
    f();
  } catch (const E& error) {
    text = error.what();
    holds = true;
    for (const std::string& part : texts) holds = holds && text.find(part) != text.npos;
  }
  if (fails(holds)) std::cerr << "line " << line << ": " << context << ": thrown: " << text << "\n";
}

struct Test {
  const char* name;
  void (*run)();
};
inline std::vector<Test> tests;
inline bool add(const char* name, void (*run)()) {
  tests.push_back({name, run});
  return true;
}

inline int finish(const char* name) {
  std::cout << name << ": " << passed << " passed, " << failed << " failed\n";
  return failed ? 1 : 0;
}

// Runs the tests of the program, in the order of the text. After so many seconds they hang, and
// fail.
inline int run_all(const char* name, unsigned seconds = 0) {
  alarm(seconds);
  for (const Test& test : tests) {
    context = test.name;
    test.run();
  }
  return finish(name);
}
}  // namespace check

// A test, which run_all knows. Its name describes its checks.
#define TEST(name)                                                        \
  void name();                                                            \
  [[maybe_unused]] const bool name##_is_a_test = check::add(#name, name); \
  void name()
#define CHECK_SAY(holds, what)                                                                  \
  if (!check::fails(holds)) {                                                                   \
  } else                                                                                        \
    std::cerr << std::setprecision(17) << "line " << __LINE__ << ": " << check::context << ": " \
              << what << "\n"
#define CHECK(condition) CHECK_SAY(condition, #condition)
#define CHECK_EQ(a, b) CHECK_SAY((a) == (b), #a " is " << (a) << ", not " << (b))
// Checks that the statement throws this type, with each of the texts in what().
#define CHECK_THROWS(type, statement, ...) \
  check::throws<type>([&] { statement; }, {__VA_ARGS__}, __LINE__)

#endif  // GLUON_SYNCBN_TESTS_CHECK_H_
