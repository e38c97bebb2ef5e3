#include "exchange/transports.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <utility>

#include "exchange/limbs.h"

namespace gluon_syncbn {

KVStoreCarrier::KVStoreCarrier(PushPull pushpull, Handle kvstore, int key, Handle slots,
                               float* parts, int rank, int ranks, int64_t size)
    : pushpull_(pushpull),
      kvstore_(kvstore),
      key_(key),
      slots_(slots),
      parts_(parts),
      rank_(rank),
      ranks_(ranks),
      size_(size) {}

void KVStoreCarrier::pack(const double* mine) {
  const int64_t slot = kParts * size_;
  float* const own = parts_ + slot * rank_;
  std::fill(parts_, own, 0.0f);
  split(mine, size_, own);
  std::fill(own + slot, parts_ + slot * ranks_, 0.0f);
}

int KVStoreCarrier::send() { return pushpull_(kvstore_, 1, &key_, 1, &key_, &slots_, &slots_, 0); }

void KVStoreCarrier::unpack(double* everyone) { join(parts_, ranks_, size_, everyone); }

HorovodCarrier::HorovodCarrier(AllGather allgather, std::string key, Handle input, double* values,
                               Handle output, int ranks, int64_t size)
    : allgather_(allgather),
      key_(std::move(key)),
      name_("gluon_syncbn " + key_),
      input_(input),
      values_(values),
      output_(output),
      ranks_(ranks),
      size_(size) {}

void HorovodCarrier::pack(const double* mine) { std::copy(mine, mine + size_, values_); }

int HorovodCarrier::send() {
  constexpr int kPriority = 0, kAllProcesses = 0, kOneArray = 1;
  return allgather_(&input_, &output_, name_.c_str(), kPriority, kAllProcesses, kOneArray);
}

void HorovodCarrier::unpack(double* everyone) {
  int ndim = 0;
  const int* shape = nullptr;
  void* data = nullptr;
  if (mxnet.ndarray_get_shape(output_, &ndim, &shape) || ndim != 1 ||
      mxnet.ndarray_get_data(output_, &data)) {
    throw std::runtime_error("Horovod has returned no array of one axis.");
  }
  if (shape[0] != ranks_ * size_) {
    throw std::runtime_error("The processes bring different amounts of numbers to '" + key_ +
                             "': " + std::to_string(size_) + " here, " + std::to_string(shape[0]) +
                             " in all. Make the same layers in the same order in every process.");
  }
  std::memcpy(everyone, data, sizeof(double) * ranks_ * size_);
}

}  // namespace gluon_syncbn
