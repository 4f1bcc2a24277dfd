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
constexpr std::uint32_t kVersion = 1;
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
                                                     std::span<const std::byte> file) {
  const std::uint64_t there = file.size() - content.offset;
  const std::uint64_t width = content.header.token_bytes;
  if (content.header.tokens > there / width) {
    return wrong(file.size(),
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

std::variant<ShardContent, ShardProblem> parse_ours(std::span<const std::byte> file) {
  if (file.size() < kShardHeaderBytes) {
    return wrong(file.size(),
                 fmt::format("the file ends inside its header of {} bytes", kShardHeaderBytes));
  }
  ByteReader reader(file.first(kShardHeaderBytes));
  reader.bytes(kMagic.size());
  if (const std::uint32_t version = reader.u32(); version != kVersion) {
    return wrong(8, fmt::format("shard version {}, this program reads {}", version, kVersion));
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
  const auto reserved = reader.bytes(kChecksumOffset - 80);
  if (!std::ranges::all_of(reserved, [](std::byte b) { return b == std::byte{0}; })) {
    return wrong(80, "reserved bytes are not zero");
  }
  return with_tokens(content, file);
}

std::variant<ShardContent, ShardProblem> parse_llm_c(std::span<const std::byte> file) {
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
  return with_tokens(content, file);
}

std::variant<ShardContent, ShardProblem> parse_headerless(std::span<const std::byte> file) {
  if (file.size() % 2 != 0)
    return wrong(file.size(), "an odd number of bytes cannot be uint16 tokens");
  ShardContent content{ShardFormat::kNanoGpt, {}, 0};
  content.header.tokens = file.size() / 2;
  return content;
}

}  // namespace

ShardHeaderBytes encode(const ShardHeader& header) {
  ByteWriter writer;
  writer.bytes(std::as_bytes(std::span(kMagic)));
  writer.u32(kVersion);
  writer.u32(header.token_bytes);
  writer.u32(header.vocab);
  writer.u32(static_cast<std::uint32_t>(header.tokenizer));
  writer.u64(header.tokens);
  writer.u64(header.text_bytes);
  writer.f64(header.entropy_per_byte);
  writer.bytes(header.tokenizer_model);
  ShardHeaderBytes bytes{};
  std::ranges::copy(writer.written(), bytes.begin());
  store_little_endian(bytes.data() + kChecksumOffset,
                      crc32c(std::span(bytes).first(kChecksumOffset)));
  return bytes;
}

bool has_shard_magic(std::span<const std::byte> file) {
  return begins_with_magic(file) || begins_as_llm_c(file);
}

std::variant<ShardContent, ShardProblem> parse_shard(std::span<const std::byte> file,
                                                     bool headerless) {
  if (file.empty()) return wrong(0, "the file is empty");
  if (begins_with_magic(file)) return parse_ours(file);
  if (begins_as_llm_c(file)) return parse_llm_c(file);
  if (headerless) return parse_headerless(file);
  return wrong(0, "not a token shard");
}

TokenShard TokenShard::open(const std::string& path) {
  auto file = std::make_shared<MappedFile>(path);
  const auto parsed = parse_shard(file->bytes(), true);
  if (const auto* problem = std::get_if<ShardProblem>(&parsed)) {
    throw_bad_file(path, problem->position, problem->what);
  }
  const auto& content = std::get<ShardContent>(parsed);
  TokenShard shard;
  shard.name_ = path;
  shard.format_ = content.format;
  shard.header_ = content.header;
  shard.tokens_ = file->bytes().subspan(content.offset);
  shard.width_ = content.header.token_bytes;
  shard.offset_ = content.offset;
  shard.memory_ = std::move(file);
  return shard;
}

TokenShard TokenShard::of(std::string name, std::vector<std::uint8_t> tokens, ShardHeader header) {
  auto memory = std::make_shared<std::vector<std::uint8_t>>(std::move(tokens));
  TokenShard shard;
  shard.name_ = std::move(name);
  shard.header_ = header;
  shard.header_.tokens = memory->size();
  shard.tokens_ = std::as_bytes(std::span(*memory));
  shard.width_ = 1;
  shard.memory_ = std::move(memory);
  return shard;
}

TokenShard TokenShard::of(std::string name, const std::vector<std::int32_t>& tokens,
                          ShardHeader header) {
  auto memory = std::make_shared<std::vector<std::int32_t>>(tokens);
  TokenShard shard;
  shard.name_ = std::move(name);
  shard.header_ = header;
  shard.header_.tokens = memory->size();
  shard.tokens_ = std::as_bytes(std::span(*memory));
  shard.width_ = 4;
  shard.memory_ = std::move(memory);
  return shard;
}

void TokenShard::copy(std::uint64_t first, std::uint32_t vocab, std::span<std::int32_t> out) const {
  LOCKSTEP_CHECK(first <= size() && out.size() <= size() - first);
  const std::byte* from = tokens_.data() + first * width_;
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
  header_.token_bytes = header.vocab <= 65536 ? 2 : 4;
  header_.tokens = 0;
  file_.write(ShardHeaderBytes{});
}

void ShardWriter::write(std::span<const std::int32_t> tokens) {
  buffer_.resize(tokens.size() * header_.token_bytes);
  for (std::size_t i = 0; i < tokens.size(); ++i) {
    std::byte* to = buffer_.data() + i * header_.token_bytes;
    if (header_.token_bytes == 2) {
      store_little_endian(to, static_cast<std::uint16_t>(tokens[i]));
    } else {
      store_little_endian(to, static_cast<std::uint32_t>(tokens[i]));
    }
  }
  file_.write(buffer_);
  header_.tokens += tokens.size();
}

ShardHeader ShardWriter::commit(std::uint64_t text_bytes) {
  header_.text_bytes = text_bytes;
  file_.write_at(0, encode(header_));
  file_.commit();
  return header_;
}

}  // namespace lockstep
