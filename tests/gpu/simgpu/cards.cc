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

// What differs from the table of the real functions.
int get_device(int* context) {
  *context = current;
  return 0;
}
int set_device(int context) {
  const int error = real->runtime.set_device(context % cards);
  if (error == 0) current = context;
  return error;
}
int has_context(int* active, int context) {
  return real->runtime.has_context(active, context % cards);
}
int multiprocessors(int* count, int context) {
  return real->runtime.multiprocessors(count, context % cards);
}
int can_access_peer(int* can, int context, int peer) {
  *can = can_access(context, peer);
  if (!*can || context % cards == peer % cards) return 0;
  return real->runtime.can_access_peer(can, context % cards, peer % cards);
}
int enable_peer_access(int peer) {
  constexpr int kPeerAccessUnsupported = 217;
  if (!can_access(current, peer) || peers == "refused") return kPeerAccessUnsupported;
  return current % cards == peer % cards ? 0 : real->runtime.enable_peer_access(peer % cards);
}
int copy_to_host(void* to, const void* from, size_t bytes, Stream stream) {
  enter("bytes copied", bytes);
  return real->runtime.copy_to_host(to, from, bytes, stream);
}
int copy_to_device(void* to, const void* from, size_t bytes, Stream stream) {
  enter("bytes copied", bytes);
  enter("copies to a device");
  return real->runtime.copy_to_device(to, from, bytes, stream);
}

// Puts a counted call in the place of a function. tag: tells tables of one type apart.
template <auto member, int tag, typename Table, typename... A>
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

template <DType dtype>
CudaKernels counted_kernels() {
  CudaKernels table = real->kernels(dtype);
#define COUNT(function)                                                                  \
  count<&CudaKernels::function, static_cast<int>(dtype)>(&table, &CudaKernels::function, \
                                                         "cudaLaunchKernel")
  COUNT(forward_sums);
  COUNT(backward_sums);
  COUNT(finish_forward);
  COUNT(finish_backward);
  COUNT(normalize);
  COUNT(input_gradient);
#undef COUNT
  return table;
}

const CudaKernels& kernels_of(DType dtype) {
  static const std::map<DType, CudaKernels> all{
      {DType::kFloat32, counted_kernels<DType::kFloat32>()},
      {DType::kFloat64, counted_kernels<DType::kFloat64>()},
      {DType::kFloat16, counted_kernels<DType::kFloat16>()},
      {DType::kBFloat16, counted_kernels<DType::kBFloat16>()}};
  return all.at(dtype);
}

void install() {
  static CudaBackend shared;
  real = cuda_backend();
  if (cudaGetDeviceCount(&cards) || cards < 1) cards = 1;
  if (const char* which = std::getenv("PTXSIM_PEERS")) peers = which;
  shared = *real;
  shared.kernels = kernels_of;
  CudaRuntime& table = shared.runtime;
  table.get_device = get_device;
  table.set_device = set_device;
  table.has_context = has_context;
  table.multiprocessors = multiprocessors;
  table.can_access_peer = can_access_peer;
  table.enable_peer_access = enable_peer_access;
  table.copy_to_host = copy_to_host;
  table.copy_to_device = copy_to_device;
#define COUNT(function, name) count<&CudaRuntime::function, 0>(&table, &CudaRuntime::function, name)
  COUNT(get_device, "cudaGetDevice");
  COUNT(set_device, "cudaSetDevice");
  COUNT(multiprocessors, "cudaDeviceGetAttribute");
  COUNT(malloc, "cudaMalloc");
  COUNT(free, "cudaFree");
  COUNT(malloc_host, "cudaHostAlloc");
  COUNT(free_host, "cudaFreeHost");
  COUNT(create_stream, "cudaStreamCreateWithFlags");
  COUNT(destroy_stream, "cudaStreamDestroy");
  COUNT(synchronize, "cudaStreamSynchronize");
  COUNT(create_event, "cudaEventCreateWithFlags");
  COUNT(destroy_event, "cudaEventDestroy");
  COUNT(record, "cudaEventRecord");
  COUNT(wait_for, "cudaStreamWaitEvent");
  COUNT(copy_to_host, "cudaMemcpyAsync");
  COUNT(copy_to_device, "cudaMemcpyAsync");
#undef COUNT
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
