#pragma once

#include <exception>
#include <string>
#include <string_view>

namespace lockstep {

enum class ErrorCode {
  kInvalidArgument,
  kInvalidRank,
  kInvalidWorldSize,
  kSelfSend,
  kNoConnection,
  kSizeMismatch,
  kTimeout,
  kChannelClosed,
  kIo,
  kPeerLost,            // a rank died, was stopped or is out of reach
  kAborted,             // somebody called abort()
  kCollectiveMismatch,  // ranks called different collectives
  kNonFinite,
  kAuthentication,
  kVersionMismatch,
  kUnexpectedMessage,
  kMessageTooLarge,
  kStepMismatch,  // these three: what a worker sent is not what the gradient server expects
  kBlockMismatch,
  kComponentMismatch,
  kReplicaMismatch,  // workers hold different weights
  kDevice,           // a GPU refused something: a fault of one worker alone
};

// The code as it appears in messages and logs, e.g. "size mismatch".
std::string_view to_string(ErrorCode code);

// The one exception of the library: something in the environment went wrong.
// `rank` is the rank at fault where there is one, -1 otherwise; the message names it too.
class Error : public std::exception {
 public:
  Error(ErrorCode code, std::string message, int rank = -1);

  ErrorCode code() const noexcept { return code_; }
  int rank() const noexcept { return rank_; }
  // "peer lost: rank 2 (10.0.0.3:4711): ..." — code, then the message.
  const char* what() const noexcept override { return what_.c_str(); }
  // The message without the code.
  std::string_view message() const noexcept;

 private:
  ErrorCode code_;
  int rank_;
  std::string what_;
};

// Throws Error{kIo} with `operation` and the text of `error_number` (an errno value).
[[noreturn]] void throw_io(std::string_view operation, int error_number);

}  // namespace lockstep
