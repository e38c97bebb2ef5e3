// How a function is declared that Python calls, or that calls Python. The library carries each
// declaration as a text, from which native/library.py takes the types, so no other place names
// them. Types are void, int, int64_t, double and pointers, of which const char* is UTF-8; the
// functions copy what they keep. No exception may leave them.
#ifndef GLUON_SYNCBN_API_DECLARE_H_
#define GLUON_SYNCBN_API_DECLARE_H_

#include <exception>
#include <string>

#include "api/exports.h"
#include "threads/waits.h"

#define SBN_DECLARATION(result, name, parameters) \
  SBN_EXPORT const char name##_declaration[];     \
  const char name##_declaration[] = #result #parameters

// SBN_API(int, gluon_syncbn_some_name, (int64_t layer, const char* text)) { ... }
#define SBN_API(result, name, parameters)    \
  SBN_DECLARATION(result, name, parameters); \
  SBN_EXPORT result name parameters

// A pointer to a function of Python's, which native/callbacks.py sets. Its last parameter is an
// Outcome*.
#define SBN_CALLBACK(result, name, parameters) \
  SBN_DECLARATION(result, name, parameters);   \
  SBN_EXPORT result(*name) parameters;         \
  result(*name) parameters = nullptr

namespace gluon_syncbn {

// What gluon_syncbn_text returns: of the last function on this thread that has a text for Python,
// such as an error.
inline thread_local std::string text_for_python;

// Returns f(), or the error that it throws becomes the text: then -1, or -2 if Ctrl-C has come.
template <typename F>
int status_of(const F& f) {
  const Interruption interruption;
  try {
    return f();
  } catch (const std::exception& failure) {
    text_for_python = failure.what();
    return interruption.what() == Waited::kInterrupted ? -2 : -1;
  }
}

// Returns f(), or the error that it throws becomes the text: then null.
template <typename F>
auto or_null(const F& f) -> decltype(f()) {
  try {
    return f();
  } catch (const std::exception& failure) {
    text_for_python = failure.what();
    return nullptr;
  }
}

}  // namespace gluon_syncbn

#endif  // GLUON_SYNCBN_API_DECLARE_H_
