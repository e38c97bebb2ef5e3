// Counts Ctrl-C, for calls that wait.
#ifndef GLUON_SYNCBN_MXNET_INTERRUPTS_H_
#define GLUON_SYNCBN_MXNET_INTERRUPTS_H_

#include <atomic>
#include <chrono>

namespace gluon_syncbn {

// Incremented in the signal handler. A wait during which it changes ends in an error.
inline std::atomic<unsigned> interrupts{0};

// How often a waiting call wakes up to check for that.
constexpr std::chrono::duration<double> kSlice{0.1};

}  // namespace gluon_syncbn

#endif  // GLUON_SYNCBN_MXNET_INTERRUPTS_H_
