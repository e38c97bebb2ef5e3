// Transports through MXNet's KVStore, through Horovod, and through a function of the user. The
// store carries the values of all processes, or adds numbers of FixedPoint. Python owns all handles
// and mirrors the structs.
#ifndef GLUON_SYNCBN_PROCESSES_TRANSPORTS_H_
#define GLUON_SYNCBN_PROCESSES_TRANSPORTS_H_

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "mxnet/c_api.h"
#include "processes/outcome.h"
#include "processes/route.h"

namespace gluon_syncbn {

// A transport through a store whose operations MXNet's engine runs.
class StoreTransport : public Transport {
 public:
  void send(std::mutex* store) final;
  Waited wait(double seconds) final;

 protected:
  // Returns 0, or -1 with an MXNet error.
  virtual int push() = 0;
  // The array that MXNet writes once the values of all have arrived.
  virtual Handle answer() const = 0;

  static Answer sums(bool are_there) { return are_there ? Answer::kSums : Answer::kNothing; }

 private:
  std::optional<ArrayWait> wait_;
};

struct KVStoreSlots {
  // MXKVStorePushPull of mxnet/c_api.h.
  int (*pushpull)(Handle kvstore, uint32_t num_sent, const int* sent, uint32_t num_fetched,
                  const int* fetched, Handle* values, Handle* results, int priority);
  Handle kvstore;
  int key;
  int rank, ranks;
  // The number of values of each process.
  int64_t size;
  // A float32 array of shape (ranks, kThirds, size) without pending operations, and its memory.
  Handle slots;
  float* thirds;
};

// Every process writes its own slot, and zeros to all others.
class KVStoreTransport : public StoreTransport {
 public:
  explicit KVStoreTransport(const KVStoreSlots& slots) : s_(slots) {}

  void pack(const double* mine) override;
  Answer unpack(std::vector<double>* values) override;

 protected:
  int push() override;
  Handle answer() const override { return s_.slots; }

 private:
  KVStoreSlots s_;
};

// An array of FixedPoint's numbers that the store adds up over the processes.
struct KVStoreSums {
  int key;
  // A float32 array without pending operations, and its memory.
  Handle array;
  float* packed;
};

class KVStoreAdder : public StoreTransport {
 public:
  KVStoreAdder(const KVStoreSlots& slots, const KVStoreSums& sums,
               std::shared_ptr<FixedPoint> fixed_point)
      : slots_(slots), sums_(sums), fixed_point_(std::move(fixed_point)) {}

  void pack(const double* mine) override { fixed_point_->pack(mine, sums_.packed); }
  Answer unpack(std::vector<double>* values) override {
    return sums(fixed_point_->unpack(sums_.packed, values->data()));
  }

 protected:
  int push() override;
  Handle answer() const override { return sums_.array; }

 private:
  const KVStoreSlots slots_;
  KVStoreSums sums_;
  const std::shared_ptr<FixedPoint> fixed_point_;
};

struct HorovodArrays {
  // horovod_mxnet_allgather_async of horovod/mxnet/mpi_ops.h.
  int (*allgather)(Handle* inputs, Handle* outputs, const char* name, int priority, int process_set,
                   int num_tensors);
  int process_set;
  int ranks;
  // The number of values of each process.
  int64_t size;
  // A float64 array of shape (1 + size,) without pending operations, and its memory: the size, and
  // the values.
  Handle input;
  double* values;
  // A float64 array, whose shape Horovod may change.
  Handle output;
};

class HorovodTransport : public StoreTransport {
 public:
  HorovodTransport(std::string key, const HorovodArrays& arrays)
      : key_(std::move(key)), name_("gluon_syncbn " + key_), a_(arrays) {}

  void pack(const double* mine) override;
  Answer unpack(std::vector<double>* values) override;

 protected:
  int push() override;
  Handle answer() const override { return a_.output; }

 private:
  const std::string key_, name_;
  HorovodArrays a_;
};

struct HorovodSums {
  // horovod_mxnet_allreduce_async of horovod/mxnet/mpi_ops.h.
  int (*allreduce)(Handle* inputs, Handle* outputs, const char* name, int operation, int priority,
                   double factor_before, double factor_after, int num_tensors, int process_set);
  // Horovod's constant for a sum.
  int operation;
  // float64 arrays without pending operations, and their memory.
  Handle input, output;
  double *packed, *sums;
};

class HorovodAdder : public StoreTransport {
 public:
  HorovodAdder(const std::string& key, int process_set, const HorovodSums& sums,
               std::shared_ptr<FixedPoint> fixed_point)
      : name_("gluon_syncbn " + key + " sums"),
        process_set_(process_set),
        s_(sums),
        fixed_point_(std::move(fixed_point)) {}

  void pack(const double* mine) override { fixed_point_->pack(mine, s_.packed); }
  Answer unpack(std::vector<double>* values) override {
    return sums(fixed_point_->unpack(s_.sums, values->data()));
  }

 protected:
  int push() override;
  Handle answer() const override { return s_.output; }

 private:
  const std::string name_;
  const int process_set_;
  HorovodSums s_;
  const std::shared_ptr<FixedPoint> fixed_point_;
};

// A function of the user's store, which adds float64 arrays of shape (rows, size / rows) over all
// processes, in place. It may be called for several keys at once.
struct StoreFunction {
  void (*all_reduce)(int64_t store, const char* key, double* values, int64_t rows, int64_t size,
                     Outcome*);
  int64_t store;
};

class FunctionStore : public Transport {
 public:
  void send(std::mutex* store) final;
  // The function has waited.
  Waited wait(double) final { return Waited::kDone; }

 protected:
  FunctionStore(std::string key, const StoreFunction& function, int64_t rows, int64_t size)
      : key_(std::move(key)), function_(function), rows_(rows), numbers_(size) {}

  const std::string key_;
  const StoreFunction function_;
  const int64_t rows_;
  std::vector<double> numbers_;
};

// Every process writes its own row, and zeros to all others.
class FunctionTransport : public FunctionStore {
 public:
  FunctionTransport(std::string key, const StoreFunction& function, int rank, int ranks,
                    int64_t size)
      : FunctionStore(std::move(key), function, ranks, ranks * size), own_(rank * size) {}

  void pack(const double* mine) override;
  Answer unpack(std::vector<double>* values) override;

 private:
  const int64_t own_;
};

class FunctionAdder : public FunctionStore {
 public:
  FunctionAdder(const std::string& key, const StoreFunction& function,
                std::shared_ptr<FixedPoint> fixed_point)
      : FunctionStore(key + " sums", function, 1, fixed_point->size()),
        fixed_point_(std::move(fixed_point)) {}

  void pack(const double* mine) override { fixed_point_->pack(mine, numbers_.data()); }
  Answer unpack(std::vector<double>* values) override {
    return fixed_point_->unpack(numbers_.data(), values->data()) ? Answer::kSums : Answer::kNothing;
  }

 private:
  const std::shared_ptr<FixedPoint> fixed_point_;
};

}  // namespace gluon_syncbn

#endif  // GLUON_SYNCBN_PROCESSES_TRANSPORTS_H_
