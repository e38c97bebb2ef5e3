// What kernels do for an activation and a residual.
#ifndef GLUON_SYNCBN_CUDA_EPILOGUE_CUH_
#define GLUON_SYNCBN_CUDA_EPILOGUE_CUH_

#include "cuda/vectors.cuh"
#include "numerics/shards.h"

namespace gluon_syncbn {

// The arguments of a kernel for it.
template <typename A>
struct EpilogueTask {
  Activation activation;
  // The slope of the activation, and that of its inverse if z is found from y, otherwise 1.
  A slope, inverse;
  // The array that determines the gates, x or y.
  const void* v;
  const Gate<A>* gates;
  void* dresidual;
  bool add_dresidual;
};

// Recovers x from y by the inverse of the activation, whose slope is not 0.
template <typename A>
struct InverseGate {
  A sign, threshold, slope;

  SBN_DEVICE A of(A x, bool open) const { return open ? x : x * slope; }
  SBN_DEVICE A operator()(A x, A v) const { return of(x, v * sign > threshold); }
};

// Turns values of dy and x, given that of v, into those that formulas take.
template <typename A, bool kGated>
struct Gates {
  Gate<A> dy;
  InverseGate<A> x;

  SBN_DEVICE static Gates of(const EpilogueTask<A>& epilogue, A sign, A threshold) {
    return {{sign, threshold, epilogue.slope}, {sign, threshold, epilogue.inverse}};
  }
  SBN_DEVICE static Gates of(const EpilogueTask<A>& epilogue, int64_t c) {
    return of(epilogue, epilogue.gates[c].sign, epilogue.gates[c].threshold);
  }
};
template <typename A>
struct Gates<A, false> {
  SBN_DEVICE static Gates of(const EpilogueTask<A>&, int64_t) { return {}; }
  SBN_DEVICE static A dy(A value, A) { return value; }
  SBN_DEVICE static A x(A value, A) { return value; }
};

}  // namespace gluon_syncbn

#endif  // GLUON_SYNCBN_CUDA_EPILOGUE_CUH_
