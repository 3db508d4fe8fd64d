// The same tests with the shared library, whose destructors run at another time than those of a
// static library.
#include "system/exit_suite.h"
