#pragma once

#include <gtest/gtest.h>

#include <string>

#include "lockstep/base/error.h"

namespace lockstep::test {

// What the Error says that `body` throws; "no error" if it throws none.
template <typename Body>
std::string message_of(Body&& body) {
  try {
    body();
  } catch (const Error& error) {
    return error.what();
  }
  return "no error";
}

// The same, where the code must be kIo.
template <typename Body>
std::string io_error_of(Body&& body) {
  return message_of([&] {
    try {
      body();
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kIo);
      throw;
    }
  });
}

}  // namespace lockstep::test
