#include "lockstep/c/guard.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <iterator>

#include "lockstep/base/version.h"

namespace lockstep::c {
namespace {

struct LastError {
  int code = LOCKSTEP_OK;
  int rank = -1;
  std::string text;
};
thread_local LastError last_error;

struct CodePair {
  ErrorCode ours;
  int theirs;
};
constexpr CodePair kCodes[] = {
    {ErrorCode::kInvalidArgument, LOCKSTEP_INVALID_ARGUMENT},
    {ErrorCode::kInvalidRank, LOCKSTEP_INVALID_RANK},
    {ErrorCode::kInvalidWorldSize, LOCKSTEP_INVALID_WORLD_SIZE},
    {ErrorCode::kSelfSend, LOCKSTEP_SELF_SEND},
    {ErrorCode::kNoConnection, LOCKSTEP_NO_CONNECTION},
    {ErrorCode::kSizeMismatch, LOCKSTEP_SIZE_MISMATCH},
    {ErrorCode::kTimeout, LOCKSTEP_TIMEOUT},
    {ErrorCode::kChannelClosed, LOCKSTEP_CHANNEL_CLOSED},
    {ErrorCode::kIo, LOCKSTEP_IO},
    {ErrorCode::kPeerLost, LOCKSTEP_PEER_LOST},
    {ErrorCode::kAborted, LOCKSTEP_ABORTED},
    {ErrorCode::kCollectiveMismatch, LOCKSTEP_COLLECTIVE_MISMATCH},
    {ErrorCode::kNonFinite, LOCKSTEP_NON_FINITE},
    {ErrorCode::kAuthentication, LOCKSTEP_AUTHENTICATION},
    {ErrorCode::kVersionMismatch, LOCKSTEP_VERSION_MISMATCH},
    {ErrorCode::kUnexpectedMessage, LOCKSTEP_UNEXPECTED_MESSAGE},
    {ErrorCode::kMessageTooLarge, LOCKSTEP_MESSAGE_TOO_LARGE},
    {ErrorCode::kStepMismatch, LOCKSTEP_STEP_MISMATCH},
    {ErrorCode::kBlockMismatch, LOCKSTEP_BLOCK_MISMATCH},
    {ErrorCode::kComponentMismatch, LOCKSTEP_COMPONENT_MISMATCH},
    {ErrorCode::kReplicaMismatch, LOCKSTEP_REPLICA_MISMATCH},
    {ErrorCode::kDevice, LOCKSTEP_DEVICE},
};

}  // namespace

int code_of(ErrorCode code) {
  const auto* found = std::ranges::find(kCodes, code, &CodePair::ours);
  return found == std::end(kCodes) ? LOCKSTEP_INTERNAL : found->theirs;
}

ErrorCode error_code_of(int code) {
  const auto* found = std::ranges::find(kCodes, code, &CodePair::theirs);
  if (found == std::end(kCodes)) refuse(fmt::format("{} is no code of an error", code));
  return found->ours;
}

int remember(int code, int rank, const char* text) {
  last_error.code = code;
  last_error.rank = rank;
  last_error.text = text;
  return code;
}

void require(const void* pointer, const char* what) {
  if (pointer == nullptr) refuse(fmt::format("{} is null", what));
}

void refuse(const std::string& why) { throw Error(ErrorCode::kInvalidArgument, why); }

void copy_known(const void* given, std::size_t given_size, void* ours, std::size_t ours_size,
                const char* what) {
  if (given_size < sizeof(std::size_t) || ours_size < sizeof(std::size_t)) {
    refuse(fmt::format("{}: its size is not set", what));
  }
  std::memcpy(ours, given, std::min(given_size, ours_size));
}

void refuse_unknown(const void* given, std::size_t given_size, std::size_t ours_size,
                    const char* what) {
  const auto* bytes = static_cast<const unsigned char*>(given);
  for (std::size_t i = ours_size; i < given_size; ++i) {
    if (bytes[i] != 0) {
      refuse(fmt::format("{}: uses a field of a later version than {} of the interface", what,
                         LOCKSTEP_ABI_VERSION));
    }
  }
}

}  // namespace lockstep::c

uint32_t lockstep_abi_version(void) { return LOCKSTEP_ABI_VERSION; }

const char* lockstep_version(void) {
  static const std::string version(lockstep::version());
  return version.c_str();
}

const char* lockstep_code_name(int code) {
  if (code == LOCKSTEP_OK) return "ok";
  if (code == LOCKSTEP_NOT_YET) return "not yet";
  for (const auto& pair : lockstep::c::kCodes) {
    if (pair.theirs == code) return lockstep::to_string(pair.ours).data();  // of a literal
  }
  return code == LOCKSTEP_INTERNAL ? "internal error" : "unknown code";
}

void lockstep_last_error(lockstep_error* error) {
  if (error == nullptr || error->size < sizeof(std::size_t)) return;
  const auto& last = lockstep::c::last_error;
  const lockstep_error told{error->size, last.code, last.rank, last.text.c_str()};
  std::memcpy(error, &told, std::min(sizeof told, told.size));
}
