#include "layer/chunks.h"

#include <stdexcept>
#include <string>

#include "mxnet/arrays.h"

namespace gluon_syncbn {
namespace {

// Samples begin..end, which lie together.
struct Chunk {
  int64_t begin, end, samples;

  ForwardPart of(ForwardPart part, DType dtype) const {
    part.x = from(part.view, part.x, dtype);
    part.y = from(part.view, part.y, dtype);
    part.view = of(part.view);
    return part;
  }

  BackwardPart of(BackwardPart part, DType dtype) const {
    part.dy = from(part.view, part.dy, dtype);
    part.x = from(part.view, part.x, dtype);
    part.dx = from(part.view, part.dx, dtype);
    part.view = of(part.view);
    return part;
  }

 private:
  View of(View view) const {
    view.N = view.N / samples * (end - begin);
    return view;
  }

  // Null stays null.
  const void* from(View view, const void* values, DType dtype) const {
    const size_t bytes = static_cast<size_t>(view.size() / samples * begin) * size_of(dtype);
    return values ? static_cast<const char*>(values) + bytes : nullptr;
  }
  void* from(View view, void* values, DType dtype) const {
    return const_cast<void*>(from(view, static_cast<const void*>(values), dtype));
  }
};

template <typename Part>
std::vector<Part> cut_part(const Part& whole, DType dtype, int64_t samples, int64_t count) {
  if (samples < count) {
    throw std::runtime_error(
        "VirtualBatchNorm was made with virtual_devices=" + std::to_string(count) +
        ", and its data has " + std::to_string(samples) +
        " samples. Give each virtual device one at least.");
  }
  std::vector<Part> parts;
  const int64_t size = samples / count, larger = samples % count;
  for (int64_t i = 0, begin = 0; i < count; ++i) {
    const int64_t end = begin + size + (i < larger ? 1 : 0);
    parts.push_back(Chunk{begin, end, samples}.of(whole, dtype));
    begin = end;
  }
  return parts;
}

}  // namespace

std::vector<ForwardPart> cut(const ForwardPart& whole, DType dtype, int64_t samples,
                             int virtual_devices) {
  return cut_part(whole, dtype, samples, virtual_devices);
}

std::vector<BackwardPart> cut(const BackwardPart& whole, DType dtype, int64_t samples,
                              int virtual_devices) {
  return cut_part(whole, dtype, samples, virtual_devices);
}

}  // namespace gluon_syncbn
