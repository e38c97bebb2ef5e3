// Calls the functions of stores. Those of a KVStore and of Horovod give work to MXNet's engine,
// which writes the answer into an array; a user's returns when the answer is there.
#include "processes/transports.h"

#include <algorithm>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <utility>
#include <vector>

#include "processes/text.h"
#include "processes/thirds.h"

namespace gluon_syncbn {
namespace {

// Arguments of Horovod's functions.
constexpr int kPriority = 0, kOneArray = 1;

// See Transport.
struct Codec {
  std::function<void(const double* mine)> pack;
  std::function<Answer(std::vector<double>* values)> unpack;
};

// The store adds numbers of FixedPoint.
template <typename T>
Codec adding(const std::shared_ptr<FixedPoint>& fixed_point, T* packed, const T* sums) {
  return {[=](const double* mine) { fixed_point->pack(mine, packed); },
          [=](std::vector<double>* all) {
            return fixed_point->unpack(sums, all->data()) ? Answer::kSums : Answer::kNothing;
          }};
}

class StoreTransport : public Transport {
 public:
  // answer: the array that MXNet writes once the values of all have arrived. Null: `send` returns
  // after that.
  StoreTransport(Codec codec, std::function<void(std::mutex*)> send, Handle answer)
      : codec_(std::move(codec)), send_(std::move(send)), answer_(answer) {}

  void pack(const double* mine) override { codec_.pack(mine); }

  void send(std::mutex* store) override {
    send_(store);
    if (answer_) wait_.emplace(answer_);
  }

  Waited wait(double seconds) override {
    if (!answer_) return Waited::kDone;
    const Waited waited = wait_->wait(seconds);
    if (waited == Waited::kDone && mxnet.ndarray_wait_to_read(answer_) != 0) {
      throw StoreError(mxnet.last_error());
    }
    return waited;
  }

  Answer unpack(std::vector<double>* values) override { return codec_.unpack(values); }

 private:
  const Codec codec_;
  const std::function<void(std::mutex*)> send_;
  const Handle answer_;
  std::optional<ArrayWait> wait_;
};

// push() returns 0, or -1 with an MXNet error.
template <typename F>
std::unique_ptr<Transport> in_engine(const Codec& codec, Handle answer, const F& push) {
  const auto send = [push = push](std::mutex* store) mutable {
    const std::lock_guard<std::mutex> lock(*store);
    if (push() != 0) throw StoreError(mxnet.last_error());
  };
  return std::make_unique<StoreTransport>(codec, send, answer);
}

Answer unpack_gathered(const HorovodArrays& a, const std::string& key,
                       std::vector<double>* values) {
  int ndim = 0;
  const int* shape = nullptr;
  void* data = nullptr;
  if (mxnet.ndarray_get_shape(a.output, &ndim, &shape) || ndim != 1 ||
      mxnet.ndarray_get_data(a.output, &data)) {
    throw std::runtime_error("Horovod has returned no array of one axis.");
  }
  // The values of each process follow their number.
  const double* const begin = static_cast<const double*>(data);
  const double* from = begin;
  values->clear();
  for (int rank = 0; rank < a.ranks; ++rank, from += 1 + a.size) {
    if (*from != static_cast<double>(a.size)) {
      std::vector<int64_t> sizes;
      for (from = begin; from < begin + shape[0]; from += 1 + sizes.back()) {
        sizes.push_back(static_cast<int64_t>(*from));
      }
      throw std::runtime_error(different_sizes(key, sizes));
    }
    values->insert(values->end(), from + 1, from + 1 + a.size);
  }
  return Answer::kValues;
}

}  // namespace

Transports kvstore_transports(const KVStoreSlots& slots, const KVStoreSums* sums, int exact_bits) {
  const auto through = [&](const Codec& codec, int key, Handle array) {
    return in_engine(codec, array, [s = slots, key, array]() mutable {
      return s.pushpull(s.kvstore, 1, &key, 1, &key, &array, &array, 0);
    });
  };
  // Every process writes its own slot, and zeros to all others.
  const Codec values{[s = slots](const double* mine) {
                       const int64_t slot = kThirds * s.size;
                       float* const own = s.thirds + slot * s.rank;
                       std::fill(s.thirds, own, 0.0f);
                       to_thirds(mine, s.size, own);
                       std::fill(own + slot, s.thirds + slot * s.ranks, 0.0f);
                     },
                     [s = slots](std::vector<double>* all) {
                       all->resize(static_cast<size_t>(s.ranks * s.size));
                       from_thirds(s.thirds, s.ranks, s.size, all->data());
                       return Answer::kValues;
                     }};
  Transports transports{through(values, slots.key, slots.slots), nullptr, nullptr};
  if (sums) {
    transports.fixed_point = std::make_shared<FixedPoint>(slots.size, slots.ranks, exact_bits);
    transports.sums =
        through(adding(transports.fixed_point, sums->packed, sums->packed), sums->key, sums->array);
  }
  return transports;
}

Transports horovod_transports(const std::string& key, const HorovodArrays& arrays,
                              const HorovodSums* sums, int exact_bits) {
  const std::string name = "gluon_syncbn " + key;
  const Codec values{
      [a = arrays](const double* mine) {
        a.values[0] = static_cast<double>(a.size);
        std::copy(mine, mine + a.size, a.values + 1);
      },
      [a = arrays, key](std::vector<double>* all) { return unpack_gathered(a, key, all); }};
  const auto gather = [a = arrays, name]() mutable {
    return a.allgather(&a.input, &a.output, name.c_str(), kPriority, a.process_set, kOneArray);
  };
  Transports transports{in_engine(values, arrays.output, gather), nullptr, nullptr};
  if (sums) {
    transports.fixed_point = std::make_shared<FixedPoint>(arrays.size, arrays.ranks, exact_bits);
    const auto add = [s = *sums, name = name + " sums", set = arrays.process_set]() mutable {
      return s.allreduce(&s.input, &s.output, name.c_str(), s.operation, kPriority, 1.0, 1.0,
                         kOneArray, set);
    };
    transports.sums =
        in_engine(adding(transports.fixed_point, sums->packed, sums->sums), sums->output, add);
  }
  return transports;
}

Transports function_transports(const std::string& key, const StoreFunction& function, int rank,
                               int ranks, int64_t size, int exact_bits) {
  using Numbers = std::shared_ptr<std::vector<double>>;
  const auto through = [&](const Codec& codec, const std::string& name, int64_t rows,
                           const Numbers& numbers) {
    const auto send = [f = function, name, rows, numbers](std::mutex*) {
      Outcome outcome;
      f.all_reduce(f.store, name.c_str(), numbers->data(), rows,
                   static_cast<int64_t>(numbers->size()), &outcome);
      if (!outcome.succeeded) throw StoreError(outcome.error);
    };
    return std::make_unique<StoreTransport>(codec, send, nullptr);
  };
  const auto rows = std::make_shared<std::vector<double>>(ranks * size);
  // Every process writes its own row, and zeros to all others.
  const Codec values{[rows, rank, size](const double* mine) {
                       std::fill(rows->begin(), rows->end(), 0.0);
                       std::copy_n(mine, size, rows->data() + rank * size);
                     },
                     [rows](std::vector<double>* all) {
                       *all = *rows;
                       return Answer::kValues;
                     }};
  Transports transports{through(values, key, ranks, rows), nullptr, nullptr};
  const auto fixed_point = std::make_shared<FixedPoint>(size, ranks, exact_bits);
  if (fixed_point->size() > 0) {
    const auto packed = std::make_shared<std::vector<double>>(fixed_point->size());
    transports.sums =
        through(adding(fixed_point, packed->data(), packed->data()), key + " sums", 1, packed);
    transports.fixed_point = fixed_point;
  }
  return transports;
}

}  // namespace gluon_syncbn
