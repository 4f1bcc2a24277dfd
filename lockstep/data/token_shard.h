#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <variant>
#include <vector>

#include "lockstep/base/hash/blake3.h"
#include "lockstep/files/atomic_file.h"

namespace lockstep {

// Token shards: ours (docs/data_format.md), llm.c's and nanoGPT's.

enum class ShardFormat { kLockstep, kLlmC, kNanoGpt };

enum class TokenizerKind : std::uint32_t { kUnknown = 0, kBytes = 1, kSentencePiece = 2, kBpe = 3 };

constexpr std::uint32_t kMostVocab = 1u << 30;  // so that a token fits an int32

struct ShardHeader {
  std::uint32_t token_bytes = 2;  // 2 or 4
  std::uint32_t vocab = 0;        // 0: not known
  TokenizerKind tokenizer = TokenizerKind::kUnknown;
  std::uint64_t tokens = 0;
  std::uint64_t text_bytes =
      0;  // of the text they stand for, ends of documents included; 0: not known
  double entropy_per_byte = 0;      // of the source, in bits, where it is known; 0: not known
  Blake3Hash tokenizer_model = {};  // of the tokenizer's file; zero for bytes
  bool operator==(const ShardHeader&) const = default;
};

constexpr std::size_t kShardHeaderBytes = 128;
using ShardHeaderBytes = std::array<std::byte, kShardHeaderBytes>;
ShardHeaderBytes encode(const ShardHeader& header);

// What a shard's bytes say, or what is wrong with them and where. `headerless`: whether bytes that
// begin with nobody's magic number are nanoGPT's uint16, or nothing we know.
struct ShardContent {
  ShardFormat format = ShardFormat::kLockstep;
  ShardHeader header;
  std::size_t offset = 0;  // of the first token
};
struct ShardProblem {
  std::size_t position = 0;
  std::string what;
};
std::variant<ShardContent, ShardProblem> parse_shard(std::span<const std::byte> file,
                                                     bool headerless);
// Whether the file begins with the magic number of a format that has one.
bool has_shard_magic(std::span<const std::byte> file);

// A run of tokens in memory or mapped from a file. Cheap to copy; any thread may read.
class TokenShard {
 public:
  // Maps a file. Throws Error{kIo} that names it and the position of what is wrong.
  static TokenShard open(const std::string& path);
  // Tokens that were never in a file. `name` appears in errors.
  static TokenShard of(std::string name, std::vector<std::uint8_t> tokens, ShardHeader header);
  static TokenShard of(std::string name, const std::vector<std::int32_t>& tokens,
                       ShardHeader header);

  const std::string& name() const { return name_; }
  ShardFormat format() const { return format_; }
  const ShardHeader& header() const { return header_; }
  std::uint64_t size() const { return header_.tokens; }

  // Copies tokens [first, first + out.size()). One that is not below `vocab` throws Error{kIo}
  // with the file and the place.
  void copy(std::uint64_t first, std::uint32_t vocab, std::span<std::int32_t> out) const;

  // The largest token; reads all of them, and throws as copy() does.
  std::uint32_t largest(std::uint32_t vocab = kMostVocab) const;

 private:
  TokenShard() = default;

  std::string name_;
  ShardFormat format_ = ShardFormat::kLockstep;
  ShardHeader header_;
  std::span<const std::byte> tokens_;
  std::size_t width_ = 2;   // bytes per token as they lie in memory
  std::size_t offset_ = 0;  // of the file's first token
  std::shared_ptr<const void> memory_;
};

// Writes a shard of ours, atomically. The header's tokens are counted here.
class ShardWriter {
 public:
  ShardWriter(std::string path, ShardHeader header);
  void write(std::span<const std::int32_t> tokens);
  // Returns the header as written.
  ShardHeader commit(std::uint64_t text_bytes);

 private:
  AtomicFile file_;
  ShardHeader header_;
  std::vector<std::byte> buffer_;
};

}  // namespace lockstep
