// Samples are on axis 0, so a chunk is contiguous: the whole shard with fewer samples, and pointers
// further on. Nothing is copied.
#include "call/virtual_devices.h"

#include <stdexcept>
#include <string>

#include "mxnet/arrays.h"

namespace gluon_syncbn {
namespace {

template <typename T>
void advance(T** values, int64_t bytes) {
  // Via const char*, as T may be const or not. Null stays null.
  if (*values) *values = const_cast<char*>(static_cast<const char*>(*values)) + bytes;
}

void advance(ForwardShard* part, int64_t bytes) {
  advance(&part->x, bytes);
  advance(&part->residual, bytes);
  advance(&part->y, bytes);
}

void advance(BackwardShard* part, int64_t bytes) {
  advance(&part->dy, bytes);
  advance(&part->x, bytes);
  advance(&part->y, bytes);
  advance(&part->dx, bytes);
  advance(&part->dresidual, bytes);
}

}  // namespace

template <typename Part>
std::vector<Part> cut(const Part& whole, DType dtype, int64_t samples, int virtual_devices) {
  if (samples < virtual_devices) {
    throw std::runtime_error(
        "VirtualBatchNorm was made with virtual_devices=" + std::to_string(virtual_devices) +
        ", and its data has " + std::to_string(samples) +
        " samples. Give it at least one sample for each virtual device.");
  }
  const int64_t size = samples / virtual_devices, larger = samples % virtual_devices;
  const int64_t bytes_per_sample =
      whole.view.size() / samples * static_cast<int64_t>(size_of(dtype));
  std::vector<Part> chunks;
  for (int64_t i = 0, begin = 0; i < virtual_devices; ++i) {
    const int64_t count = size + (i < larger ? 1 : 0);
    Part chunk = whole;
    chunk.view.N = whole.view.N / samples * count;
    advance(&chunk, begin * bytes_per_sample);
    chunks.push_back(chunk);
    begin += count;
  }
  return chunks;
}

template std::vector<ForwardShard> cut(const ForwardShard&, DType, int64_t, int);
template std::vector<BackwardShard> cut(const BackwardShard&, DType, int64_t, int);

}  // namespace gluon_syncbn
