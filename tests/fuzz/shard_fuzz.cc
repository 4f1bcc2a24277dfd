#include <algorithm>
#include <cstdlib>
#include <span>
#include <variant>

#include "lockstep/data/token_shard.h"

// Whatever is taken for a shard can be read from its first token to its last, and the header of
// ours encodes to the same bytes.
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace lockstep;
  const auto file = std::as_bytes(std::span(data, size));
  const auto parsed = parse_shard(file, file.size(), true);
  const auto* content = std::get_if<ShardContent>(&parsed);
  if (content == nullptr) return 0;
  if (content->offset + content->header.tokens * content->header.token_bytes != size) std::abort();
  if (content->format == ShardFormat::kLockstep) {
    const ShardHeaderBytes header = encode(content->header);
    if (!std::equal(header.begin(), header.end(), file.begin())) std::abort();
  }
  return 0;
}
