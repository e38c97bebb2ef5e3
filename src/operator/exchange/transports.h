// Transports through MXNet's KVStore and through Horovod. Python owns all handles, and mirrors the
// structs.
#ifndef GLUON_SYNCBN_EXCHANGE_TRANSPORTS_H_
#define GLUON_SYNCBN_EXCHANGE_TRANSPORTS_H_

#include <cstdint>
#include <string>
#include <utility>

#include "exchange/channel.h"
#include "mxnet/api.h"

namespace gluon_syncbn {

struct KVStoreSlots {
  // MXKVStorePushPull of mxnet/c_api.h.
  int (*pushpull)(Handle kvstore, uint32_t num_sent, const int* sent, uint32_t num_fetched,
                  const int* fetched, Handle* values, Handle* results, int priority);
  Handle kvstore;
  int key;
  int rank, ranks;
  // Values of each process.
  int64_t size;
  // A float32 array of shape (ranks, kLimbs, size) without pending operations, and its memory.
  Handle slots;
  float* limbs;
};

// Every process writes its own slot, and zeros to all others.
class KVStoreTransport : public Transport {
 public:
  explicit KVStoreTransport(const KVStoreSlots& slots) : s_(slots) {}

  void pack(const double* mine) override;
  int send() override;
  Handle answer() const override { return s_.slots; }
  void unpack(double* everyone) override;

 private:
  KVStoreSlots s_;
};

struct HorovodArrays {
  // horovod_mxnet_allgather_async of horovod/mxnet/mpi_ops.h.
  int (*allgather)(Handle* inputs, Handle* outputs, const char* name, int priority, int process_set,
                   int num_tensors);
  int ranks;
  // Values of each process.
  int64_t size;
  // A float64 array of shape (size,) without pending operations, and its memory.
  Handle input;
  double* values;
  // A float64 array, which Horovod may give another shape.
  Handle output;
};

class HorovodTransport : public Transport {
 public:
  HorovodTransport(std::string key, const HorovodArrays& arrays)
      : key_(std::move(key)), name_("gluon_syncbn " + key_), a_(arrays) {}

  void pack(const double* mine) override;
  int send() override;
  Handle answer() const override { return a_.output; }
  void unpack(double* everyone) override;

 private:
  const std::string key_, name_;
  HorovodArrays a_;
};

}  // namespace gluon_syncbn

#endif  // GLUON_SYNCBN_EXCHANGE_TRANSPORTS_H_
