#include "lockstep/data/source.h"

#include <fmt/format.h>

#include <algorithm>
#include <cctype>
#include <filesystem>

#include "lockstep/base/error.h"
#include "lockstep/data/shard_builder.h"
#include "lockstep/files/mapped_file.h"

namespace lockstep {
namespace {

constexpr std::uint32_t kDefaultPieces = 4096;

[[noreturn]] void refuse(const std::string& message) {
  throw Error(ErrorCode::kInvalidArgument, message);
}

std::string file_contents(const std::string& path) {
  const MappedFile file(path);
  return {reinterpret_cast<const char*>(file.bytes().data()), file.bytes().size()};
}

bool is_shard(const MappedFile& file) {
  return file.path().ends_with(".bin") || has_shard_magic(file.bytes());
}

TokenShard encode_text(const std::string& name, std::span<const std::string_view> documents,
                       const Tokenizer& tokenizer, double entropy_per_byte) {
  ShardHeader header = shard_header_for(tokenizer);
  header.entropy_per_byte = entropy_per_byte;
  const auto end = tokenizer.end_of_document();
  for (const std::string_view text : documents) header.text_bytes += text.size() + (end ? 1 : 0);
  if (tokenizer.kind() == TokenizerKind::kBytes) {  // tokens as they are, a quarter of the memory
    std::vector<std::uint8_t> tokens;
    tokens.reserve(header.text_bytes);
    for (const std::string_view text : documents) {
      tokens.insert(tokens.end(), text.begin(), text.end());
      tokens.push_back(0);
    }
    return TokenShard::of(name, std::move(tokens), header);
  }
  std::vector<std::int32_t> tokens;
  for (const std::string_view text : documents) {
    tokenizer.encode(text, tokens);
    if (end) tokens.push_back(*end);
  }
  return TokenShard::of(name, tokens, header);
}

DataSource open_texts(const std::vector<MappedFile>& files, const TokenizerChoice& tokenizer) {
  std::vector<std::string_view> texts;
  for (const MappedFile& file : files) texts.push_back(text_of(file));
  DataSource source;
  source.tokenizer = make_tokenizer(tokenizer, texts);
  for (std::size_t i = 0; i < files.size(); ++i) {
    source.training.push_back(
        encode_text(files[i].path(), std::span(texts).subspan(i, 1), *source.tokenizer, 0));
  }
  return source;
}

// The tokenizer that the shards were made with: in their folder, unless another place is given.
std::shared_ptr<const Tokenizer> tokenizer_of(const TokenShard& shard,
                                              const TokenizerChoice& choice) {
  switch (shard.header().tokenizer) {
    case TokenizerKind::kUnknown: return nullptr;
    case TokenizerKind::kBytes: return byte_tokenizer();
    case TokenizerKind::kSentencePiece: break;
  }
  const std::string path =
      choice.name.empty() || choice.name == "sentencepiece"
          ? std::filesystem::path(shard.name()).replace_filename(kTokenizerFile).string()
          : choice.name;
  std::shared_ptr<const Tokenizer> tokenizer = sentencepiece_tokenizer(file_contents(path), path);
  if (shard_header_for(*tokenizer).tokenizer_model != shard.header().tokenizer_model) {
    throw_bad_file(path, fmt::format("not the tokenizer that {} was made with", shard.name()));
  }
  return tokenizer;
}

void require_alike(const TokenShard& a, const TokenShard& b) {
  const ShardHeader& x = a.header();
  const ShardHeader& y = b.header();
  if (x.vocab != y.vocab || x.tokenizer != y.tokenizer || x.tokenizer_model != y.tokenizer_model) {
    refuse(fmt::format("{} and {} were made with different tokenizers", a.name(), b.name()));
  }
}

DataSource open_shards(const std::vector<std::string>& paths, const TokenizerChoice& choice) {
  DataSource source;
  for (const std::string& path : paths) {
    TokenShard shard = TokenShard::open(path);
    (is_for_validation(path) ? source.validation : source.training).push_back(std::move(shard));
  }
  if (source.training.empty()) std::swap(source.training, source.validation);
  const TokenShard& first = source.training[0];
  for (const auto* shards : {&source.training, &source.validation}) {
    for (const TokenShard& shard : *shards) require_alike(first, shard);
  }
  source.tokenizer = tokenizer_of(first, choice);
  source.vocab = std::max(first.header().vocab, choice.vocab);
  if (source.vocab == 0) {  // nanoGPT's shards do not say
    for (const auto* shards : {&source.training, &source.validation}) {
      for (const TokenShard& shard : *shards) {
        source.vocab = std::max(source.vocab, shard.largest() + 1);
      }
    }
  }
  return source;
}

// What follows from the shards and the tokenizer.
DataSource completed(DataSource source) {
  if (source.tokenizer) source.vocab = std::max(source.vocab, source.tokenizer->vocab());
  std::uint64_t tokens = 0;
  std::uint64_t bytes = 0;
  for (const TokenShard& shard : source.training) {
    tokens += shard.size();
    bytes += shard.header().text_bytes;
  }
  if (tokens > 0) source.bytes_per_token = static_cast<double>(bytes) / static_cast<double>(tokens);
  source.entropy_per_byte = source.training[0].header().entropy_per_byte;
  return source;
}

}  // namespace

std::shared_ptr<const Tokenizer> make_tokenizer(const TokenizerChoice& choice,
                                                std::span<const std::string_view> texts) {
  if (choice.name.empty() || choice.name == "bytes") return byte_tokenizer();
  if (choice.name == "sentencepiece") {
    const std::uint32_t pieces = choice.vocab == 0 ? kDefaultPieces : choice.vocab;
    return sentencepiece_tokenizer(train_sentencepiece(texts, pieces),
                                   "the model trained on the text");
  }
  return sentencepiece_tokenizer(file_contents(choice.name), choice.name);
}

bool is_for_validation(const std::string& path) {
  const std::string stem = std::filesystem::path(path).stem();
  const auto is_letter = [&](std::size_t i) {
    return i < stem.size() && std::isalpha(static_cast<unsigned char>(stem[i])) != 0;
  };
  for (const std::string_view word : {"val", "valid", "validation"}) {
    for (auto at = stem.find(word); at != std::string::npos; at = stem.find(word, at + 1)) {
      if ((at == 0 || !is_letter(at - 1)) && !is_letter(at + word.size())) return true;
    }
  }
  return false;
}

DataSource encode_documents(const Documents& documents, const TokenizerChoice& tokenizer) {
  const std::vector<std::string_view> texts(documents.texts.begin(), documents.texts.end());
  DataSource source;
  source.name = documents.name;
  source.tokenizer = make_tokenizer(tokenizer, texts);
  source.training.push_back(
      encode_text(documents.name, texts, *source.tokenizer, documents.entropy_per_byte));
  return completed(std::move(source));
}

DataSource open_data(const std::vector<std::string>& paths, const TokenizerChoice& tokenizer) {
  if (paths.empty()) refuse("there is no data: no path is given");
  std::vector<std::string> shard_paths;
  std::vector<MappedFile> texts;
  for (const std::string& path : paths) {
    if (std::filesystem::is_directory(path)) {
      const auto inside = shards_in(path);
      if (inside.empty()) throw_bad_file(path, "no .bin files in this folder");
      shard_paths.insert(shard_paths.end(), inside.begin(), inside.end());
      continue;
    }
    MappedFile file(path);
    if (is_shard(file)) {
      shard_paths.push_back(path);
    } else {
      texts.push_back(std::move(file));
    }
  }
  if (!shard_paths.empty() && !texts.empty()) {
    refuse(fmt::format("{} is text and {} is not: train on one kind", texts[0].path(),
                       shard_paths[0]));
  }
  DataSource source =
      texts.empty() ? open_shards(shard_paths, tokenizer) : open_texts(texts, tokenizer);
  source.name =
      paths.size() == 1 ? paths[0] : fmt::format("{} and {} more", paths[0], paths.size() - 1);
  return completed(std::move(source));
}

}  // namespace lockstep
