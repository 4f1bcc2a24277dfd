#pragma once

#include <chrono>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "lockstep/base/hash/blake3.h"
#include "lockstep/comm/communicator.h"
#include "lockstep/data/token_shard.h"
#include "lockstep/model/layout.h"

namespace lockstep {

// What workers compare with each other. All calls are collective. A difference throws the same
// error on every rank, which names the ranks.

// The texts of all ranks, by rank. They may differ in length, up to 16 MiB.
std::vector<std::string> gather_texts(Communicator& communicator, std::string_view own,
                                      const CallOptions& options = {});

// The hashes of all tokens of these shards: of a file that several ranks of a host see, one rank
// reads the tokens, unless their hash is known. Tells how far this rank is, now and then. Throws
// Error{kIo} on a rank that cannot read a shard, or finds it damaged.
void find_payload_hashes(Communicator& communicator, std::span<const TokenShard> shards);

// Reads the tokens of those shards whose hash is not known, and tells how far it is, now and then.
// Not collective: for a worker that comes later.
inline constexpr std::chrono::seconds kBetweenReadingNotes{5};
void hash_payloads(std::span<const TokenShard> shards,
                   std::chrono::seconds between_notes = kBetweenReadingNotes);

// A rank told something that makes no sense, as `what`: fails the job with an
// Error{kUnexpectedMessage} that names it.
[[noreturn]] void refuse_telling(Communicator& communicator, int rank, std::string_view what);

// What the ranks told, by rank, as `parse` understands it. It returns nothing for a text that makes
// no sense: that is refused.
template <typename Parse>
auto gather_parsed(Communicator& communicator, std::string_view own, std::string_view what,
                   const Parse& parse) {
  std::vector<typename std::invoke_result_t<Parse, const std::string&>::value_type> all;
  for (const std::string& text : gather_texts(communicator, own)) {
    auto parsed = parse(text);
    if (!parsed) refuse_telling(communicator, static_cast<int>(all.size()), what);
    all.push_back(std::move(*parsed));
  }
  return all;
}

struct Setting {
  std::string name;
  std::string value;
  // False: a difference is only a warning, because the bits of the result may depend on it.
  bool required = true;
};
// Throws Error{kInvalidArgument} when a required setting differs, or the lists have different
// names.
void compare_settings(Communicator& communicator, std::span<const Setting> own);

// Compares the weights of all ranks by the hashes of their tensors. Throws Error{kReplicaMismatch}
// that names the rank which differs from the majority (from rank 0 where there is none), and the
// first tensor that differs.
void compare_replicas(Communicator& communicator, const ParameterLayout& layout,
                      std::span<const Blake3Hash> tensors, std::int64_t step);

}  // namespace lockstep
