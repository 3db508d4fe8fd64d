// The same with the shared library: its destructors run at another time than those of a program that holds it.
#include "system/exit_suite.h"
