// Marks the functions that the library exports.
#ifndef GLUON_SYNCBN_API_EXPORTS_H_
#define GLUON_SYNCBN_API_EXPORTS_H_

#define SBN_EXPORT extern "C" __attribute__((visibility("default")))

#endif  // GLUON_SYNCBN_API_EXPORTS_H_
