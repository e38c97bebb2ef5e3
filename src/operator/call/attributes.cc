#include "call/attributes.h"

#include <locale>
#include <sstream>

#include "call/process.h"

namespace gluon_syncbn {

template <typename T>
void Attributes::read(const std::string& key, const std::string& text, T* value) {
  std::istringstream stream(text);
  stream.imbue(std::locale::classic());
  if (!(stream >> *value) || !stream.eof()) {
    error = "SyncBatchNorm cannot read " + key + "=" + text + ": it must be a number.";
  }
}

Attributes::Attributes(int size, const char** keys, const char** values) {
  bool foreign = false;
  std::string activation = "None";
  double slope = 0.01;
  for (int i = 0; i < size; ++i) {
    const std::string key = keys[i], value = values[i];
    if (key == "layer") read(key, value, &layer);
    if (key == "epsilon") read(key, value, &epsilon);
    if (key == "momentum") {
      running.cumulative = value == "None";
      if (!running.cumulative) read(key, value, &running.momentum);
    }
    if (key == "axis") read(key, value, &axis);
    if (key == "node") read(key, value, &node);
    if (key == "virtual_devices") read(key, value, &virtual_devices);
    if (key == "unbiased") running.unbiased = value == "True";
    if (key == "fix_gamma") fix_gamma = value == "True";
    if (key == "use_global_stats") use_global_stats = value == "True";
    if (key == "activation") activation = value;
    if (key == "slope") read(key, value, &slope);
    if (key == "residual") residual = value == "True";
    if (key == "inplace") inplace = value == "True";
    if (key == "gpu_only") gpu_only = value == "True";
    if (key == "process") foreign = value != process.uuid;
  }
  if (activation == "relu") {
    epilogue.activation = Activation::kRelu;
  } else if (activation == "leaky_relu") {
    epilogue = {Activation::kLeakyRelu, slope, inplace ? epsilon : 0};
  } else if (activation != "None") {
    error = "SyncBatchNorm got activation=" + activation + ": give None, relu or leaky_relu.";
  }
  if (inplace && !(slope > 0 && epsilon > 0 && activation == "leaky_relu" && !residual)) {
    error =
        "SyncBatchNorm got inplace=True: it needs activation=leaky_relu with a slope above 0, an "
        "epsilon above 0, and no residual.";
  }
  // In a graph of another process, layer ids stand for other layers.
  if (foreign) layer = -1;
}

}  // namespace gluon_syncbn
