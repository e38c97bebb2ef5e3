// Forward and backward of one call on a CPU context, by the kernels of kernels.h. All sum their
// shard, wait for the sums of all, and read it a second time. A context that is alone does both for
// a few channels at a time where it can, so the second reading finds them in the cache.
#ifndef GLUON_SYNCBN_CPU_PASS_H_
#define GLUON_SYNCBN_CPU_PASS_H_

#include <memory>

#include "numerics/pass.h"

namespace gluon_syncbn {

std::unique_ptr<Pass> cpu_pass(const ForwardTask& task);
std::unique_ptr<Pass> cpu_pass(const BackwardTask& task);

// Lets running statistics (mean, variance, and the number of batches or null) follow batches with
// these statistics, C for each.
void update_running(DType dtype, void* const (&running)[3], const RunningRule& rule, int64_t C,
                    int64_t batches, const BatchCounts& counts, const Statistics* statistics);

}  // namespace gluon_syncbn

#endif  // GLUON_SYNCBN_CPU_PASS_H_
