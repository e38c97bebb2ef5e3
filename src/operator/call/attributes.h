// The attributes of a node in a graph, or of an imperative call.
#ifndef GLUON_SYNCBN_CALL_ATTRIBUTES_H_
#define GLUON_SYNCBN_CALL_ATTRIBUTES_H_

#include <cstdint>
#include <string>

#include "numerics/running_statistics.h"

namespace gluon_syncbn {

struct Attributes {
  int64_t layer = -1;
  double epsilon = 1e-5;
  RunningRule running;
  int axis = 1;
  bool fix_gamma = false;
  bool use_global_stats = false;
  Epilogue epilogue;
  // Whether an input is added before the activation.
  bool residual = false;
  // Backward finds z = normalize(x) from y, and x is not kept.
  bool inplace = false;
  // Traced for GPUs: without the layout copies that oneDNN needs on the CPU.
  bool gpu_only = false;
  // The id of this node among the layer's nodes in graphs; -1 for imperative calls, and in graphs
  // with one node of the layer.
  int64_t node = -1;
  // The number of chunks of the batch, each with statistics of its own. 0: the batch is one
  // device's shard of a batch that all devices share.
  int virtual_devices = 0;
  // An attribute that could not be read. Reported later: MXNet crashes on an error here.
  std::string error;

  Attributes(int size, const char** keys, const char** values);

  int inputs() const { return residual ? 4 : 3; }
  // The class of the block.
  std::string block_name() const { return virtual_devices ? "VirtualBatchNorm" : "SyncBatchNorm"; }
  bool has_activation() const { return epilogue.activation != Activation::kNone; }
  // Whether backward reads x, beta and y.
  bool needs_x() const { return !inplace; }
  bool needs_beta() const { return has_activation(); }
  bool needs_y() const { return inplace || (residual && has_activation()); }

 private:
  template <typename T>
  void read(const std::string& key, const std::string& text, T* value);
  void read(const std::string& key, const std::string& text, bool* value);
};

}  // namespace gluon_syncbn

#endif  // GLUON_SYNCBN_CALL_ATTRIBUTES_H_
