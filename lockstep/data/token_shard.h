#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <variant>
#include <vector>

#include "lockstep/base/hash/blake3.h"
#include "lockstep/data/payload_hash.h"
#include "lockstep/files/atomic_file.h"
#include "lockstep/files/storage.h"

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
  // Of the tokens as they stand in the file; nothing in shards that do not say.
  std::optional<Blake3Hash> payload = {};
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
// `begin` is the first bytes of a file of `file_bytes` bytes: all of them, or kLongestShardHeader.
std::variant<ShardContent, ShardProblem> parse_shard(std::span<const std::byte> begin,
                                                     std::uint64_t file_bytes, bool headerless);
constexpr std::size_t kLongestShardHeader = 1024;
// Whether the file begins with the magic number of a format that has one.
bool has_shard_magic(std::span<const std::byte> begin);

// A run of tokens in memory or in a file, from which it is read piece by piece. Cheap to copy; any
// thread may read.
class TokenShard {
 public:
  // Throws Error{kIo} that names the file and the position of what is wrong.
  static TokenShard open(const std::string& path, Storage& storage = disk());
  // Tokens that were never in a file. `name` appears in errors.
  static TokenShard of(std::string name, std::vector<std::uint8_t> tokens, ShardHeader header);
  static TokenShard of(std::string name, const std::vector<std::int32_t>& tokens,
                       ShardHeader header);

  const std::string& name() const { return name_; }
  ShardFormat format() const { return format_; }
  const ShardHeader& header() const { return header_; }
  std::uint64_t size() const { return header_.tokens; }

  // Copies tokens [first, first + out.size()). One that is not below `vocab`, or cannot be read,
  // throws Error{kIo} with the file and the place.
  void copy(std::uint64_t first, std::uint32_t vocab, std::span<std::int32_t> out) const;
  // The same for two spans of one size, `targets` one token later; reads the tokens once.
  void copy_sample(std::uint64_t first, std::uint32_t vocab, std::span<std::int32_t> tokens,
                   std::span<std::int32_t> targets) const;

  // The BLAKE3 of all tokens as a shard of ours has them: u16 when the vocabulary has at most
  // 65536, else u32. In a file it is that of the bytes there. See PayloadHash.
  const PayloadHash& payload() const { return *payload_; }

  // The largest token; reads all of them, and throws as copy() does.
  std::uint32_t largest(std::uint32_t vocab = kMostVocab) const;

 private:
  TokenShard() = default;

  template <typename T>
  static TokenShard in_memory(std::string name, std::vector<T> tokens, ShardHeader header);
  template <typename Body>
  void with_tokens(std::uint64_t first, std::size_t count, Body&& body) const;
  void decode(const std::byte* from, std::uint64_t first, std::uint32_t vocab,
              std::span<std::int32_t> out) const;

  std::string name_;
  ShardFormat format_ = ShardFormat::kLockstep;
  ShardHeader header_;
  std::size_t width_ = 2;             // bytes per token as they lie in memory, or in the file
  std::size_t offset_ = 0;            // of the file's first token
  std::shared_ptr<const File> file_;  // where the tokens are; none: in memory
  std::shared_ptr<const void> memory_;
  std::span<const std::byte> tokens_;  // in memory
  std::shared_ptr<PayloadHash> payload_;
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
  Blake3 payload_;
};

}  // namespace lockstep
