// Streams and memory come from pools and go back to them, as allocating and freeing may wait for
// everything that runs on the device. A slot holds a stream, an event and the memory of one pass.
#include "cuda/device.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <utility>

namespace gluon_syncbn {
namespace {

constexpr size_t kAlignment = 256;
// Enough for most layers.
constexpr size_t kMinSize = 1 << 20;

// For calls whose failure is ignored. Clears the error, which the runtime would otherwise report
// after the thread's next kernel.
bool succeeds(const CudaRuntime& runtime, int error) {
  if (error) runtime.clear_error();
  return error == 0;
}

// Memory of a device, or page-locked memory of the host: blocks of 2^n bytes by their size, cut
// from larger pieces.
struct Blocks {
  std::map<size_t, std::vector<void*>> idle;
  std::vector<void*> pieces;
  char* rest = nullptr;
  size_t rest_size = 0;
};

}  // namespace

int gpu_of(const std::string& context) {
  return context.compare(0, 4, "gpu(") == 0 ? std::atoi(context.c_str() + 4) : -1;
}

// A stream of one device, and the memory of what is queued there.
struct CudaStream::StreamSlot {
  int device = 0;
  Stream stream = nullptr;
  Event event = nullptr;
  std::vector<std::shared_ptr<void>> memory;

  void clear(const CudaRuntime& runtime) {
    if (event) succeeds(runtime, runtime.destroy_event(std::exchange(event, nullptr)));
    if (stream) succeeds(runtime, runtime.destroy_stream(std::exchange(stream, nullptr)));
  }
};

// Idle stream slots and memory. There are as many slots, including those in use, as there ever were
// simultaneous calls.
struct CudaStream::Pool {
  struct Device {
    std::vector<std::unique_ptr<StreamSlot>> idle;
    // On the device and on the host.
    Blocks memory[2];
  };
  std::mutex mutex;
  std::map<int, Device> devices;
  std::map<std::vector<int>, bool> peers;
  // Advances when everything is freed.
  int generation = 0;
};

// Not destroyed at exit: calls may still be in progress when the process ends.
CudaStream::Pool*& CudaStream::pool() {
  static Pool* pool = new Pool;
  return pool;
}

CudaStream::CudaStream(int device, DType dtype, std::string what)
    : runtime_(cuda_backend()->runtime),
      kernels_(cuda_backend()->kernels(dtype)),
      device_(device),
      what_(std::move(what)) {
  check(runtime_.set_device(device), "cudaSetDevice");
  // Otherwise the first kernel would report an error that other code has left on this thread.
  runtime_.clear_error();
  auto slot = std::make_unique<StreamSlot>();
  {
    Pool& slots = *pool();
    const std::lock_guard<std::mutex> lock(slots.mutex);
    auto& idle = slots.devices[device].idle;
    if (!idle.empty()) {
      slot = std::move(idle.back());
      idle.pop_back();
    }
  }
  if (!slot->stream) {
    slot->device = device;
    check(runtime_.create_stream(&slot->stream), "cudaStreamCreateWithFlags");
    if (const int error = runtime_.create_event(&slot->event)) {
      slot->clear(runtime_);
      check(error, "cudaEventCreateWithFlags");
    }
  }
  // The deleter runs on the thread that holds the slot last, which may be another device's.
  slot_ = {slot.release(), [](StreamSlot* done) {
             done->memory.clear();
             Pool& slots = *pool();
             const std::lock_guard<std::mutex> lock(slots.mutex);
             slots.devices[done->device].idle.emplace_back(done);
           }};
}

CudaStream::~CudaStream() {
  if (finished_) return;
  // After an error, perhaps of other work. Queued work may still be in progress.
  resume();
  succeeds(runtime_, runtime_.synchronize(slot_->stream));
}

void CudaStream::resume() const noexcept { succeeds(runtime_, runtime_.set_device(device_)); }

void CudaStream::check(int error, const std::string& call) const {
  if (error == 0) return;
  const std::string name = runtime_.error_name(error), text = runtime_.error_text(error);
  runtime_.clear_error();
  throw std::runtime_error(call + " failed on GPU " + std::to_string(device_) + " for " + what_ +
                           ": " + text + " (" + name + ").");
}

std::shared_ptr<void> CudaStream::take(bool on_host, size_t bytes) {
  size_t size = kAlignment;
  while (size < bytes) size *= 2;
  Pool& all = *pool();
  std::unique_lock<std::mutex> lock(all.mutex);
  const auto blocks = [&]() -> Blocks& { return all.devices[device_].memory[on_host]; };
  if (blocks().idle[size].empty() && blocks().rest_size < size) {
    // Without the lock, so that other GPUs go on while this one allocates.
    lock.unlock();
    const size_t piece = std::max(size, kMinSize);
    void* more = nullptr;
    check(on_host ? runtime_.malloc_host(&more, piece) : runtime_.malloc(&more, piece),
          (on_host ? "cudaHostAlloc of " : "cudaMalloc of ") + std::to_string(piece) + " bytes");
    lock.lock();
    blocks().pieces.push_back(more);
    blocks().rest = static_cast<char*>(more);
    blocks().rest_size = piece;
  }
  Blocks& here = blocks();
  std::vector<void*>& idle = here.idle[size];
  if (idle.empty()) {
    idle.push_back(here.rest);
    here.rest += size;
    here.rest_size -= size;
  }
  void* const block = idle.back();
  idle.pop_back();
  const auto give_back = [device = device_, on_host, size,
                          generation = all.generation](void* done) {
    Pool& now = *pool();
    const std::lock_guard<std::mutex> again(now.mutex);
    if (now.generation == generation) {
      now.devices[device].memory[on_host].idle[size].push_back(done);
    }
  };
  return slot_->memory.emplace_back(block, give_back);
}

void CudaStream::copy(void* to, const void* from, size_t bytes, bool to_host) {
  const auto function = to_host ? runtime_.copy_to_host : runtime_.copy_to_device;
  check(function(to, from, bytes, slot_->stream), "cudaMemcpyAsync of " + std::to_string(bytes) +
                                                      " bytes " +
                                                      (to_host ? "to the host" : "to the device"));
}

ChannelSums* CudaStream::work(const View& view) {
  const int64_t size = kernels_.work_size(view);
  return size ? on_device<ChannelSums>(size) : nullptr;
}

void CudaStream::forward_sums(const View& view, const void* x, ChannelSums* sums) {
  check(kernels_.forward_sums(view, x, work(view), sums, slot_->stream), "The kernel of the sums");
}

void CudaStream::backward_sums(const BackwardShard& shard, const ForBackward& kept, int64_t batch,
                               ChannelSums* sums) {
  check(kernels_.backward_sums(shard, kept, batch, work(shard.view), sums, slot_->stream),
        "The kernel of the backward sums");
}

int peer_access() {
  CudaStream::Pool& all = *CudaStream::pool();
  const std::lock_guard<std::mutex> lock(all.mutex);
  int access = -1;
  for (const auto& [gpus, are] : all.peers) access = are && access != 0;
  return access;
}

bool CudaStream::are_peers(const std::vector<int>& gpus) {
  Pool& all = *pool();
  const std::lock_guard<std::mutex> lock(all.mutex);
  // MXNet's own switch, as peers hang or corrupt data on some machines.
  const char* const set = std::getenv("MXNET_ENABLE_GPU_P2P");
  const bool wanted = !set || (std::strcmp(set, "0") && std::strcmp(set, "false"));
  const auto [found, is_new] = all.peers.insert({gpus, wanted});
  bool& are = found->second;
  if (!is_new) return are;
  for (const int gpu : gpus) {
    for (const int other : gpus) {
      int can = 0;
      if (gpu == other || !are) continue;
      are = succeeds(runtime_, runtime_.can_access_peer(&can, gpu, other)) && can &&
            succeeds(runtime_, runtime_.set_device(gpu)) &&
            succeeds(runtime_, runtime_.enable_peer_access(other));
    }
  }
  check(runtime_.set_device(device_), "cudaSetDevice");
  return are;
}

SharedSums CudaStream::share(const ChannelSums* sums, int64_t C, double count,
                             const std::vector<int>& gpus) {
  if (!are_peers(gpus)) sums = fetch(sums, C);
  check(runtime_.record(slot_->event, slot_->stream), "cudaEventRecord");
  return {sums, count, slot_->event, slot_};
}

bool CudaStream::wait_for(const SharedSums& other) {
  if (other.owner == slot_) return false;
  held_.push_back(other.owner);
  check(runtime_.wait_for(slot_->stream, static_cast<Event>(other.event)), "cudaStreamWaitEvent");
  return true;
}

void CudaStream::finish_forward(const ForwardFinish& task) {
  check(kernels_.finish_forward(task, slot_->stream), "The kernel of the forward coefficients");
}

void CudaStream::count_batch(void* num_batches) {
  check(kernels_.count_batch(num_batches, slot_->stream), "The kernel of the number of batches");
}

void CudaStream::finish_backward(const BackwardFinish& task) {
  check(kernels_.finish_backward(task, slot_->stream), "The kernel of the backward coefficients");
}

void CudaStream::normalize(const ForwardShard& shard, const void* coefficients) {
  check(kernels_.normalize(shard, coefficients, slot_->stream), "The kernel of y");
}

void CudaStream::input_gradient(const BackwardShard& shard, const void* coefficients) {
  check(kernels_.input_gradient(shard, coefficients, slot_->stream), "The kernel of dx");
}

void CudaStream::clear(void* memory, size_t bytes) {
  check(runtime_.clear(memory, bytes, slot_->stream), "cudaMemsetAsync");
}

void CudaStream::wait() { check(runtime_.synchronize(slot_->stream), "cudaStreamSynchronize"); }

void clear_on_gpu(int device, void* memory, size_t bytes) noexcept {
  try {
    CudaStream pass(device, DType::kFloat32, "a failed result");
    pass.clear(memory, bytes);
    pass.finish();
  } catch (const std::exception&) {
    // An error is being reported already, probably with the same cause.
  }
}

void release_cuda_memory() {
  const CudaBackend* const backend = cuda_backend();
  if (!backend) return;
  const CudaRuntime& runtime = backend->runtime;
  CudaStream::Pool& slots = *CudaStream::pool();
  const std::lock_guard<std::mutex> lock(slots.mutex);
  for (auto& [device, of_device] : slots.devices) {
    if (!succeeds(runtime, runtime.set_device(device))) continue;
    for (const auto& slot : of_device.idle) slot->clear(runtime);
    // A failure means that it was freed already.
    auto& [on_device, on_host] = of_device.memory;
    for (void* const piece : on_device.pieces) succeeds(runtime, runtime.free(piece));
    for (void* const piece : on_host.pieces) succeeds(runtime, runtime.free_host(piece));
  }
  slots.devices.clear();
  slots.peers.clear();
  ++slots.generation;
}

void abandon_cuda_memory() {
  const int generation = CudaStream::pool()->generation;
  CudaStream::pool() = new CudaStream::Pool;
  CudaStream::pool()->generation = generation + 1;
}

}  // namespace gluon_syncbn
