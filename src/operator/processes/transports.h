// Transports through MXNet's KVStore, through Horovod, and through a function of the user. The
// store carries the values of all processes, or adds numbers of FixedPoint. Python owns all
// handles.
#ifndef GLUON_SYNCBN_PROCESSES_TRANSPORTS_H_
#define GLUON_SYNCBN_PROCESSES_TRANSPORTS_H_

#include <cstdint>
#include <string>

#include "mxnet/c_api.h"
#include "processes/outcome.h"
#include "processes/route.h"

namespace gluon_syncbn {

// MXKVStorePushPull of mxnet/c_api.h.
using PushPull = int(Handle kvstore, uint32_t num_sent, const int* sent, uint32_t num_fetched,
                     const int* fetched, Handle* values, Handle* results, int priority);

struct KVStoreSlots {
  PushPull* pushpull;
  Handle kvstore;
  int key;
  int rank, ranks;
  // The number of values of each process.
  int64_t size;
  // A float32 array of shape (ranks, kThirds, size) without pending operations, and its memory.
  Handle slots;
  float* thirds;
};

// An array of FixedPoint's numbers that the store adds up over the processes.
struct KVStoreSums {
  int key;
  // A float32 array without pending operations, and its memory.
  Handle array;
  float* packed;
};

// horovod_mxnet_allgather_async and horovod_mxnet_allreduce_async of horovod/mxnet/mpi_ops.h.
using AllGather = int(Handle* inputs, Handle* outputs, const char* name, int priority,
                      int process_set, int num_tensors);
using AllReduce = int(Handle* inputs, Handle* outputs, const char* name, int operation,
                      int priority, double factor_before, double factor_after, int num_tensors,
                      int process_set);

struct HorovodArrays {
  AllGather* allgather;
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

struct HorovodSums {
  AllReduce* allreduce;
  // Horovod's constant for a sum.
  int operation;
  // float64 arrays without pending operations, and their memory.
  Handle input, output;
  double *packed, *sums;
};

// A function of the user's store, which adds float64 arrays of shape (rows, size / rows) over all
// processes, in place. It may be called for several keys at once.
struct StoreFunction {
  void (*all_reduce)(int64_t store, const char* key, double* values, int64_t rows, int64_t size,
                     Outcome*);
  int64_t store;
};

// exact_bits: see Limbs. Without `sums` the store adds none.
Transports kvstore_transports(const KVStoreSlots& slots, const KVStoreSums* sums, int exact_bits);
Transports horovod_transports(const std::string& key, const HorovodArrays& arrays,
                              const HorovodSums* sums, int exact_bits);
// exact_bits: 0 if the store may round.
Transports function_transports(const std::string& key, const StoreFunction& function, int rank,
                               int ranks, int64_t size, int exact_bits);

}  // namespace gluon_syncbn

#endif  // GLUON_SYNCBN_PROCESSES_TRANSPORTS_H_
