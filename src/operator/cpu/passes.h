// Forward and backward of one call on a CPU context, by the kernels of kernels.h. A context that is
// alone computes sums and results in one pass over memory; others sum, wait for the sums of all,
// and read their shard a second time.
#ifndef GLUON_SYNCBN_CPU_PASSES_H_
#define GLUON_SYNCBN_CPU_PASSES_H_

#include <memory>

#include "numerics/passes.h"

namespace gluon_syncbn {

std::unique_ptr<Pass> cpu_pass(const ForwardTask& task);
std::unique_ptr<Pass> cpu_pass(const BackwardTask& task);

}  // namespace gluon_syncbn

#endif  // GLUON_SYNCBN_CPU_PASSES_H_
