// A fake CUDA runtime. Device memory is host memory, and kernels run on the host (cuda_on_host.h).
// Invalid calls fail. Work that is queued in a stream waits until somebody waits for the stream, or
// for an event behind it. The program stops where a kernel reads sums of another stream without
// having waited for them, or of a device that it has no access to, and where they are overwritten
// or freed before.
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
  int allocations = 0, host_allocations = 0, streams = 0, events = 0;
  // Since the start.
  int all_allocations = 0, all_streams = 0, kernels = 0, synchronizations = 0, uploads = 0;
  // Waits of streams for events.
  int stream_waits = 0;
  // Devices that have a context.
  int contexts = 0;
};
Usage usage();

// After `calls` more calls, one of this function ("kernel" for kernels) fails with this error and
// does nothing: 2 is out of memory, 700 an illegal address, 0 no error.
void fail_next(const std::string& function, int error, int calls = 0);

// Whether devices can access each other's memory, which they can at the start.
void set_peers(bool can);

// The device of the calling thread.
int device();

}  // namespace fake_cuda
}  // namespace gluon_syncbn

#endif  // GLUON_SYNCBN_TESTS_FAKE_CUDA_H_
