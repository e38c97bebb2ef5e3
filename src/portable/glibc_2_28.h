// Included first in every C++ source of a portable wheel: keeps g++'s headers to functions that
// libstdc++ 8 and glibc 2.28 have. glibc_2_28.cc defines the rest.
#include <cstddef>

#ifdef __GLIBCXX__
// The version that libstdc++ has had since GCC 4.4; GCC 12 added another.
__asm__(
    ".symver _ZNSt18condition_variable4waitERSt11unique_lockISt5mutexE,"
    "_ZNSt18condition_variable4waitERSt11unique_lockISt5mutexE@GLIBCXX_3.4.11");
#endif
