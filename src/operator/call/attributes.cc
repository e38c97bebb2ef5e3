// Reads attributes from text. They come in any order, so they are combined after the loop. What is
// wrong with them is kept as a text, which infer_shape raises.
#include "call/attributes.h"

#include <locale>
#include <sstream>

#include "call/globals.h"

namespace gluon_syncbn {

template <typename T>
void Attributes::read(const std::string& key, const std::string& text, T* value) {
  std::istringstream stream(text);
  stream.imbue(std::locale::classic());
  if (!(stream >> *value) || !stream.eof()) {
    error = "cannot read " + key + "=" + text + ": it must be a number.";
  }
}

// As is_true in layers/operator.py.
void Attributes::read(const std::string& key, const std::string& text, bool* value) {
  *value = text == "True" || text == "true" || text == "1";
  if (!*value && text != "False" && text != "false" && text != "0") {
    error = "cannot read " + key + "=" + text + ": it must be True or False.";
  }
}

Attributes::Attributes(int size, const char** keys, const char** values) {
  bool foreign = false;
  std::string activation = "None";
  double slope = 0.01;
  for (int i = 0; i < size; ++i) {
    const std::string key = keys[i], value = values[i];
    const auto is = [&](const char* name, auto* to) {
      if (key == name) this->read(key, value, to);
      return key == name;
    };
    if (is("layer", &layer) || is("epsilon", &epsilon) || is("axis", &axis) || is("node", &node) ||
        is("virtual_devices", &virtual_devices) || is("unbiased", &running.unbiased) ||
        is("fix_gamma", &fix_gamma) || is("use_global_stats", &use_global_stats) ||
        is("slope", &slope) || is("residual", &residual) || is("inplace", &inplace) ||
        is("gpu_only", &gpu_only)) {
      continue;
    }
    if (key == "momentum") {
      running.cumulative = value == "None";
      if (!running.cumulative) read(key, value, &running.momentum);
    } else if (key == "activation") {
      activation = value;
    } else if (key == "process") {
      foreign = value != globals.uuid;
    } else if (key.compare(0, 2, "__") != 0) {  // Not MXNet's, such as __ctx_group__.
      error = "got the unknown attribute " + key + "=" + value +
              ": if the graph is from another version of gluon_syncbn, use that version.";
    }
  }
  if (activation == "relu") {
    epilogue.activation = Activation::kRelu;
  } else if (activation == "leaky_relu") {
    epilogue = {Activation::kLeakyRelu, slope, inplace ? epsilon : 0};
  } else if (activation != "None") {
    error = "got activation=" + activation + ": give None, relu or leaky_relu.";
  }
  if (inplace && !(slope > 0 && epsilon > 0 && activation == "leaky_relu" && !residual)) {
    error =
        "got inplace=True: it needs activation=leaky_relu with a slope above 0, an "
        "epsilon above 0, and no residual.";
  }
  // In a graph of another process, layer ids stand for other layers.
  if (foreign) layer = -1;
}

}  // namespace gluon_syncbn
