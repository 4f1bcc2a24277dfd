#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "lockstep/base/error.h"
#include "lockstep/data/tokenizer.h"

// Whatever is taken for a tokenizer.json encodes what follows it: to ids below its vocabulary, and,
// in pieces, to the same ids. The input is the file, a zero byte, and a text.
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace lockstep;
  const std::string_view input(reinterpret_cast<const char*>(data), size);
  const std::size_t zero = std::min(input.find('\0'), input.size());
  const std::string_view text = input.substr(std::min(zero + 1, input.size()));
  std::unique_ptr<Tokenizer> tokenizer;
  try {
    tokenizer = bpe_tokenizer(std::string(input.substr(0, zero)), "", "fuzz");
  } catch (const Error& error) {
    if (error.code() != ErrorCode::kIo) std::abort();
    return 0;
  }
  std::vector<std::int32_t> whole, pieces;
  tokenizer->encode(text, whole);
  for (const std::int32_t token : whole) {
    if (token < 0 || static_cast<std::uint32_t>(token) >= tokenizer->vocab()) std::abort();
  }
  tokenizer->decode(whole);
  for (std::size_t done = 0; done < text.size();) {
    const std::size_t end = tokenizer->piece_end(text.substr(done), 1);
    if (end == 0 || end > text.size() - done) std::abort();
    tokenizer->encode(text.substr(done, end), pieces);
    done += end;
  }
  if (pieces != whole) std::abort();
  return 0;
}
