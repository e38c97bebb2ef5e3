// Lets MXNet's GPU contexts share the GPUs that there are ("cards"): context k is on card k modulo
// their number. Linked into the library for an MXNet whose memory is page-locked memory of the host
// (mxnet_runtime.cc), of the CUDA that this library uses. As in ptxsim, calls of CUDA are counted,
// and can be made to fail.
// PTXSIM_PEERS: see gluon_syncbn_cards_set_peers.
#include <cstdlib>
#include <map>
#include <mutex>
#include <string>

#include "api/exports.h"
#include "cuda/backend.h"
#include "numerics/dtypes.h"

extern "C" int cudaGetDeviceCount(int* count);

namespace gluon_syncbn {
namespace {

const CudaBackend* real = nullptr;
int cards = 1;
thread_local int current = 0;

std::mutex mutex;
std::string peers;
std::map<std::string, uint64_t> counts;
// The calls before one that fails; -1: none does.
std::map<std::string, int> left;

// Adds to a count. Returns the error of a call that is to fail, else 0.
int enter(const std::string& name, uint64_t count = 1) {
  constexpr int kOutOfMemory = 2, kIllegalAddress = 700;
  const std::lock_guard<std::mutex> lock(mutex);
  const auto found = left.find(name);
  if (found != left.end() && found->second >= 0 && found->second-- == 0) {
    return name.find("lloc") != name.npos ? kOutOfMemory : kIllegalAddress;
  }
  counts[name] += count;
  return 0;
}

bool can_access(int context, int peer) {
  const std::lock_guard<std::mutex> lock(mutex);
  return peers != "none" && (peers != "one way" || context < peer);
}

// Puts a counted call in the place of a function. Tag: tells tables of one type apart.
template <typename Tag, auto member, typename Table, typename... A>
void count(Table* table, int (*Table::*)(A...), const char* name) {
  static const char* counted;
  static int (*inner)(A...);
  counted = name;
  inner = table->*member;
  table->*member = [](A... a) {
    const int error = enter(counted);
    return error ? error : inner(a...);
  };
}
#define COUNT(Tag, table, member, name) count<Tag, &member>(&table, &member, name)

const CudaKernels& kernels_of(DType dtype) {
  return with_dtype(dtype, [&](auto zero) -> const CudaKernels& {
    static const CudaKernels counted = [&] {
      CudaKernels table = real->kernels(dtype);
      using T = decltype(zero);
      COUNT(T, table, CudaKernels::forward_sums, "cudaLaunchKernel");
      COUNT(T, table, CudaKernels::backward_sums, "cudaLaunchKernel");
      COUNT(T, table, CudaKernels::finish_forward, "cudaLaunchKernel");
      COUNT(T, table, CudaKernels::count_batch, "cudaLaunchKernel");
      COUNT(T, table, CudaKernels::finish_backward, "cudaLaunchKernel");
      COUNT(T, table, CudaKernels::normalize, "cudaLaunchKernel");
      COUNT(T, table, CudaKernels::input_gradient, "cudaLaunchKernel");
      return table;
    }();
    return counted;
  });
}

void map_contexts(CudaRuntime* table) {
  table->set_device = [](int context) {
    const int error = real->runtime.set_device(context % cards);
    if (error == 0) current = context;
    return error;
  };
  table->can_access_peer = [](int* can, int context, int peer) {
    *can = can_access(context, peer);
    if (!*can || context % cards == peer % cards) return 0;
    return real->runtime.can_access_peer(can, context % cards, peer % cards);
  };
  table->enable_peer_access = [](int peer) {
    constexpr int kPeerAccessUnsupported = 217;
    if (!can_access(current, peer) || peers == "refused") return kPeerAccessUnsupported;
    return current % cards == peer % cards ? 0 : real->runtime.enable_peer_access(peer % cards);
  };
  table->copy_to_host = [](void* to, const void* from, size_t bytes, Stream stream) {
    enter("bytes copied", bytes);
    return real->runtime.copy_to_host(to, from, bytes, stream);
  };
  table->copy_to_device = [](void* to, const void* from, size_t bytes, Stream stream) {
    enter("bytes copied", bytes);
    enter("copies to a device");
    return real->runtime.copy_to_device(to, from, bytes, stream);
  };
}

void install() {
  static CudaBackend shared = *cuda_backend();
  real = cuda_backend();
  if (cudaGetDeviceCount(&cards) || cards < 1) cards = 1;
  if (const char* which = std::getenv("PTXSIM_PEERS")) peers = which;
  shared.kernels = kernels_of;
  CudaRuntime& table = shared.runtime;
  map_contexts(&table);
  COUNT(void, table, CudaRuntime::set_device, "cudaSetDevice");
  COUNT(void, table, CudaRuntime::malloc, "cudaMalloc");
  COUNT(void, table, CudaRuntime::free, "cudaFree");
  COUNT(void, table, CudaRuntime::malloc_host, "cudaHostAlloc");
  COUNT(void, table, CudaRuntime::free_host, "cudaFreeHost");
  COUNT(void, table, CudaRuntime::create_stream, "cudaStreamCreateWithFlags");
  COUNT(void, table, CudaRuntime::destroy_stream, "cudaStreamDestroy");
  COUNT(void, table, CudaRuntime::synchronize, "cudaStreamSynchronize");
  COUNT(void, table, CudaRuntime::create_event, "cudaEventCreateWithFlags");
  COUNT(void, table, CudaRuntime::destroy_event, "cudaEventDestroy");
  COUNT(void, table, CudaRuntime::record, "cudaEventRecord");
  COUNT(void, table, CudaRuntime::wait_for, "cudaStreamWaitEvent");
  COUNT(void, table, CudaRuntime::copy_to_host, "cudaMemcpyAsync");
  COUNT(void, table, CudaRuntime::copy_to_device, "cudaMemcpyAsync");
  set_cuda_backend(&shared);
}

}  // namespace
}  // namespace gluon_syncbn

using namespace gluon_syncbn;

// Page-locked memory, which all cards can use at the host's address; null if there is none.
SBN_EXPORT void* gluon_syncbn_cards_allocate(size_t bytes) {
  static std::once_flag once;
  std::call_once(once, install);
  void* memory = nullptr;
  return real->runtime.malloc_host(&memory, bytes) ? nullptr : memory;
}
SBN_EXPORT void gluon_syncbn_cards_release(void* memory) { real->runtime.free_host(memory); }

// As ptxsim_calls, ptxsim_fail_next and ptxsim_set_peers (ptxsim.h). Contexts on one card are
// peers.
SBN_EXPORT uint64_t gluon_syncbn_cards_calls(const char* name) {
  const std::lock_guard<std::mutex> lock(mutex);
  return counts[name];
}
SBN_EXPORT void gluon_syncbn_cards_fail_next(const char* function, int calls) {
  const std::lock_guard<std::mutex> lock(mutex);
  left[function] = calls;
}
SBN_EXPORT void gluon_syncbn_cards_set_peers(const char* which) {
  const std::lock_guard<std::mutex> lock(mutex);
  peers = which;
}
