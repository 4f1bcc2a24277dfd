// What compresses comes back; bytes that are no compressed form, or one that was changed, are
// decompressed to anything or refused, within their memory.
#include <algorithm>
#include <vector>

#include "lockstep/wire/compression.h"
#include "tests/fuzz/script.h"

using namespace lockstep;
using fuzz::require;

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  fuzz::Script script(data, size);
  const bool anything = script.byte() % 2 == 0;
  std::vector<std::byte> plain(script.number(2) % (kMostCompressed + 1));
  Decompressor decompressor;
  if (anything) {
    (void)decompressor.decompress(script.bytes(size), plain);
    return 0;
  }
  // The places and values of changes, then the plain bytes again and again.
  std::vector<std::pair<std::size_t, std::byte>> changes(script.byte() % 8);
  for (auto& [at, mask] : changes) {
    at = script.number(2);
    mask = static_cast<std::byte>(script.byte());
  }
  const std::vector<std::byte> period = script.bytes(size);
  for (std::size_t i = 0; i < plain.size() && !period.empty(); ++i) {
    plain[i] = period[i % period.size()];
  }
  Compressor compressor;
  const auto span = compressor.compress(plain);
  if (span.empty()) return 0;
  std::vector<std::byte> compressed(span.begin(), span.end());
  require(compressed.size() < plain.size());
  std::vector<std::byte> again(plain.size());
  require(decompressor.decompress(compressed, again) && again == plain);
  for (const auto& [at, mask] : changes) compressed[at % compressed.size()] ^= mask;
  (void)decompressor.decompress(compressed, again);
  return 0;
}
