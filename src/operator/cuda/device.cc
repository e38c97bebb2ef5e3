// Streams and memory come from pools and go back to them, as allocating and freeing may wait for
// everything that runs on the device. A slot holds a stream, an event and workspace for one pass;
// memory that outlives the pass is cut from larger pieces.
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

// Sets the thread's device back to the previous one. A thread that never chose a device has GPU 0;
// setting it would create a context there, which takes memory.
void restore_device(const CudaRuntime& runtime, int before, int now) {
  int active = 0;
  if (before == now || !succeeds(runtime, runtime.has_context(&active, before))) return;
  if (active) succeeds(runtime, runtime.set_device(before));
}

// Memory that is freed all at once, by this function of the runtime. It grows by blocks, and the
// next reset() merges them.
template <int (*CudaRuntime::*kFree)(void*)>
class Arena {
 public:
  // `allocate` may throw.
  template <typename Allocate>
  void* take(size_t bytes, const Allocate& allocate) {
    bytes = (bytes + kAlignment - 1) / kAlignment * kAlignment;
    if (blocks_.empty() || blocks_.back().used + bytes > blocks_.back().size) {
      const size_t size = std::max({bytes, kMinSize, peak_});
      blocks_.push_back({allocate(size), size, 0});
    }
    Block& block = blocks_.back();
    void* const piece = static_cast<char*>(block.memory) + block.used;
    block.used += bytes;
    return piece;
  }

  void reset(const CudaRuntime& runtime) {
    peak_ = peak();
    if (blocks_.size() > 1) clear(runtime);
    for (Block& block : blocks_) block.used = 0;
  }

  // The largest use so far, which is the size of the next block.
  size_t peak() const {
    size_t used = 0;
    for (const Block& block : blocks_) used += block.used;
    return std::max(peak_, used);
  }
  void reserve(size_t size) { peak_ = std::max(peak_, size); }

  // A failure means that it was freed already.
  void clear(const CudaRuntime& runtime) {
    for (const Block& block : blocks_) succeeds(runtime, (runtime.*kFree)(block.memory));
    blocks_.clear();
  }

 private:
  struct Block {
    void* memory;
    size_t size, used;
  };
  std::vector<Block> blocks_;
  size_t peak_ = 0;
};

}  // namespace

int gpu_of(const std::string& context) {
  return context.compare(0, 4, "gpu(") == 0 ? std::atoi(context.c_str() + 4) : -1;
}

// A stream of one device and memory for what is queued there.
struct CudaStream::StreamSlot {
  int device = 0;
  Stream stream = nullptr;
  Event event = nullptr;
  Arena<&CudaRuntime::free> on_device;
  Arena<&CudaRuntime::free_host> on_host;

  // Frees everything. This device must be the thread's.
  void clear(const CudaRuntime& runtime) {
    on_device.clear(runtime);
    on_host.clear(runtime);
    if (event) succeeds(runtime, runtime.destroy_event(std::exchange(event, nullptr)));
    if (stream) succeeds(runtime, runtime.destroy_stream(std::exchange(stream, nullptr)));
  }
};

// Idle stream slots and memory. There are as many slots, including those in use, as there ever were
// simultaneous calls. The slot used last is reused first, so that extra slots do not grow.
struct CudaStream::Pool {
  struct Device {
    std::vector<std::unique_ptr<StreamSlot>> idle;
    // The peak use of all slots' arenas, with which new arenas begin.
    size_t peak_on_device = 0, peak_on_host = 0;
    // Kept memory: blocks of 2^n bytes by their size, cut from larger pieces.
    std::map<size_t, std::vector<void*>> blocks;
    std::vector<void*> pieces;
    char* rest = nullptr;
    size_t rest_size = 0;
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

CudaStream::OnDevice::OnDevice(const CudaStream& pass, int device) : now(device) {
  pass.check(pass.runtime_.get_device(&before), "cudaGetDevice");
  pass.check(pass.runtime_.set_device(device), "cudaSetDevice");
}

CudaStream::OnDevice::~OnDevice() { restore_device(cuda_backend()->runtime, before, now); }

CudaStream::CudaStream(int device, DType dtype, std::string what)
    : runtime_(cuda_backend()->runtime),
      kernels_(cuda_backend()->kernels(dtype)),
      device_(device),
      what_(std::move(what)),
      on_device_(*this, device) {
  // Otherwise the first kernel would report an error that other code has left on this thread.
  runtime_.clear_error();
  auto slot = std::make_unique<StreamSlot>();
  {
    Pool& slots = *pool();
    const std::lock_guard<std::mutex> lock(slots.mutex);
    Pool::Device& of_device = slots.devices[device];
    if (of_device.idle.empty()) {
      slot->on_device.reserve(of_device.peak_on_device);
      slot->on_host.reserve(of_device.peak_on_host);
    } else {
      slot = std::move(of_device.idle.back());
      of_device.idle.pop_back();
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
  slot->on_device.reset(runtime_);
  slot->on_host.reset(runtime_);
  // The deleter runs on the thread that holds the slot last, which may be another device's.
  slot_ = {slot.release(), [](StreamSlot* done) {
             Pool& slots = *pool();
             const std::lock_guard<std::mutex> lock(slots.mutex);
             Pool::Device& of_device = slots.devices[done->device];
             of_device.peak_on_device = std::max(of_device.peak_on_device, done->on_device.peak());
             of_device.peak_on_host = std::max(of_device.peak_on_host, done->on_host.peak());
             of_device.idle.emplace_back(done);
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

void* CudaStream::memory(bool on_device, size_t bytes) {
  const auto more = [&](size_t size) { return allocate(on_device, size); };
  return on_device ? slot_->on_device.take(bytes, more) : slot_->on_host.take(bytes, more);
}

void* CudaStream::allocate(bool on_device, size_t bytes) {
  void* block = nullptr;
  check(on_device ? runtime_.malloc(&block, bytes) : runtime_.malloc_host(&block, bytes),
        (on_device ? "cudaMalloc of " : "cudaHostAlloc of ") + std::to_string(bytes) + " bytes");
  return block;
}

std::shared_ptr<void> CudaStream::keep_bytes(size_t bytes) {
  size_t size = kAlignment;
  while (size < bytes) size *= 2;
  Pool& all = *pool();
  std::unique_lock<std::mutex> lock(all.mutex);
  if (all.devices[device_].blocks[size].empty() && all.devices[device_].rest_size < size) {
    // Without the lock, so that other GPUs go on while this one allocates.
    const size_t piece = std::max(size, kMinSize);
    lock.unlock();
    auto* const more = static_cast<char*>(allocate(true, piece));
    lock.lock();
    Pool::Device& of_device = all.devices[device_];
    of_device.pieces.push_back(more);
    of_device.rest = more;
    of_device.rest_size = piece;
  }
  Pool::Device& of_device = all.devices[device_];
  std::vector<void*>& idle = of_device.blocks[size];
  if (idle.empty()) {
    idle.push_back(of_device.rest);
    of_device.rest += size;
    of_device.rest_size -= size;
  }
  void* const block = idle.back();
  idle.pop_back();
  held_.emplace_back(block, [device = device_, size, generation = all.generation](void* done) {
    Pool& now = *pool();
    const std::lock_guard<std::mutex> lock(now.mutex);
    if (now.generation == generation) now.devices[device].blocks[size].push_back(done);
  });
  return held_.back();
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

void CudaStream::finish_forward(const ForwardFinish& task, const Deliveries& deliveries) {
  check(kernels_.finish_forward(task, deliveries, slot_->stream),
        "The kernel of the forward coefficients");
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
  int before = 0, now = 0;
  if (slots.devices.empty() || !succeeds(runtime, runtime.get_device(&before))) return;
  now = before;
  for (auto& [device, of_device] : slots.devices) {
    if (of_device.idle.empty() && of_device.pieces.empty()) continue;
    if (!succeeds(runtime, runtime.set_device(device))) continue;
    now = device;
    for (const auto& slot : of_device.idle) slot->clear(runtime);
    for (void* const piece : of_device.pieces) succeeds(runtime, runtime.free(piece));
  }
  slots.devices.clear();
  slots.peers.clear();
  ++slots.generation;
  restore_device(runtime, before, now);
}

void abandon_cuda_memory() {
  const int generation = CudaStream::pool()->generation;
  CudaStream::pool() = new CudaStream::Pool;
  CudaStream::pool()->generation = generation + 1;
}

}  // namespace gluon_syncbn
