// Instructions that compute values.
#ifndef GLUON_SYNCBN_TESTS_PTXSIM_VALUES_H_
#define GLUON_SYNCBN_TESTS_PTXSIM_VALUES_H_

#include <string>
#include <vector>

#include "ptx.h"

namespace ptxsim {

// The function for an instruction such as "add", {"rn", "f32"}; null if there is none.
Compute find_compute(const std::string& name, const std::vector<std::string>& modifiers,
                     const Instruction& i);

}  // namespace ptxsim

#endif  // GLUON_SYNCBN_TESTS_PTXSIM_VALUES_H_
