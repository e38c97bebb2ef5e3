// One callback's work on a GPU: the device, a stream, workspace, and error messages. Independent of
// other devices and of MXNet.
#ifndef GLUON_SYNCBN_CUDA_DEVICE_H_
#define GLUON_SYNCBN_CUDA_DEVICE_H_

#include <memory>
#include <string>
#include <vector>

#include "cuda/backend.h"
#include "numerics/pass.h"

namespace gluon_syncbn {

// The index of a GPU, 1 for "gpu(1)"; -1 for other contexts.
int gpu_of(const std::string& context);

// Frees the streams and the memory, on devices and host, that are kept for the next calls. Also
// frees what earlier calls have kept for backward, so that they cannot go backward any more, and
// forgets which GPUs are peers. Must be called before main() ends, as CUDA may be shut down after
// it.
void release_cuda_memory();

// For the child of a fork, where CUDA is unusable: forgets streams and memory.
void abandon_cuda_memory();

// How the GPUs that have met so far read each other's sums: 1 by peer access, 0 if some read them
// from host memory; -1 if none have met.
int peer_access();

// Writes zeros; ignores errors.
void clear_on_gpu(int device, void* memory, size_t bytes) noexcept;

// The calling thread uses the device, with a stream and memory of its own. Afterwards the device
// stays that of the thread: setting the one before could create a context there, which takes
// memory. Throws std::runtime_error for every CUDA error.
class CudaStream {
 public:
  // `what` describes the data in errors: "data of shape (2, 3)".
  CudaStream(int device, DType dtype, std::string what);
  CudaStream(const CudaStream&) = delete;
  CudaStream& operator=(const CudaStream&) = delete;
  ~CudaStream();

  // Memory on the device that lasts until the pass has ended, here and where its sums are read, and
  // the last copy of the pointer is gone.
  template <typename V>
  std::shared_ptr<V> keep(int64_t count) {
    return std::static_pointer_cast<V>(take(false, static_cast<size_t>(count) * sizeof(V)));
  }
  // Memory for the pass alone, on the device or page-locked on the host.
  template <typename V>
  V* on_device(int64_t count) {
    return keep<V>(count).get();
  }
  template <typename V>
  V* on_host(int64_t count) {
    return static_cast<V*>(take(true, static_cast<size_t>(count) * sizeof(V)).get());
  }

  // A copy on the host of values on the device, valid after wait().
  template <typename V>
  V* fetch(const V* from, int64_t count) {
    V* const to = on_host<V>(count);
    copy(to, from, static_cast<size_t>(count) * sizeof(V), true);
    return to;
  }
  // Copies values from on_host() to the device.
  template <typename V>
  void upload(V* to, const V* from, int64_t count) {
    copy(to, from, static_cast<size_t>(count) * sizeof(V), false);
  }

  // The following only queue work. Sums, statistics and coefficients are on the device, C entries
  // per batch.
  void forward_sums(const View& view, const void* x, ChannelSums* sums);
  void backward_sums(const BackwardShard& shard, const ForBackward& kept, int64_t batch,
                     ChannelSums* sums);
  int64_t coefficients_size(int64_t C) const { return kernels_.coefficients_size(C); }
  // Lets these GPUs read the sums of C channels: directly, or a copy on the host.
  SharedSums share(const ChannelSums* sums, int64_t C, double count, const std::vector<int>& gpus);
  // Makes work that is queued later wait for the sums of another device, which are held until the
  // end of the pass. Returns false if they are this device's own.
  bool wait_for(const SharedSums& other);
  void finish_forward(const ForwardFinish& task);
  void count_batch(void* num_batches);
  void finish_backward(const BackwardFinish& task);
  void normalize(const ForwardShard& shard, const void* coefficients);
  void input_gradient(const BackwardShard& shard, const void* coefficients);

  void clear(void* memory, size_t bytes);

  // Sets the thread's device again after other work, in which Python may have run: its garbage
  // collector frees arrays, for which MXNet changes the device.
  void resume() const noexcept;

  // Waits for all queued work. Call finish() if nothing will be queued after it.
  void wait();
  void finish() {
    wait();
    finished_ = true;
  }

 private:
  struct StreamSlot;
  struct Pool;
  friend void release_cuda_memory();
  friend void abandon_cuda_memory();
  friend int peer_access();

  static Pool*& pool();
  std::shared_ptr<void> take(bool on_host, size_t bytes);
  // Whether each of the GPUs can read the memory of the others. Enables it.
  bool are_peers(const std::vector<int>& gpus);
  void copy(void* to, const void* from, size_t bytes, bool to_host);
  void check(int error, const std::string& call) const;
  ChannelSums* work(const View& view);

  const CudaRuntime& runtime_;
  const CudaKernels& kernels_;
  const int device_;
  const std::string what_;
  // Other devices may hold it longer.
  std::shared_ptr<StreamSlot> slot_;
  // The slots of devices whose sums this one reads.
  std::vector<std::shared_ptr<void>> held_;
  bool finished_ = false;
};

}  // namespace gluon_syncbn

#endif  // GLUON_SYNCBN_CUDA_DEVICE_H_
