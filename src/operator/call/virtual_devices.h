// Cuts a batch into the chunks of virtual devices. The first chunks are larger by one sample if the
// samples do not divide evenly.
#ifndef GLUON_SYNCBN_CALL_VIRTUAL_DEVICES_H_
#define GLUON_SYNCBN_CALL_VIRTUAL_DEVICES_H_

#include <cstdint>
#include <vector>

#include "numerics/shards.h"

namespace gluon_syncbn {

// For ForwardShard and BackwardShard. Throws if there are fewer samples than virtual devices.
template <typename Part>
std::vector<Part> cut(const Part& whole, DType dtype, int64_t samples, int virtual_devices);

}  // namespace gluon_syncbn

#endif  // GLUON_SYNCBN_CALL_VIRTUAL_DEVICES_H_
