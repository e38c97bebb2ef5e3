#include "layer/attributes.h"

#include <locale>
#include <sstream>

#include "layer/process.h"

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
    if (key == "gpu_only") gpu_only = value == "True";
    if (key == "__force_mirroring__") force_mirroring = true;
    if (key == "process") foreign = value != process.uuid;
  }
  // In a graph of another process, layer ids stand for other layers.
  if (foreign) layer = -1;
}

}  // namespace gluon_syncbn
