// One callback's work on a GPU: the right device, a stream, memory to work in, and errors that say
// what happened where. Knows nothing of other devices, nor of MXNet.
#ifndef GLUON_SYNCBN_CUDA_DEVICE_H_
#define GLUON_SYNCBN_CUDA_DEVICE_H_

#include <string>
#include <vector>

#include "cuda/backend.h"

namespace gluon_syncbn {

// The number of the GPU that MXNet calls "gpu(1)"; -1 for contexts that are none.
int gpu_of(const std::string& context);

// Gives back what is kept for the next calls: streams, and memory on devices and host. To be called
// before main() has ended, as CUDA may be gone after that; then the process's end gives all back.
void release_cuda_memory();

// In the child of a fork, where nothing of CUDA's can be used: forgets it all.
void abandon_cuda_memory();

// Zeros, or nothing where that fails.
void clear_on_gpu(int device, void* memory, size_t bytes) noexcept;

// While it lives the calling thread works on the device, with a stream and with memory that no
// other thread has. Throws std::runtime_error for every failure of CUDA.
class CudaPass {
 public:
  // `what` is told with errors: "data of shape (2, 3)".
  CudaPass(int device, DType dtype, std::string what);
  CudaPass(const CudaPass&) = delete;
  CudaPass& operator=(const CudaPass&) = delete;
  ~CudaPass();

  // Memory until the end of the pass: on the device, or on the host where copies do not stop.
  template <typename V>
  V* on_device(int64_t count) {
    return static_cast<V*>(memory(true, static_cast<size_t>(count) * sizeof(V)));
  }
  template <typename V>
  V* on_host(int64_t count) {
    return static_cast<V*>(memory(false, static_cast<size_t>(count) * sizeof(V)));
  }

  // A copy of the device's values on the host, which is there after wait().
  template <typename V>
  V* fetch(const V* from, int64_t count) {
    V* const to = on_host<V>(count);
    fetch_to(to, from, count);
    return to;
  }
  // The same, to memory from on_host().
  template <typename V>
  void fetch_to(V* to, const V* from, int64_t count) {
    copy(to, from, static_cast<size_t>(count) * sizeof(V), true);
  }
  // A copy on the device of values from on_host().
  template <typename V>
  V* upload(const V* from, int64_t count) {
    V* const to = on_device<V>(count);
    copy(to, from, static_cast<size_t>(count) * sizeof(V), false);
    return to;
  }

  // What follows is queued. Sums, statistics and coefficients are on the device, of C entries for
  // each batch.
  void forward_sums(const View& view, const void* x, ChannelSums* sums);
  void backward_sums(const View& view, const void* dy, const void* x, const Statistics* s,
                     ChannelSums* sums);
  Statistics* given_statistics(int64_t C, const void* mean, const void* variance, double epsilon);
  int64_t coefficients_size(int64_t C) const { return kernels_.coefficients_size(C); }
  void finish_forward(const ForwardFinish& task, const Deliveries& deliveries);
  void finish_backward(const BackwardFinish& task);
  void normalize(const View& view, const void* x, const void* coefficients, void* y, Store how);
  void input_gradient(const View& view, const void* dy, const void* x, const void* coefficients,
                      void* dx, Store how);

  void clear(void* memory, size_t bytes);

  // Until all that was queued is done; finish() when nothing more will be.
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

  static Pool*& pool();
  void* memory(bool on_device, size_t bytes);
  void copy(void* to, const void* from, size_t bytes, bool to_host);
  void check(int error, const std::string& call) const;
  ChannelSums* work(const View& view);

  // Restores the device that the thread had.
  struct OnDevice {
    OnDevice(const CudaPass& pass, int device);
    ~OnDevice();
    int before = 0;
    const int now;
  };

  const CudaRuntime& runtime_;
  const CudaKernels& kernels_;
  const int device_;
  const std::string what_;
  const OnDevice on_device_;
  StreamSlot* slot_ = nullptr;
  bool finished_ = false;
};

}  // namespace gluon_syncbn

#endif  // GLUON_SYNCBN_CUDA_DEVICE_H_
