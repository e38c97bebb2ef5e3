// Calls the functions of stores. Those of a KVStore and of Horovod give work to MXNet's engine,
// which writes the answer into an array; a user's returns when the answer is there.
#include "processes/transports.h"

#include <algorithm>
#include <stdexcept>
#include <vector>

#include "processes/text.h"
#include "processes/thirds.h"

namespace gluon_syncbn {
namespace {

// Arguments of Horovod's functions.
constexpr int kPriority = 0, kOneArray = 1;

}  // namespace

void StoreTransport::send(std::mutex* store) {
  {
    const std::lock_guard<std::mutex> lock(*store);
    if (push() != 0) throw StoreError(mxnet.last_error());
  }
  wait_.emplace(answer());
}

Waited StoreTransport::wait(double seconds) {
  const Waited waited = wait_->wait(seconds);
  if (waited == Waited::kDone && mxnet.ndarray_wait_to_read(answer()) != 0) {
    throw StoreError(mxnet.last_error());
  }
  return waited;
}

void KVStoreTransport::pack(const double* mine) {
  const int64_t slot = kThirds * s_.size;
  float* const own = s_.thirds + slot * s_.rank;
  std::fill(s_.thirds, own, 0.0f);
  to_thirds(mine, s_.size, own);
  std::fill(own + slot, s_.thirds + slot * s_.ranks, 0.0f);
}

int KVStoreTransport::push() {
  return s_.pushpull(s_.kvstore, 1, &s_.key, 1, &s_.key, &s_.slots, &s_.slots, 0);
}

Answer KVStoreTransport::unpack(std::vector<double>* values) {
  values->resize(static_cast<size_t>(s_.ranks * s_.size));
  from_thirds(s_.thirds, s_.ranks, s_.size, values->data());
  return Answer::kValues;
}

int KVStoreAdder::push() {
  return slots_.pushpull(slots_.kvstore, 1, &sums_.key, 1, &sums_.key, &sums_.array, &sums_.array,
                         0);
}

void HorovodTransport::pack(const double* mine) {
  a_.values[0] = static_cast<double>(a_.size);
  std::copy(mine, mine + a_.size, a_.values + 1);
}

int HorovodTransport::push() {
  return a_.allgather(&a_.input, &a_.output, name_.c_str(), kPriority, a_.process_set, kOneArray);
}

Answer HorovodTransport::unpack(std::vector<double>* values) {
  int ndim = 0;
  const int* shape = nullptr;
  void* data = nullptr;
  if (mxnet.ndarray_get_shape(a_.output, &ndim, &shape) || ndim != 1 ||
      mxnet.ndarray_get_data(a_.output, &data)) {
    throw std::runtime_error("Horovod has returned no array of one axis.");
  }
  // The values of each process follow their number.
  const double* const begin = static_cast<const double*>(data);
  const double* from = begin;
  values->clear();
  for (int rank = 0; rank < a_.ranks; ++rank, from += 1 + a_.size) {
    if (*from != static_cast<double>(a_.size)) {
      std::vector<int64_t> sizes;
      for (from = begin; from < begin + shape[0]; from += 1 + sizes.back()) {
        sizes.push_back(static_cast<int64_t>(*from));
      }
      throw std::runtime_error(different_sizes(key_, sizes));
    }
    values->insert(values->end(), from + 1, from + 1 + a_.size);
  }
  return Answer::kValues;
}

int HorovodAdder::push() {
  return s_.allreduce(&s_.input, &s_.output, name_.c_str(), s_.operation, kPriority, 1.0, 1.0,
                      kOneArray, process_set_);
}

void FunctionStore::send(std::mutex*) {
  Outcome outcome;
  const auto size = static_cast<int64_t>(numbers_.size());
  function_.all_reduce(function_.store, key_.c_str(), numbers_.data(), rows_, size, &outcome);
  if (!outcome.succeeded) throw StoreError(outcome.failure());
}

void FunctionTransport::pack(const double* mine) {
  std::fill(numbers_.begin(), numbers_.end(), 0.0);
  std::copy_n(mine, static_cast<int64_t>(numbers_.size()) / rows_, &numbers_[own_]);
}

Answer FunctionTransport::unpack(std::vector<double>* values) {
  *values = numbers_;
  return Answer::kValues;
}

}  // namespace gluon_syncbn
