#include "lockstep/base/error.h"

#include <fmt/format.h>

#include <system_error>

namespace lockstep {

std::string_view to_string(ErrorCode code) {
  switch (code) {
    case ErrorCode::kInvalidArgument: return "invalid argument";
    case ErrorCode::kInvalidRank: return "invalid rank";
    case ErrorCode::kInvalidWorldSize: return "invalid world size";
    case ErrorCode::kSelfSend: return "self send";
    case ErrorCode::kNoConnection: return "no connection";
    case ErrorCode::kSizeMismatch: return "size mismatch";
    case ErrorCode::kTimeout: return "timeout";
    case ErrorCode::kChannelClosed: return "channel closed";
    case ErrorCode::kIo: return "I/O error";
    case ErrorCode::kPeerLost: return "peer lost";
    case ErrorCode::kAborted: return "aborted";
    case ErrorCode::kCollectiveMismatch: return "collective mismatch";
    case ErrorCode::kNonFinite: return "non-finite value";
    case ErrorCode::kAuthentication: return "authentication failed";
    case ErrorCode::kVersionMismatch: return "version mismatch";
    case ErrorCode::kUnexpectedMessage: return "unexpected message";
    case ErrorCode::kMessageTooLarge: return "message too large";
    case ErrorCode::kStepMismatch: return "step mismatch";
    case ErrorCode::kBlockMismatch: return "block mismatch";
    case ErrorCode::kComponentMismatch: return "component mismatch";
    case ErrorCode::kReplicaMismatch: return "replica mismatch";
    case ErrorCode::kDevice: return "device error";
  }
  return "unknown error";
}

Error::Error(ErrorCode code, std::string message, int rank)
    : code_(code), rank_(rank), what_(fmt::format("{}: {}", to_string(code), message)) {}

std::string_view Error::message() const noexcept {
  return std::string_view(what_).substr(to_string(code_).size() + 2);
}

void throw_io(std::string_view operation, int error_number) {
  throw Error(ErrorCode::kIo,
              fmt::format("{}: {}", operation, std::generic_category().message(error_number)));
}

}  // namespace lockstep
