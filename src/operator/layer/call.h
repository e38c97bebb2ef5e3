// One node of a graph on one device, or one imperative call: what its backward has to know of its
// forward.
#ifndef GLUON_SYNCBN_LAYER_CALL_H_
#define GLUON_SYNCBN_LAYER_CALL_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "rendezvous/all_reduce.h"
#include "mxnet/arrays.h"
#include "numerics/kernels.h"
#include "cuda/passes.h"
#include "numerics/running_statistics.h"
#include "layer/settings.h"

namespace gluon_syncbn {

class Call {
 public:
  Call(const Settings& settings, const AllReduce::LayerPtr& layer, const char* context);

  // MXNet's callbacks, whose return values these are. An error becomes that of everyone who waits
  // for the arrays, and for this device.
  int forward(Arrays* arrays, const int* requests, bool is_train);
  int backward(Arrays* arrays, const int* requests);

  // For the callbacks: one for each of them.
  void* contexts[3];

 private:
  // Runs the work of a callback that writes three arrays from `written` on, with the ticket of a
  // forward.
  int run(Arrays* arrays, int written, const int* requests, const Ticket* forward,
          const std::function<void()>& work);

  void check_device() const;
  void check_engine() const;
  void check_count(const Arrays& arrays) const;
  bool has_kernels() const;
  // For errors.
  std::string title() const;

  void forward_pass(const Arrays& arrays, const int* requests, bool is_train);
  void backward_pass(const Arrays& arrays, const int* requests);

  // Return the batches that y was normalized by: one, or one for each virtual device.
  std::vector<BatchPtr> forward_by_cpu(const Arrays& arrays, const int* requests,
                                       const ForwardPart& whole);
  std::vector<BatchPtr> forward_by_cuda(const Arrays& arrays, const int* requests,
                                        const ForwardPart& whole);
  void backward_by_cpu(const Arrays& arrays, const int* requests, const BackwardPart& whole);
  void backward_by_cuda(const Arrays& arrays, const int* requests, const BackwardPart& whole);

  // y and the statistics of the batch, with all devices.
  BatchPtr meet_forward(DType dtype, const ForwardPart& part);
  // dx, and the sums of this device alone, with all devices.
  void meet_backward(DType dtype, const BackwardPart& part);
  // Brings this device's sums to the others; null where it has statistics of its own.
  Meet meet_by_cuda(Direction direction, DType dtype, int64_t channels);

  // Whether the statistics are those of a batch that other devices have parts of.
  bool is_shared() const { return from_batch_ && !settings_.virtual_devices; }
  // The parts of a batch that have statistics of their own: chunks of virtual devices, or the
  // whole.
  template <typename KernelPart>
  std::vector<KernelPart> parts_of(const KernelPart& whole, DType dtype, int64_t samples) const;

  const void* gamma(const void* values) const { return settings_.fix_gamma ? nullptr : values; }
  BatchPtr given_batch(DType dtype, int64_t channels, const void* mean, const void* var) const;
  // The running statistics: mean, variance, and the number of batches or null. Returns whether they
  // have changed, which they do not where there is no data.
  bool update_running(DType dtype, const std::vector<BatchPtr>& batches, void* const (&running)[3]);
  void write_statistics(const Arrays& arrays, int array, int request,
                        const std::vector<BatchPtr>& batches, double Statistics::* which) const;

  const Settings settings_;
  const AllReduce::LayerPtr layer_;
  const std::string device_;
  // -1: the CPU.
  const int gpu_;
  const int64_t number_;
  // Whether MXNet may compute the forward a second time before the backward, to save memory.
  const bool recomputes_;
  const std::shared_ptr<RunningState> running_;
  bool from_batch_ = false;
  Ticket ticket_{};
  // What the forward has normalized by; none where it has failed.
  std::vector<BatchPtr> batches_;
};

}  // namespace gluon_syncbn

#endif  // GLUON_SYNCBN_LAYER_CALL_H_
