// Forward and backward of one call on a GPU. Only sums leave the device, and not even those of a
// device that is alone. The GPUs of this process read each other's sums once an event has passed.
// If CPU contexts or other processes take part, the sums are added on the host.
#ifndef GLUON_SYNCBN_CUDA_PASSES_H_
#define GLUON_SYNCBN_CUDA_PASSES_H_

#include <memory>
#include <vector>

#include "cuda/device.h"

namespace gluon_syncbn {

// `gpus` read each other's sums. If there are none, the sums go to the host.
std::unique_ptr<Pass> gpu_pass(int device, const std::vector<int>& gpus, const ForwardTask& task);
std::unique_ptr<Pass> gpu_pass(int device, const std::vector<int>& gpus, const BackwardTask& task);

}  // namespace gluon_syncbn

#endif  // GLUON_SYNCBN_CUDA_PASSES_H_
