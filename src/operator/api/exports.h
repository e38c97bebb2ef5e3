// Marks the functions that the library exports to gluon_syncbn.native, which declares them in
// library.py. Strings are UTF-8, and the functions copy them.
#ifndef GLUON_SYNCBN_API_EXPORTS_H_
#define GLUON_SYNCBN_API_EXPORTS_H_

#define SBN_EXPORT extern "C" __attribute__((visibility("default")))

#endif  // GLUON_SYNCBN_API_EXPORTS_H_
