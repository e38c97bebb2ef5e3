// The functions of the CUDA runtime that only MXNet calls: ptxsim/runtime.cc has the others. And
// where MXNet's memory comes from, so that kernels of a real GPU can use it.
#include <dlfcn.h>

#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "ptxsim.h"

namespace {

// With SIMGPU_LIBRARY, the path of a libgluon_syncbn.so with cards.cc, that library has a CUDA of
// its own: MXNet's work is still simulated, on SIMGPU_CONTEXTS devices, and its memory is
// page-locked memory of that CUDA.
template <typename F>
F of_library(const char* name) {
  static void* const library = dlopen(std::getenv("SIMGPU_LIBRARY"), RTLD_NOW | RTLD_LOCAL);
  void* const function = library ? dlsym(library, name) : nullptr;
  if (!function) {
    std::fprintf(stderr, "simgpu: SIMGPU_LIBRARY: %s\n", dlerror());
    std::abort();
  }
  return reinterpret_cast<F>(function);
}
void* take(size_t bytes) {
  static const auto allocate = of_library<void* (*)(size_t)>("gluon_syncbn_cards_allocate");
  return allocate(bytes);
}
void give(void* memory, size_t) {
  static const auto release = of_library<void (*)(void*)>("gluon_syncbn_cards_release");
  release(memory);
}
const bool ready = [] {
  const char* const contexts = std::getenv("SIMGPU_CONTEXTS");
  if (std::getenv("SIMGPU_LIBRARY")) ptxsim::use_pages({take, give}, std::atoi(contexts));
  return true;
}();

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

int cudaMemcpyAsync(void* to, const void* from, size_t bytes, int kind, void* stream);
int cudaStreamCreateWithFlags(void** stream, unsigned flags);
int cudaStreamSynchronize(void* stream);

// That of the CUDA which the wheel was built with.
int cudaDriverGetVersion(int* version) {
  *version = 11020;
  return 0;
}

// MXNet asks when it makes a stream. Only its kernels would read more than the name.
int cudaGetDeviceProperties(void* properties, int) {
  constexpr size_t kBytesInCuda11 = 712;
  std::memset(properties, 0, kBytesInCuda11);
  std::strcpy(static_cast<char*>(properties), "simulated GPU");
  return 0;
}

int cudaMemGetInfo(size_t* free, size_t* total) {
  *total = size_t{16} << 30;
  *free = size_t{15} << 30;
  return 0;
}

int cudaStreamCreate(void** stream) { return cudaStreamCreateWithFlags(stream, 0); }

int cudaMemcpy(void* to, const void* from, size_t bytes, int kind) {
  const int error = cudaMemcpyAsync(to, from, bytes, kind, nullptr);
  return error ? error : cudaStreamSynchronize(nullptr);
}

int cudaMemcpyPeerAsync(void* to, int, const void* from, int, size_t bytes, void* stream) {
  constexpr int kDeviceToDevice = 3;
  return cudaMemcpyAsync(to, from, bytes, kDeviceToDevice, stream);
}

int cudaMemcpy2DAsync(void* to, size_t to_pitch, const void* from, size_t from_pitch, size_t width,
                      size_t height, int kind, void* stream) {
  for (size_t y = 0; y < height; ++y) {
    const int error =
        cudaMemcpyAsync(static_cast<char*>(to) + y * to_pitch,
                        static_cast<const char*>(from) + y * from_pitch, width, kind, stream);
    if (error) return error;
  }
  return 0;
}
}
#pragma GCC visibility pop
