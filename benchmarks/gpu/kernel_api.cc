// A C interface to the CUDA kernels of backend.h, for tests and benchmarks without MXNet. Functions
// that run kernels return cudaError_t, or -1 if the library has none; sizes are 0 then. `dtype` is
// a DType (numerics/dtypes.h); (N, C, S, R) is a View (numerics/shards.h).
#include <cstdio>
#include <exception>

#include "api/exports.h"
#include "cuda/backend.h"
#include "cuda/pass.h"

using namespace gluon_syncbn;

namespace {

constexpr int kNoBackend = -1;

// Calls f(kernels).
template <typename F>
int with_kernels(int dtype, const F& f) {
  const CudaBackend* const backend = cuda_backend();
  return backend ? f(backend->kernels(static_cast<DType>(dtype))) : kNoBackend;
}

ForwardShard forward_shard(const View& view, const void* x, void* y) {
  ForwardShard shard;
  shard.view = view;
  shard.x = x;
  shard.y = y;
  return shard;
}

BackwardShard backward_shard(const View& view, const void* dy, const void* x, void* dx) {
  BackwardShard shard;
  shard.view = view;
  shard.dy = dy;
  shard.x = x;
  shard.dx = dx;
  return shard;
}

}  // namespace

SBN_EXPORT int64_t gluon_syncbn_cuda_work_size(int dtype, int64_t N, int64_t C, int64_t S,
                                               int64_t R) {
  const CudaBackend* const backend = cuda_backend();
  if (!backend) return 0;
  return backend->kernels(static_cast<DType>(dtype)).work_size({N, C, S, R});
}

SBN_EXPORT int64_t gluon_syncbn_cuda_coefficients_size(int dtype, int64_t C) {
  const CudaBackend* const backend = cuda_backend();
  return backend ? backend->kernels(static_cast<DType>(dtype)).coefficients_size(C) : 0;
}

SBN_EXPORT int gluon_syncbn_cuda_forward_sums(int dtype, int64_t N, int64_t C, int64_t S, int64_t R,
                                              const void* x, ChannelSums* work, ChannelSums* sums,
                                              Stream stream) {
  return with_kernels(dtype, [&](const CudaKernels& k) {
    return k.forward_sums({N, C, S, R}, x, work, sums, stream);
  });
}

SBN_EXPORT int gluon_syncbn_cuda_backward_sums(int dtype, int64_t N, int64_t C, int64_t S,
                                               int64_t R, const void* dy, const void* x,
                                               const Statistics* statistics, ChannelSums* work,
                                               ChannelSums* sums, Stream stream) {
  return with_kernels(dtype, [&](const CudaKernels& k) {
    const ForBackward kept{const_cast<Statistics*>(statistics), nullptr, nullptr};
    const BackwardShard shard = backward_shard({N, C, S, R}, dy, x, nullptr);
    return k.backward_sums(shard, kept, 0, work, sums, stream);
  });
}

// Of one device, with `count` values of each channel.
SBN_EXPORT int gluon_syncbn_cuda_finish_forward(int dtype, int64_t C, const ChannelSums* sums,
                                                double count, double epsilon, const void* gamma,
                                                const void* beta, Statistics* statistics,
                                                void* coefficients, Stream stream) {
  return with_kernels(dtype, [&](const CudaKernels& k) {
    ForwardFinish finish;
    finish.C = C;
    finish.batches = 1;
    finish.kept.statistics = statistics;
    finish.gamma = gamma;
    finish.beta = beta;
    finish.coefficients = coefficients;
    finish.epsilon = epsilon;
    finish.sums = {1, {sums}};
    finish.counts = {count, count, 1};
    return k.finish_forward(finish, stream);
  });
}

SBN_EXPORT int gluon_syncbn_cuda_finish_backward(int dtype, int64_t C, const Statistics* statistics,
                                                 const void* gamma, const ChannelSums* sums,
                                                 double count, void* coefficients, void* dgamma,
                                                 void* dbeta, Stream stream) {
  return with_kernels(dtype, [&](const CudaKernels& k) {
    BackwardFinish finish;
    finish.C = C;
    finish.batches = 1;
    finish.kept.statistics = const_cast<Statistics*>(statistics);
    finish.gamma = gamma;
    finish.own_sums = sums;
    finish.sums = {1, {sums}};
    finish.counts = {count, count, 1};
    finish.coefficients = coefficients;
    finish.dgamma = dgamma;
    finish.dbeta = dbeta;
    return k.finish_backward(finish, stream);
  });
}

SBN_EXPORT int gluon_syncbn_cuda_normalize(int dtype, int64_t N, int64_t C, int64_t S, int64_t R,
                                           const void* x, const void* coefficients, void* y,
                                           Stream stream) {
  return with_kernels(dtype, [&](const CudaKernels& k) {
    const ForwardShard shard = forward_shard({N, C, S, R}, x, y);
    return k.normalize(shard, coefficients, stream);
  });
}

SBN_EXPORT int gluon_syncbn_cuda_input_gradient(int dtype, int64_t N, int64_t C, int64_t S,
                                                int64_t R, const void* dy, const void* x,
                                                const void* coefficients, void* dx, Stream stream) {
  return with_kernels(dtype, [&](const CudaKernels& k) {
    const BackwardShard shard = backward_shard({N, C, S, R}, dy, x, dx);
    return k.input_gradient(shard, coefficients, stream);
  });
}

// Forward and backward as the operator runs them on one device, with their waits, `rounds` times.
// Returns 1 after an error.
SBN_EXPORT int gluon_syncbn_cuda_calls(int device, int dtype, int64_t N, int64_t C, int64_t S,
                                       int64_t R, const void* x, const void* dy, const void* gamma,
                                       const void* beta, void* running_mean, void* running_variance,
                                       void* y, void* dx, void* dgamma, void* dbeta, int rounds) {
  const auto type = static_cast<DType>(dtype);
  const View view{N, C, S, R};
  ForwardShard forward = forward_shard(view, x, y);
  forward.gamma = gamma;
  forward.beta = beta;
  BackwardShard backward = backward_shard(view, dy, x, dx);
  backward.gamma = gamma;
  backward.beta = beta;
  ForwardTask forth;
  BackwardTask back;
  forth.dtype = back.dtype = type;
  forth.what = back.what = "data";
  forth.epsilon = 1e-5;
  forth.parts = {forward};
  forth.kept = &back.kept;
  forth.running[0] = running_mean;
  forth.running[1] = running_variance;
  back.parts = {backward};
  back.dgamma.to = dgamma;
  back.dbeta.to = dbeta;
  try {
    for (int i = 0; i < rounds; ++i) {
      gpu_pass(device, {}, forth)->alone();
      gpu_pass(device, {}, back)->alone();
      back.kept = {};
    }
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
  return 0;
}
