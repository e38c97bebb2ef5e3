// A fake CUDA runtime. Device memory is host memory, and kernels run on the host (cuda_on_host.h).
// Invalid calls fail, and copies to the host are not visible before the stream is synchronized.
#ifndef GLUON_SYNCBN_TESTS_FAKE_CUDA_H_
#define GLUON_SYNCBN_TESTS_FAKE_CUDA_H_

#include <cstdint>
#include <string>
#include <vector>

namespace gluon_syncbn {

namespace fake_cuda {

// Counts over all devices.
struct Usage {
  // In use.
  int allocations = 0, host_allocations = 0, streams = 0;
  // Since the start.
  int all_allocations = 0, all_streams = 0, kernels = 0, synchronizations = 0;
  // Devices that have a context.
  int contexts = 0;
};
Usage usage();

// The next call of this function ("kernel" for kernels) fails with this error: 2 is out of memory,
// 700 an illegal address.
void fail_next(const std::string& function, int error);

// The device of the calling thread.
int device();

}  // namespace fake_cuda
}  // namespace gluon_syncbn

#endif  // GLUON_SYNCBN_TESTS_FAKE_CUDA_H_
