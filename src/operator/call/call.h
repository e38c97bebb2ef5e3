// One node of a graph on one device, or one imperative call: its forward, and what its backward
// needs to know of it.
#ifndef GLUON_SYNCBN_CALL_CALL_H_
#define GLUON_SYNCBN_CALL_CALL_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "call/attributes.h"
#include "cuda/passes.h"
#include "mxnet/arrays.h"
#include "numerics/kernels.h"
#include "numerics/running_statistics.h"
#include "rendezvous/rendezvous.h"

namespace gluon_syncbn {

class Call {
 public:
  Call(const Attributes& attributes, const LayerPtr& layer, const char* context);

  // MXNet's callbacks, which return 1. An error is raised by the arrays that they write, and on the
  // devices that wait for this one.
  int forward(Arrays* arrays, const int* requests, bool is_train);
  int backward(Arrays* arrays, const int* requests);

  // One for each callback.
  void* contexts[3];

 private:
  // Runs the work of a callback that writes `count` arrays, the first of which is `written`.
  int run(Arrays* arrays, int written, int count, const int* requests, const CallId* forward,
          const std::function<void()>& work);

  void check_device() const;
  void check_engine() const;
  void check_count(const Arrays& arrays) const;
  bool has_kernels() const;
  // Zeros, if the request was to write the array.
  void clear(const Arrays& arrays, int array, int request) const;
  // For errors.
  std::string title() const;

  void forward_pass(const Arrays& arrays, const int* requests, bool is_train);
  void backward_pass(const Arrays& arrays, const int* requests);

  // Return the statistics that normalized y: of one batch, or one for each virtual device.
  std::vector<BatchPtr> forward_by_cpu(const Arrays& arrays, const int* requests,
                                       const ForwardShard& whole);
  KeptOnGpu forward_by_cuda(const Arrays& arrays, const int* requests, const ForwardShard& whole);
  void backward_by_cpu(const Arrays& arrays, const int* requests, const BackwardShard& whole);
  void backward_by_cuda(const Arrays& arrays, const int* requests, const BackwardShard& whole);

  // y and the statistics of the batch, with all devices.
  BatchPtr synchronized_forward(const ForwardShard& part);
  // dx, and the sums of this device alone, with all devices.
  void synchronized_backward(const BackwardShard& part);
  // How this GPU's sums and those of other devices come together.
  Together together(Direction direction, int64_t channels);

  // Whether other devices have shards of the same batch.
  bool is_shared() const { return from_batch_ && !attributes_.virtual_devices; }
  // What has statistics of its own: the chunks of virtual devices, or the whole.
  template <typename Part>
  std::vector<Part> chunks_of(const Part& whole, int64_t samples) const;

  const void* gamma(const void* values) const { return attributes_.fix_gamma ? nullptr : values; }
  BatchPtr given_batch(int64_t channels, const void* mean, const void* var) const;
  // Whether the running statistics follow the batch.
  bool has_data() const;
  // running: mean, variance, and the number of batches or null. Returns whether they have changed,
  // which they do not without data.
  bool update_running(const std::vector<BatchPtr>& batches, void* const (&running)[3]);
  void write_statistics(const Arrays& arrays, const int* requests,
                        const std::vector<BatchPtr>& batches) const;

  const Attributes attributes_;
  const LayerPtr layer_;
  const std::string device_;
  // -1: the CPU.
  const int gpu_;
  // The first outputs and running statistics among the arrays of forward, and the first inputs'
  // gradients among those of backward.
  const int outputs_, running_arrays_, gradients_;
  bool from_batch_ = false;
  // Whether a forward has met other devices, and they go on even if it fails.
  bool has_met_ = false;
  CallId id_{};
  // Of the data of the forward.
  DType dtype_ = DType::kFloat32;
  // The channels of the forward, and the statistics that it used, on the CPU or on the GPU. None if
  // it has failed.
  int64_t channels_ = 0;
  std::vector<BatchPtr> batches_;
  KeptOnGpu on_gpu_;
};

}  // namespace gluon_syncbn

#endif  // GLUON_SYNCBN_CALL_CALL_H_
