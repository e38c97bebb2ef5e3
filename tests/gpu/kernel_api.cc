// A C interface to the CUDA kernels of backend.h, for tests and benchmarks without MXNet. Functions
// return cudaError_t, or -1 if the library has no CUDA kernels. `dtype` is a DType (dtypes.h);
// (N, C, S, R) is a View (kernels.h).
#include <algorithm>
#include <thread>
#include <vector>

#include "api/exports.h"
#include "cuda/backend.h"
#include "rendezvous/all_reduce.h"

using namespace gluon_syncbn;

namespace {

constexpr int kNoBackend = -1;

// Calls f(kernels).
template <typename F>
int with_kernels(int dtype, const F& f) {
  const CudaBackend* const backend = cuda_backend();
  return backend ? f(backend->kernels(static_cast<DType>(dtype))) : kNoBackend;
}

Store store(int add) { return add ? Store::kAdd : Store::kWrite; }

}  // namespace

SBN_EXPORT int64_t gluon_syncbn_cuda_work_size(int dtype, int64_t N, int64_t C, int64_t S,
                                               int64_t R, int multiprocessors) {
  const CudaBackend* const backend = cuda_backend();
  if (!backend) return 0;
  return backend->kernels(static_cast<DType>(dtype)).work_size({N, C, S, R}, multiprocessors);
}

SBN_EXPORT int64_t gluon_syncbn_cuda_coefficients_size(int dtype, int64_t C) {
  const CudaBackend* const backend = cuda_backend();
  return backend ? backend->kernels(static_cast<DType>(dtype)).coefficients_size(C) : 0;
}

SBN_EXPORT int gluon_syncbn_cuda_forward_sums(int dtype, int64_t N, int64_t C, int64_t S, int64_t R,
                                              const void* x, ChannelSums* work, ChannelSums* sums,
                                              int multiprocessors, void* stream) {
  return with_kernels(dtype, [&](const CudaKernels& k) {
    return k.forward_sums({N, C, S, R}, x, work, sums, multiprocessors, stream);
  });
}

SBN_EXPORT int gluon_syncbn_cuda_backward_sums(int dtype, int64_t N, int64_t C, int64_t S,
                                               int64_t R, const void* dy, const void* x,
                                               const Statistics* statistics, ChannelSums* work,
                                               ChannelSums* sums, int multiprocessors,
                                               void* stream) {
  return with_kernels(dtype, [&](const CudaKernels& k) {
    BackwardShard shard{};
    shard.view = {N, C, S, R};
    shard.dy = dy;
    shard.x = x;
    return k.backward_sums(shard, statistics, nullptr, work, sums, multiprocessors, stream);
  });
}

SBN_EXPORT int gluon_syncbn_cuda_statistics(int dtype, int64_t C, const ChannelSums* sums,
                                            double count, double epsilon, Statistics* statistics,
                                            void* stream) {
  return with_kernels(dtype, [&](const CudaKernels& k) {
    return k.statistics_of_sums(C, sums, count, epsilon, statistics, stream);
  });
}

SBN_EXPORT int gluon_syncbn_cuda_finish_forward(int dtype, int64_t C, const Statistics* statistics,
                                                const void* gamma, const void* beta,
                                                void* coefficients, void* stream) {
  return with_kernels(dtype, [&](const CudaKernels& k) {
    return k.finish_forward({C, 1, statistics, gamma, beta, {}, coefficients, 0}, {}, stream);
  });
}

// `count` is a device pointer.
SBN_EXPORT int gluon_syncbn_cuda_finish_backward(int dtype, int64_t C, const Statistics* statistics,
                                                 const void* gamma, const ChannelSums* own_sums,
                                                 const ChannelSums* sums, const double* count,
                                                 void* coefficients, void* dgamma, void* dbeta,
                                                 void* stream) {
  return with_kernels(dtype, [&](const CudaKernels& k) {
    return k.finish_backward({C,
                              1,
                              statistics,
                              statistics,
                              gamma,
                              {},
                              own_sums,
                              sums,
                              count,
                              false,
                              coefficients,
                              0,
                              dgamma,
                              dbeta,
                              false,
                              false},
                             stream);
  });
}

SBN_EXPORT int gluon_syncbn_cuda_normalize(int dtype, int64_t N, int64_t C, int64_t S, int64_t R,
                                           const void* x, const void* coefficients, void* y,
                                           int add, int multiprocessors, void* stream) {
  return with_kernels(dtype, [&](const CudaKernels& k) {
    ForwardShard shard{};
    shard.view = {N, C, S, R};
    shard.x = x;
    shard.y = y;
    shard.store = store(add);
    return k.normalize(shard, coefficients, multiprocessors, stream);
  });
}

SBN_EXPORT int gluon_syncbn_cuda_input_gradient(int dtype, int64_t N, int64_t C, int64_t S,
                                                int64_t R, const void* dy, const void* x,
                                                const void* coefficients, void* dx, int add,
                                                int multiprocessors, void* stream) {
  return with_kernels(dtype, [&](const CudaKernels& k) {
    BackwardShard shard{};
    shard.view = {N, C, S, R};
    shard.dy = dy;
    shard.x = x;
    shard.dx = dx;
    shard.store = store(add);
    return k.input_gradient(shard, coefficients, multiprocessors, stream);
  });
}

// An all-reduce on the host of C sums and a count per device, in place. Returns 0, or 1 after an
// error.
SBN_EXPORT int gluon_syncbn_reduce(int devices, int64_t C, ChannelSums* sums, double* counts) {
  AllReduce all_reduce;
  LayerConfig config;
  config.name = "shards";
  config.timeout_seconds = 60;
  for (int i = 0; i < devices; ++i) config.devices.push_back("gpu(" + std::to_string(i) + ")");
  all_reduce.configure(0, config);
  const LayerPtr layer = all_reduce.find(0);
  std::vector<int> failed(static_cast<size_t>(devices));
  std::vector<std::thread> threads;
  for (int i = 0; i < devices; ++i) {
    threads.emplace_back([&, i] {
      try {
        const CallId id = all_reduce.next_call(layer, config.devices[i]);
        std::vector<ChannelSums> mine(sums + i * C, sums + (i + 1) * C);
        all_reduce.reduce(layer, id, Direction::kForward, config.devices[i], "", &mine, counts + i);
        std::copy(mine.begin(), mine.end(), sums + i * C);
      } catch (const std::exception&) {
        failed[i] = 1;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  return *std::max_element(failed.begin(), failed.end());
}
