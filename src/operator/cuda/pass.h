// Forward and backward of one call on a GPU. The GPUs of this process read each other's sums once
// an event has passed. If CPU contexts or other processes take part, the host adds the sums.
#ifndef GLUON_SYNCBN_CUDA_PASS_H_
#define GLUON_SYNCBN_CUDA_PASS_H_

#include <memory>
#include <vector>

#include "cuda/device.h"

namespace gluon_syncbn {

// `gpus` read each other's sums. If there are none, the sums go to the host.
std::unique_ptr<Pass> gpu_pass(int device, const std::vector<int>& gpus, const ForwardTask& task);
std::unique_ptr<Pass> gpu_pass(int device, const std::vector<int>& gpus, const BackwardTask& task);

}  // namespace gluon_syncbn

#endif  // GLUON_SYNCBN_CUDA_PASS_H_
