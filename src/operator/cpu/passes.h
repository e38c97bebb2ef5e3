// Forward and backward of one call on a CPU context, by the kernels of kernels.h. All sum their
// shard, wait for the sums of all, and read it a second time. A context that is alone does both for
// a few channels at a time where it can, so the second reading finds them in the cache.
#ifndef GLUON_SYNCBN_CPU_PASSES_H_
#define GLUON_SYNCBN_CPU_PASSES_H_

#include <memory>

#include "numerics/passes.h"

namespace gluon_syncbn {

std::unique_ptr<Pass> cpu_pass(const ForwardTask& task);
std::unique_ptr<Pass> cpu_pass(const BackwardTask& task);

}  // namespace gluon_syncbn

#endif  // GLUON_SYNCBN_CPU_PASSES_H_
