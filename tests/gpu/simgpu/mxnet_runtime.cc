// The functions of the CUDA runtime that only MXNet calls: ptxsim/runtime.cc has the others.
#include <cstddef>
#include <cstring>

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
