#pragma once

#include <cstdio>
#include <cstdlib>

// For bugs of ours, never for the environment: logs the place and aborts.
#define LOCKSTEP_CHECK(condition)                                                              \
  do {                                                                                         \
    if (!(condition)) [[unlikely]] {                                                           \
      std::fprintf(stderr, "%s:%d: check failed: %s\n", __FILE__, __LINE__, #condition);       \
      std::abort();                                                                            \
    }                                                                                          \
  } while (false)
