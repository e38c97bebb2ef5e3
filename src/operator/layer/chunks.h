// What virtual devices have of a batch: as many chunks of samples, the first of which are larger by
// one where they do not share the samples evenly.
#ifndef GLUON_SYNCBN_LAYER_CHUNKS_H_
#define GLUON_SYNCBN_LAYER_CHUNKS_H_

#include <cstdint>
#include <vector>

#include "numerics/kernels.h"

namespace gluon_syncbn {

// Throw where there are less samples than virtual devices.
std::vector<ForwardPart> cut(const ForwardPart& whole, DType dtype, int64_t samples,
                             int virtual_devices);
std::vector<BackwardPart> cut(const BackwardPart& whole, DType dtype, int64_t samples,
                              int virtual_devices);

}  // namespace gluon_syncbn

#endif  // GLUON_SYNCBN_LAYER_CHUNKS_H_
