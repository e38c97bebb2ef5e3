// The operator GluonSyncBatchNorm as MXNet sees it: its arrays, their shapes and types, and its
// callbacks.
//
//   data, gamma, beta, residual if there is one -> output, mean, inv_std
//   auxiliary: running_mean, running_var, and with momentum=None num_batches_tracked (1,)
//
// mean and inv_std have a row of C values for each virtual device, usually one.
//
// MXNet runs each forward and backward on a thread that it makes for custom operators, so waiting
// for other devices blocks nothing else.
#ifndef GLUON_SYNCBN_CALL_OPERATOR_H_
#define GLUON_SYNCBN_CALL_OPERATOR_H_

#include "mxnet/api.h"

namespace gluon_syncbn {

// A PropertyCreator.
int create_operator(const char*, int size, const char** keys, const char** values,
                    CallbackList* result);

}  // namespace gluon_syncbn

#endif  // GLUON_SYNCBN_CALL_OPERATOR_H_
