#include "lockstep/data/token_shard.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>

#include "lockstep/base/check.h"
#include "lockstep/base/hash/crc32c.h"
#include "lockstep/files/mapped_file.h"
#include "lockstep/wire/bytes.h"

namespace lockstep {
namespace {

constexpr std::array<char, 8> kMagic = {'L', 'O', 'C', 'K', 'T', 'O', 'K', 'S'};
constexpr std::uint32_t kVersion = 2;
constexpr std::uint32_t kVersionWithoutHash = 1;
constexpr std::size_t kReservedOffset = 80;  // the hash of the tokens stands here since version 2
constexpr std::size_t kChecksumOffset = kShardHeaderBytes - 4;

// llm.c: 256 int32, of which magic number, version and count are used; GPT-2 and Llama 3 tokens.
constexpr std::size_t kLlmCHeaderBytes = 1024;
constexpr std::uint32_t kLlmCGpt2 = 20240520;
constexpr std::uint32_t kLlmCLlama3 = 20240801;
constexpr std::uint32_t kGpt2Vocab = 50257;
constexpr std::uint32_t kLlama3Vocab = 128256;

bool begins_with_magic(std::span<const std::byte> file) {
  return file.size() >= kMagic.size() &&
         std::memcmp(file.data(), kMagic.data(), kMagic.size()) == 0;
}

bool begins_as_llm_c(std::span<const std::byte> file) {
  if (file.size() < 4) return false;
  const auto magic = load_little_endian<std::uint32_t>(file.data());
  return magic == kLlmCGpt2 || magic == kLlmCLlama3;
}

ShardProblem wrong(std::size_t position, std::string what) { return {position, std::move(what)}; }

// The tokens must be exactly the rest of the file.
std::variant<ShardContent, ShardProblem> with_tokens(const ShardContent& content,
                                                     std::uint64_t file_bytes) {
  if (file_bytes < content.offset) return wrong(file_bytes, "the file ends inside its header");
  const std::uint64_t there = file_bytes - content.offset;
  const std::uint64_t width = content.header.token_bytes;
  if (content.header.tokens > there / width) {
    return wrong(file_bytes,
                 fmt::format("the file ends after {} of the {} tokens that its header names",
                             there / width, content.header.tokens));
  }
  if (content.header.tokens * width != there) {
    return wrong(content.offset + content.header.tokens * width,
                 fmt::format("{} bytes beyond the {} tokens that the header names",
                             there - content.header.tokens * width, content.header.tokens));
  }
  return content;
}

std::variant<ShardContent, ShardProblem> parse_ours(std::span<const std::byte> file,
                                                    std::uint64_t file_bytes) {
  if (file.size() < kShardHeaderBytes) {
    return wrong(file.size(),
                 fmt::format("the file ends inside its header of {} bytes", kShardHeaderBytes));
  }
  ByteReader reader(file.first(kShardHeaderBytes));
  reader.bytes(kMagic.size());
  const std::uint32_t version = reader.u32();
  if (version != kVersion && version != kVersionWithoutHash) {
    return wrong(8, fmt::format("shard version {}, this program reads {} and {}", version,
                                kVersionWithoutHash, kVersion));
  }
  if (crc32c(file.first(kChecksumOffset)) !=
      load_little_endian<std::uint32_t>(file.data() + kChecksumOffset)) {
    return wrong(kChecksumOffset, "the header's checksum is wrong");
  }
  ShardContent content{ShardFormat::kLockstep, {}, kShardHeaderBytes};
  ShardHeader& header = content.header;
  header.token_bytes = reader.u32();
  header.vocab = reader.u32();
  const std::uint32_t tokenizer = reader.u32();
  header.tokens = reader.u64();
  header.text_bytes = reader.u64();
  header.entropy_per_byte = reader.f64();
  std::ranges::copy(reader.bytes(header.tokenizer_model.size()), header.tokenizer_model.begin());
  if (header.token_bytes != 2 && header.token_bytes != 4) {
    return wrong(12, fmt::format("{} bytes per token; there are 2 or 4", header.token_bytes));
  }
  if (header.vocab == 0 || header.vocab > kMostVocab) {
    return wrong(16, fmt::format("a vocabulary of {}", header.vocab));
  }
  if (tokenizer > static_cast<std::uint32_t>(TokenizerKind::kBpe)) {
    return wrong(20, fmt::format("tokenizer {} is not known", tokenizer));
  }
  if (!std::isfinite(header.entropy_per_byte) || header.entropy_per_byte < 0) {
    return wrong(40, "the entropy is not a number of bits");
  }
  header.tokenizer = static_cast<TokenizerKind>(tokenizer);
  std::size_t reserved_offset = kReservedOffset;
  if (version != kVersionWithoutHash) {
    header.payload.emplace();
    std::ranges::copy(reader.bytes(header.payload->size()), header.payload->begin());
    reserved_offset += header.payload->size();
  }
  const auto reserved = reader.bytes(kChecksumOffset - reserved_offset);
  if (!std::ranges::all_of(reserved, [](std::byte b) { return b == std::byte{0}; })) {
    return wrong(reserved_offset, "reserved bytes are not zero");
  }
  return with_tokens(content, file_bytes);
}

std::variant<ShardContent, ShardProblem> parse_llm_c(std::span<const std::byte> file,
                                                     std::uint64_t file_bytes) {
  if (file.size() < kLlmCHeaderBytes) {
    return wrong(file.size(), fmt::format("the file ends inside its header of {} bytes (llm.c)",
                                          kLlmCHeaderBytes));
  }
  ByteReader reader(file);
  const bool gpt2 = reader.u32() == kLlmCGpt2;
  const std::uint32_t version = reader.u32();
  if (version != (gpt2 ? 1u : 7u))
    return wrong(4, fmt::format("llm.c data version {} is not known", version));
  ShardContent content{ShardFormat::kLlmC, {}, kLlmCHeaderBytes};
  content.header.token_bytes = gpt2 ? 2 : 4;
  content.header.vocab = gpt2 ? kGpt2Vocab : kLlama3Vocab;
  content.header.tokens = reader.u32();
  return with_tokens(content, file_bytes);
}

std::variant<ShardContent, ShardProblem> parse_headerless(std::uint64_t file_bytes) {
  if (file_bytes % 2 != 0)
    return wrong(file_bytes, "an odd number of bytes cannot be uint16 tokens");
  ShardContent content{ShardFormat::kNanoGpt, {}, 0};
  content.header.tokens = file_bytes / 2;
  return content;
}

// Of a token in a shard of ours.
std::uint32_t width_of(std::uint32_t vocab) { return vocab > 0 && vocab <= 65536 ? 2 : 4; }

// As they stand in a shard.
template <typename T>
void encode_tokens(std::span<const T> tokens, std::size_t width, std::vector<std::byte>& bytes) {
  bytes.resize(tokens.size() * width);
  for (std::size_t i = 0; i < tokens.size(); ++i) {
    std::byte* to = bytes.data() + i * width;
    if (width == 2) {
      store_little_endian(to, static_cast<std::uint16_t>(tokens[i]));
    } else {
      store_little_endian(to, static_cast<std::uint32_t>(tokens[i]));
    }
  }
}

constexpr std::size_t kTokensAtOnce = 1 << 16;
constexpr std::size_t kOnStack = 16 << 10;  // bytes: a sample of a common length needs no heap

}  // namespace

ShardHeaderBytes encode(const ShardHeader& header) {
  ByteWriter writer;
  writer.bytes(std::as_bytes(std::span(kMagic)));
  writer.u32(header.payload ? kVersion : kVersionWithoutHash);
  writer.u32(header.token_bytes);
  writer.u32(header.vocab);
  writer.u32(static_cast<std::uint32_t>(header.tokenizer));
  writer.u64(header.tokens);
  writer.u64(header.text_bytes);
  writer.f64(header.entropy_per_byte);
  writer.bytes(header.tokenizer_model);
  if (header.payload) writer.bytes(*header.payload);
  ShardHeaderBytes bytes{};
  std::ranges::copy(writer.written(), bytes.begin());
  store_little_endian(bytes.data() + kChecksumOffset,
                      crc32c(std::span(bytes).first(kChecksumOffset)));
  return bytes;
}

bool has_shard_magic(std::span<const std::byte> begin) {
  return begins_with_magic(begin) || begins_as_llm_c(begin);
}

std::variant<ShardContent, ShardProblem> parse_shard(std::span<const std::byte> begin,
                                                     std::uint64_t file_bytes, bool headerless) {
  if (begin.empty()) return wrong(0, "the file is empty");
  if (begins_with_magic(begin)) return parse_ours(begin, file_bytes);
  if (begins_as_llm_c(begin)) return parse_llm_c(begin, file_bytes);
  if (headerless) return parse_headerless(file_bytes);
  return wrong(0, "not a token shard");
}

TokenShard TokenShard::open(const std::string& path, Storage& storage) {
  std::shared_ptr<const File> file = storage.open(path);
  const std::string begin = file->text(kLongestShardHeader);
  const FileStatus status = file->status();
  if (!status.regular) throw_bad_file(path, "not a regular file");
  const auto parsed = parse_shard(std::as_bytes(std::span(begin)), status.size, true);
  if (const auto* problem = std::get_if<ShardProblem>(&parsed)) {
    throw_bad_file(path, problem->position, problem->what);
  }
  const auto& content = std::get<ShardContent>(parsed);
  TokenShard shard;
  shard.name_ = path;
  shard.format_ = content.format;
  shard.header_ = content.header;
  shard.width_ = content.header.token_bytes;
  shard.offset_ = content.offset;
  shard.file_ = file;
  shard.payload_ = std::make_shared<PayloadHash>(storage, std::move(file), status, content.offset,
                                                 content.header.payload);
  return shard;
}

TokenShard TokenShard::of(std::string name, std::vector<std::uint8_t> tokens, ShardHeader header) {
  return in_memory(std::move(name), std::move(tokens), header);
}

TokenShard TokenShard::of(std::string name, const std::vector<std::int32_t>& tokens,
                          ShardHeader header) {
  return in_memory(std::move(name), tokens, header);
}

template <typename T>
TokenShard TokenShard::in_memory(std::string name, std::vector<T> tokens, ShardHeader header) {
  auto memory = std::make_shared<const std::vector<T>>(std::move(tokens));
  TokenShard shard;
  shard.name_ = std::move(name);
  shard.header_ = header;
  shard.header_.tokens = memory->size();
  shard.tokens_ = std::as_bytes(std::span(*memory));
  shard.width_ = sizeof(T);
  Blake3 hash;
  std::vector<std::byte> bytes;
  for (auto rest = std::span(*memory); !rest.empty();) {
    const auto part = rest.first(std::min(rest.size(), kTokensAtOnce));
    encode_tokens(part, width_of(header.vocab), bytes);
    hash.update(bytes);
    rest = rest.subspan(part.size());
  }
  shard.payload_ = std::make_shared<PayloadHash>(hash.finish());
  shard.memory_ = std::move(memory);
  return shard;
}

// Calls body(bytes) with the tokens [first, first + count) as they lie.
template <typename Body>
void TokenShard::with_tokens(std::uint64_t first, std::size_t count, Body&& body) const {
  LOCKSTEP_CHECK(first <= size() && count <= size() - first);
  if (!file_) return body(tokens_.data() + first * width_);
  std::array<std::byte, kOnStack> few;
  std::vector<std::byte> many;
  std::span<std::byte> bytes(few);
  if (count * width_ > few.size()) {
    many.resize(count * width_);
    bytes = many;
  }
  file_->read(offset_ + first * width_, bytes.first(count * width_));
  body(bytes.data());
}

// Decodes tokens; `first` is where they are in the shard.
void TokenShard::decode(const std::byte* from, std::uint64_t first, std::uint32_t vocab,
                        std::span<std::int32_t> out) const {
  std::uint32_t largest_seen = 0;
  const auto convert = [&]<typename T>(T) {
    for (std::size_t i = 0; i < out.size(); ++i) {
      const std::uint32_t token = load_little_endian<T>(from + i * sizeof(T));
      largest_seen = std::max(largest_seen, token);
      out[i] = static_cast<std::int32_t>(token);
    }
  };
  switch (width_) {
    case 1: convert(std::uint8_t{}); break;
    case 2: convert(std::uint16_t{}); break;
    default: convert(std::uint32_t{}); break;
  }
  if (largest_seen < vocab) return;
  const auto bad = std::ranges::find_if(
      out, [&](std::int32_t t) { return static_cast<std::uint32_t>(t) >= vocab; });
  const std::uint64_t place = first + static_cast<std::uint64_t>(bad - out.begin());
  throw_bad_file(name_, offset_ + place * width_,
                 fmt::format("token {} has id {}, but the vocabulary has {}", place,
                             static_cast<std::uint32_t>(*bad), vocab));
}

void TokenShard::copy(std::uint64_t first, std::uint32_t vocab, std::span<std::int32_t> out) const {
  with_tokens(first, out.size(), [&](const std::byte* bytes) { decode(bytes, first, vocab, out); });
}

void TokenShard::copy_sample(std::uint64_t first, std::uint32_t vocab,
                             std::span<std::int32_t> tokens,
                             std::span<std::int32_t> targets) const {
  LOCKSTEP_CHECK(tokens.size() == targets.size() && !tokens.empty());
  const std::size_t count = tokens.size();
  with_tokens(first, count + 1, [&](const std::byte* bytes) {
    decode(bytes, first, vocab, tokens);
    std::ranges::copy(tokens.subspan(1), targets.begin());
    decode(bytes + count * width_, first + count, vocab, targets.last(1));
  });
}

std::uint32_t TokenShard::largest(std::uint32_t vocab) const {
  std::uint32_t most = 0;
  std::vector<std::int32_t> piece(1 << 16);
  for (std::uint64_t first = 0; first < size(); first += piece.size()) {
    const auto count = std::min<std::uint64_t>(piece.size(), size() - first);
    const auto part = std::span(piece).first(count);
    copy(first, vocab, part);
    for (const std::int32_t token : part) most = std::max(most, static_cast<std::uint32_t>(token));
  }
  return most;
}

ShardWriter::ShardWriter(std::string path, ShardHeader header)
    : file_(std::move(path)), header_(header) {
  header_.token_bytes = width_of(header.vocab);
  header_.tokens = 0;
  file_.write(ShardHeaderBytes{});
}

void ShardWriter::write(std::span<const std::int32_t> tokens) {
  encode_tokens(tokens, header_.token_bytes, buffer_);
  file_.write(buffer_);
  payload_.update(buffer_);
  header_.tokens += tokens.size();
}

ShardHeader ShardWriter::commit(std::uint64_t text_bytes) {
  header_.text_bytes = text_bytes;
  header_.payload = payload_.finish();
  file_.write_at(0, encode(header_));
  file_.commit();
  return header_;
}

}  // namespace lockstep
