// What a node of a graph, or an imperative call, says of itself.
#ifndef GLUON_SYNCBN_LAYER_SETTINGS_H_
#define GLUON_SYNCBN_LAYER_SETTINGS_H_

#include <cstdint>
#include <string>

#include "numerics/running_statistics.h"

namespace gluon_syncbn {

struct Settings {
  int64_t layer = -1;
  double epsilon = 1e-5;
  RunningRule running;
  int axis = 1;
  bool fix_gamma = false;
  bool use_global_stats = false;
  // Traced for GPUs: without the gate that oneDNN's layouts ask for on the CPU.
  bool gpu_only = false;
  // Which of the layer's nodes in graphs this is; imperative calls have none.
  int64_t place = -1;
  // Into how many chunks a batch is cut, each with statistics of its own; 0: the batch is a part of
  // one that all devices have.
  int virtual_devices = 0;
  // The user asks MXNet's executor to compute the node a second time before the backward.
  bool force_mirroring = false;
  // What could not be read. It is told later: MXNet crashes when an error comes where settings are
  // read.
  std::string error;

  Settings(int size, const char** keys, const char** values);

 private:
  template <typename T>
  void read(const std::string& key, const std::string& text, T* value);
};

}  // namespace gluon_syncbn

#endif  // GLUON_SYNCBN_LAYER_SETTINGS_H_
