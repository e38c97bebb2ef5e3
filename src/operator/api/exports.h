// Marks what the library offers to gluon_syncbn.native, which declares it in library.py. Strings
// are UTF-8 and copied.
#ifndef GLUON_SYNCBN_API_EXPORTS_H_
#define GLUON_SYNCBN_API_EXPORTS_H_

#define SBN_EXPORT extern "C" __attribute__((visibility("default")))

#endif  // GLUON_SYNCBN_API_EXPORTS_H_
