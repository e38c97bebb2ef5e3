#include "exchange/transports.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "exchange/limbs.h"

namespace gluon_syncbn {

void KVStoreTransport::pack(const double* mine) {
  const int64_t slot = kLimbs * s_.size;
  float* const own = s_.limbs + slot * s_.rank;
  std::fill(s_.limbs, own, 0.0f);
  to_limbs(mine, s_.size, own);
  std::fill(own + slot, s_.limbs + slot * s_.ranks, 0.0f);
}

int KVStoreTransport::send() {
  return s_.pushpull(s_.kvstore, 1, &s_.key, 1, &s_.key, &s_.slots, &s_.slots, 0);
}

void KVStoreTransport::unpack(double* everyone) {
  from_limbs(s_.limbs, s_.ranks, s_.size, everyone);
}

void HorovodTransport::pack(const double* mine) { std::copy(mine, mine + a_.size, a_.values); }

int HorovodTransport::send() {
  constexpr int kPriority = 0, kAllProcesses = 0, kOneArray = 1;
  return a_.allgather(&a_.input, &a_.output, name_.c_str(), kPriority, kAllProcesses, kOneArray);
}

void HorovodTransport::unpack(double* everyone) {
  int ndim = 0;
  const int* shape = nullptr;
  void* data = nullptr;
  if (mxnet.ndarray_get_shape(a_.output, &ndim, &shape) || ndim != 1 ||
      mxnet.ndarray_get_data(a_.output, &data)) {
    throw std::runtime_error("Horovod has returned no array of one axis.");
  }
  if (shape[0] != a_.ranks * a_.size) {
    throw std::runtime_error("The processes bring different amounts of numbers to '" + key_ +
                             "': " + std::to_string(a_.size) + " here, " +
                             std::to_string(shape[0]) +
                             " in all. Make the same layers in the same order in every process.");
  }
  std::memcpy(everyone, data, sizeof(double) * a_.ranks * a_.size);
}

}  // namespace gluon_syncbn
