// Linked into the library, this makes MXNet's CPU contexts act as GPUs: cpu(1) is device 1 of a
// fake CUDA on the host. See test_cuda_on_host.py.
#define SBN_FAKE_CPU_CONTEXTS
#include "cuda/fake_cuda.inc"

#define SBN_EXPORT extern "C" __attribute__((visibility("default")))

SBN_EXPORT void gluon_syncbn_fake_fail_next(const char* function, int error) {
  gluon_syncbn::fake_cuda::fail_next(function, error);
}

SBN_EXPORT void gluon_syncbn_fake_peers(int can) { gluon_syncbn::fake_cuda::set_peers(can != 0); }

// allocations, host_allocations, streams, events, all_allocations, all_streams, kernels,
// synchronizations, uploads, stream_waits, contexts
SBN_EXPORT void gluon_syncbn_fake_usage(int* numbers) {
  const auto usage = gluon_syncbn::fake_cuda::usage();
  const int all[] = {usage.allocations,  usage.host_allocations, usage.streams,
                     usage.events,       usage.all_allocations,  usage.all_streams,
                     usage.kernels,      usage.synchronizations, usage.uploads,
                     usage.stream_waits, usage.contexts};
  for (int number : all) *numbers++ = number;
}
