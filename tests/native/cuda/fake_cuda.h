// A CUDA of the tests' own: "device" memory lies on the host, kernels run there (cuda_on_host.h),
// and what a real one would refuse, or leave undone until it is waited for, shows.
#ifndef GLUON_SYNCBN_TESTS_FAKE_CUDA_H_
#define GLUON_SYNCBN_TESTS_FAKE_CUDA_H_

#include <cstdint>
#include <string>
#include <vector>

namespace gluon_syncbn {

namespace fake_cuda {

// What is in use, over all devices.
struct Usage {
  int allocations = 0, host_allocations = 0, streams = 0;
  // Ever made.
  int all_allocations = 0, all_streams = 0, kernels = 0, synchronizations = 0;
  // Devices that ever were chosen.
  int contexts = 0;
};
Usage usage();

// The next call of this function fails so: 2 is out of memory, 700 an illegal address. Kernels are
// called "kernel".
void fail_next(const std::string& function, int error);

// The device of the calling thread.
int device();

}  // namespace fake_cuda
}  // namespace gluon_syncbn

#endif  // GLUON_SYNCBN_TESTS_FAKE_CUDA_H_
