// How numbers travel through MXNet's KVStore and through Horovod. Handles belong to Python.
#ifndef GLUON_SYNCBN_EXCHANGE_TRANSPORTS_H_
#define GLUON_SYNCBN_EXCHANGE_TRANSPORTS_H_

#include <cstdint>
#include <string>

#include "exchange/channel.h"
#include "mxnet/api.h"

namespace gluon_syncbn {

// MXKVStorePushPull of mxnet/c_api.h.
using PushPull = int (*)(Handle kvstore, uint32_t num_sent, const int* sent, uint32_t num_fetched,
                         const int* fetched, Handle* values, Handle* results, int priority);

// Every process puts its numbers into a slot of its own, in which all others have zeros.
class KVStoreCarrier : public Carrier {
 public:
  // slots: a float32 array of shape (ranks, kParts, size), on which nothing is pushed, and `parts`
  // its memory.
  KVStoreCarrier(PushPull pushpull, Handle kvstore, int key, Handle slots, float* parts, int rank,
                 int ranks, int64_t size);

  void pack(const double* mine) override;
  int send() override;
  Handle answer() const override { return slots_; }
  void unpack(double* everyone) override;

 private:
  const PushPull pushpull_;
  const Handle kvstore_;
  const int key_;
  Handle slots_;
  float* const parts_;
  const int rank_, ranks_;
  const int64_t size_;
};

// horovod_mxnet_allgather_async of horovod/mxnet/mpi_ops.h.
using AllGather = int (*)(Handle* inputs, Handle* outputs, const char* name, int priority,
                          int process_set, int num_tensors);

class HorovodCarrier : public Carrier {
 public:
  // input: a float64 array of shape (size,), on which nothing is pushed, and `values` its memory;
  // output: a float64 array that Horovod may give another shape.
  HorovodCarrier(AllGather allgather, std::string key, Handle input, double* values, Handle output,
                 int ranks, int64_t size);

  void pack(const double* mine) override;
  int send() override;
  Handle answer() const override { return output_; }
  void unpack(double* everyone) override;

 private:
  const AllGather allgather_;
  const std::string key_, name_;
  Handle input_;
  double* const values_;
  Handle output_;
  const int ranks_;
  const int64_t size_;
};

}  // namespace gluon_syncbn

#endif  // GLUON_SYNCBN_EXCHANGE_TRANSPORTS_H_
