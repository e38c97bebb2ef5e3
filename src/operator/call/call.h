// One node of a graph on one device, or one imperative call: its forward, and what its backward
// needs to know of it. A call makes a task of MXNet's arrays; the pass of the device sums the
// shard, the rendezvous adds the sums of all devices, and the pass writes the results.
//
// MXNet runs each forward and backward on a thread that it makes for custom operators, so waiting
// for other devices blocks nothing else.
#ifndef GLUON_SYNCBN_CALL_CALL_H_
#define GLUON_SYNCBN_CALL_CALL_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "call/attributes.h"
#include "mxnet/arrays.h"
#include "numerics/pass.h"
#include "rendezvous/rendezvous.h"

namespace gluon_syncbn {

class Call {
 public:
  Call(const Attributes& attributes, const LayerPtr& layer, const char* context);
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;
  ~Call();

  // MXNet's callbacks, which return 1. The first error of a step is raised by the arrays that this
  // call writes. The calls that meet it end with zeros.
  int forward(Arrays* arrays, const int* requests, bool is_train);
  int backward(Arrays* arrays, const int* requests);

  // One for each callback.
  void* contexts[3];

 private:
  // Runs the work of a callback that writes `count` arrays, the first of which is `written`.
  int run(Arrays* arrays, int written, int count, const int* requests, Direction direction,
          const std::function<void()>& work);

  void check_device() const;
  void check_layer() const;
  void check_engine() const;
  void check_count(const Arrays& arrays) const;
  bool has_kernels() const;
  // Zeros, if the request was to write the array.
  void clear(const Arrays& arrays, int array, int request) const;
  // For errors.
  std::string title() const;

  void forward_pass(const Arrays& arrays, const int* requests, bool is_train);
  void backward_pass(const Arrays& arrays, const int* requests);

  ForwardTask forward_task(const Arrays& arrays, const int* requests, const View& view);
  BackwardTask backward_task(const Arrays& arrays, const int* requests, const View& view) const;
  // Warns once of a batch with one value per channel.
  void check_values(double count) const;
  // Runs the pass of a task, with the sums of all devices that share the batch.
  template <typename Task>
  void synchronize(Direction direction, const Task& task);
  // Whether other devices share the batch; and if all are GPUs that add the sums themselves, the
  // numbers of all, this one included.
  struct Others {
    bool exist = false;
    std::vector<int> gpus;
  };
  Others others_of_batch() const;

  // Whether other devices may have shards of the same batch.
  bool is_shared() const { return from_batch_ && !attributes_.virtual_devices; }
  // What has statistics of its own: the chunks of virtual devices, or the whole.
  template <typename Shard>
  void set_parts(const Arrays& arrays, int data, const Shard& whole, PassTask<Shard>* task) const;

  const void* gamma(const void* values) const { return attributes_.fix_gamma ? nullptr : values; }

  const Attributes attributes_;
  const LayerPtr layer_;
  const std::string device_;
  // -1: the CPU.
  const int gpu_;
  // The first outputs and running statistics among the arrays of forward, and the first inputs'
  // gradients among those of backward.
  const int outputs_, running_arrays_, gradients_;
  bool from_batch_ = false;
  // What a backward finds whose forward MXNet has skipped: a call that meets others, so that its
  // error fails the step.
  CallId id_{0, 0, nullptr, 0, true};
  // Whether the rendezvous expects a backward of the forward with this id; and tells it that there
  // is none any more.
  bool is_alive_ = false;
  void drop();
  // Of the data of the forward.
  DType dtype_ = DType::kFloat32;
  // The channels of the forward, and what it has kept. None if it has failed.
  int64_t channels_ = 0;
  Kept kept_;
};

// A PropertyCreator (operator.cc).
int create_operator(const char*, int size, const char** keys, const char** values,
                    CallbackList* result);

}  // namespace gluon_syncbn

#endif  // GLUON_SYNCBN_CALL_CALL_H_
