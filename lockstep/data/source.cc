#include "lockstep/data/source.h"

#include <fmt/format.h>
#include <glob.h>

#include <algorithm>
#include <cctype>
#include <filesystem>
#include <set>

#include "lockstep/base/error.h"
#include "lockstep/base/log.h"
#include "lockstep/data/payload_hash.h"
#include "lockstep/data/shard_builder.h"
#include "lockstep/files/mapped_file.h"
#include "lockstep/files/storage.h"

namespace lockstep {
namespace {

constexpr std::uint32_t kDefaultPieces = 4096;

[[noreturn]] void refuse(const std::string& message) {
  throw Error(ErrorCode::kInvalidArgument, message);
}

std::string file_contents(const std::string& path) {
  const auto file = disk().open(path);
  if (!file->status().regular) throw_bad_file(path, "not a regular file");
  return file->text(file->size());
}

bool is_shard(const std::string& path) {
  if (path.ends_with(".bin")) return true;
  const std::string begin = disk().open(path)->text(kLongestShardHeader);
  return has_shard_magic(std::as_bytes(std::span(begin)));
}

// Whether the name asks for a tokenizer that is trained on the text.
bool is_trained(const std::string& name) { return name == "sentencepiece" || name == "bpe"; }

// The tokenizer in a file, whose name says of which kind it is, or in a folder.
std::shared_ptr<const Tokenizer> open_tokenizer(const std::string& path) {
  namespace fs = std::filesystem;
  if (fs::is_directory(path)) {
    for (const char* name : {kBpeFile, kSentencePieceFile}) {
      if (fs::exists(fs::path(path) / name)) return open_tokenizer(fs::path(path) / name);
    }
    throw_bad_file(path,
                   fmt::format("neither {} nor {} in this folder", kBpeFile, kSentencePieceFile));
  }
  if (!path.ends_with(".json")) return sentencepiece_tokenizer(file_contents(path), path);
  const std::string config = fs::path(path).replace_filename(kBpeConfigFile);
  return bpe_tokenizer(file_contents(path), fs::exists(config) ? file_contents(config) : "", path);
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
    if (tokenizer.start_of_document()) tokens.push_back(*tokenizer.start_of_document());
    tokenizer.encode(text, tokens);
    if (end) tokens.push_back(*end);
  }
  return TokenShard::of(name, tokens, header);
}

std::string in_words(const Tokenizer& tokenizer) {
  if (tokenizer.kind() == TokenizerKind::kBytes) return "bytes";
  return fmt::format("one of {} pieces", tokenizer.vocab());
}

bool same_tokenizer(const Tokenizer& a, const Tokenizer& b) {
  return shard_header_for(a) == shard_header_for(b);
}

[[noreturn]] void refuse_other(const std::string& what, const ModelTokenizer& start) {
  refuse(
      fmt::format("{}, but {} was trained with another tokenizer ({}); --force-tokenizer trains "
                  "it on other tokens all the same",
                  what, start.model, in_words(*start.tokenizer)));
}

// Whether the tokenizer need not be that of the model. A run that goes on keeps its own.
bool forced(const TokenizerChoice& choice) { return choice.force && !choice.inherited->same_run; }

// The tokenizer for text: that of the model that training starts from, where there is one.
std::shared_ptr<const Tokenizer> tokenizer_for(const TokenizerChoice& choice,
                                               std::span<const std::string_view> texts) {
  if (!choice.inherited || forced(choice)) return make_tokenizer(choice, texts);
  const ModelTokenizer& start = *choice.inherited;
  if (!start.tokenizer) {
    if (!choice.name.empty()) return make_tokenizer(choice, texts);
    refuse(
        fmt::format("{} was trained on tokens made elsewhere and has no tokenizer: --tokenizer "
                    "says which one turns text into its tokens",
                    start.model));
  }
  if (choice.name.empty() || (start.same_run && is_trained(choice.name))) {
    return start.tokenizer;
  }
  const std::string what = fmt::format("--tokenizer {}", choice.name);
  if (is_trained(choice.name)) refuse_other(what + " trains a new one", start);
  const auto given = make_tokenizer(choice, texts);
  if (!same_tokenizer(*given, *start.tokenizer)) refuse_other(what, start);
  return start.tokenizer;
}

// A file, and the path of --data that it comes from.
struct Input {
  std::string path;
  std::size_t part = 0;
  std::shared_ptr<const MappedFile> text = {};  // none: a shard
};

// Whether each file is kept for validation: its name says so, and its part has others to train on.
std::vector<bool> kept_for_validation(std::span<const Input> inputs) {
  std::set<std::size_t> trains;
  for (const Input& input : inputs) {
    if (!is_for_validation(input.path)) trains.insert(input.part);
  }
  std::vector<bool> kept;
  for (const Input& input : inputs) {
    kept.push_back(is_for_validation(input.path) && trains.contains(input.part));
  }
  return kept;
}

DataSource open_texts(std::span<const Input> inputs, const TokenizerChoice& choice) {
  std::vector<const MappedFile*> training;
  std::vector<const MappedFile*> validation;
  const std::vector<bool> kept = kept_for_validation(inputs);
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    (kept[i] ? validation : training).push_back(inputs[i].text.get());
  }
  std::vector<std::string_view> texts;
  for (const MappedFile* file : training) texts.push_back(text_of(*file));
  DataSource source;
  source.tokenizer = tokenizer_for(choice, texts);
  for (const MappedFile* file : training) file->require_whole();
  const auto encode = [&](const MappedFile& file, std::string_view text) {
    TokenShard shard = encode_text(file.path(), std::span(&text, 1), *source.tokenizer, 0);
    file.require_whole();
    return shard;
  };
  for (std::size_t i = 0; i < training.size(); ++i) {
    source.training.push_back(encode(*training[i], texts[i]));
  }
  for (const MappedFile* file : validation) {
    source.validation.push_back(encode(*file, text_of(*file)));
  }
  return source;
}

// The tokenizer that the shards were made with: in their folder, unless another place is given.
std::shared_ptr<const Tokenizer> tokenizer_of(const TokenShard& shard,
                                              const TokenizerChoice& choice) {
  switch (shard.header().tokenizer) {
    case TokenizerKind::kUnknown:
      if (!choice.name.empty()) {
        refuse(
            fmt::format("--tokenizer {}: {} holds tokens already and does not say which "
                        "tokenizer made them",
                        choice.name, shard.name()));
      }
      return nullptr;
    case TokenizerKind::kBytes:
      if (!choice.name.empty() && choice.name != "bytes") {
        refuse(fmt::format("--tokenizer {}: the tokens of {} are bytes already", choice.name,
                           shard.name()));
      }
      return byte_tokenizer();
    case TokenizerKind::kSentencePiece:
    case TokenizerKind::kBpe: break;
  }
  const bool bpe = shard.header().tokenizer == TokenizerKind::kBpe;
  const char* const made_with = bpe ? "bpe" : "sentencepiece";
  if (choice.name == "bytes" || (is_trained(choice.name) && choice.name != made_with)) {
    refuse(fmt::format("--tokenizer {}: {} holds tokens of {} already", choice.name, shard.name(),
                       bpe ? "BPE" : "SentencePiece"));
  }
  const std::string path = choice.name.empty() || is_trained(choice.name)
                               ? std::filesystem::path(shard.name())
                                     .replace_filename(bpe ? kBpeFile : kSentencePieceFile)
                                     .string()
                               : choice.name;
  std::shared_ptr<const Tokenizer> tokenizer = open_tokenizer(path);
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

// Tokens for a model that has a tokenizer. Those of unknown origin may well be its own, where they
// do not say otherwise: the new model would have no text without it.
void inherit_tokenizer(const ModelTokenizer& start, const TokenShard& first, DataSource& source) {
  if (!source.tokenizer) {
    if (source.vocab != 0 && source.vocab != start.tokenizer->vocab()) {
      refuse_other(fmt::format("{} has a vocabulary of {}", first.name(), source.vocab), start);
    }
    source.tokenizer = start.tokenizer;
    if (start.same_run) return;
    source.notes.push_back(
        fmt::format("{} does not say which tokenizer made its tokens: they are taken for those of "
                    "{}; --force-tokenizer takes them for others",
                    first.name(), start.model));
  } else if (!same_tokenizer(*source.tokenizer, *start.tokenizer)) {
    refuse_other(fmt::format("the tokens of {} are {}", first.name(), in_words(*source.tokenizer)),
                 start);
  }
}

DataSource open_shards(std::span<const Input> inputs, const TokenizerChoice& choice) {
  DataSource source;
  const std::vector<bool> kept = kept_for_validation(inputs);
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    TokenShard shard = TokenShard::open(inputs[i].path);
    (kept[i] ? source.validation : source.training).push_back(std::move(shard));
  }
  const TokenShard& first = source.training[0];
  for (const auto* shards : {&source.training, &source.validation}) {
    for (const TokenShard& shard : *shards) require_alike(first, shard);
  }
  source.tokenizer = tokenizer_of(first, choice);
  source.vocab = first.header().vocab;
  if (choice.inherited && !forced(choice) && choice.inherited->tokenizer) {
    inherit_tokenizer(*choice.inherited, first, source);
  }
  if (source.vocab == 0) {
    if (choice.vocab == 0) refuse_without_header(first.name());
    source.vocab = choice.vocab;
  }
  if (choice.vocab != 0 && choice.vocab < source.vocab) {
    refuse(fmt::format("--vocab {}: {} has a vocabulary of {}", choice.vocab, first.name(),
                       source.vocab));
  }
  source.vocab = std::max(source.vocab, choice.vocab);
  return source;
}

// The text files of a folder, by name.
std::vector<std::string> texts_in(const std::string& folder) {
  std::vector<std::string> paths;
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator(folder, error)) {
    if (entry.path().extension() == ".txt") paths.push_back(entry.path());
  }
  if (error) throw_io("reading the folder " + folder, error.value());
  std::ranges::sort(paths);
  return paths;
}

// The paths that a path with wildcards stands for; itself where there are none.
std::vector<std::string> expand(const std::string& path) {
  if (std::filesystem::exists(path) || path.find_first_of("*?[") == std::string::npos) {
    return {path};
  }
  glob_t found{};
  std::vector<std::string> paths;
  if (::glob(path.c_str(), 0, nullptr, &found) == 0) {
    paths.assign(found.gl_pathv, found.gl_pathv + found.gl_pathc);
  }
  ::globfree(&found);
  if (paths.empty()) refuse(fmt::format("{}: there is no such file", path));
  return paths;
}

// What people should know of the files that a run was given.
std::vector<std::string> notes_of(const std::vector<std::string>& paths,
                                  std::span<const Input> inputs) {
  std::vector<std::string> notes;
  for (const std::string& path : paths) {
    if (!std::filesystem::is_directory(path) || shards_in(path).empty()) continue;
    const std::size_t texts = texts_in(path).size();
    if (texts == 0) continue;
    notes.push_back(fmt::format("{}: only its shards (.bin) are taken, not its {} .txt file{}",
                                path, texts, texts == 1 ? "" : "s"));
  }
  const std::vector<bool> kept = kept_for_validation(inputs);
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    if (kept[i] || !is_for_validation(inputs[i].path)) continue;
    notes.push_back(
        fmt::format("{} is trained on, though its name is one for validation: there is no other "
                    "file to train on",
                    inputs[i].path));
  }
  return notes;
}

double bytes_per_token(std::span<const TokenShard> shards) {
  std::uint64_t tokens = 0;
  std::uint64_t bytes = 0;
  for (const TokenShard& shard : shards) {
    tokens += shard.size();
    bytes += shard.header().text_bytes;
  }
  return tokens > 0 ? static_cast<double>(bytes) / static_cast<double>(tokens) : 0;
}

// What follows from the shards and the tokenizer.
DataSource completed(DataSource source) {
  if (source.tokenizer) source.vocab = std::max(source.vocab, source.tokenizer->vocab());
  const std::span<const TokenShard> shards = source.training;
  if (source.mix.empty()) {
    source.bytes_per_token = bytes_per_token(shards);
    source.entropy_per_byte = shards[0].header().entropy_per_byte;
    return source;
  }
  double weights = 0;
  std::size_t first = 0;
  for (const DataSource::Part& part : source.mix) {
    source.bytes_per_token += part.weight * bytes_per_token(shards.subspan(first, part.training));
    weights += part.weight;
    first += part.training;
  }
  source.bytes_per_token /= weights;
  return source;
}

// The parts of a mix.
std::vector<DataSource::Part> parts_of(std::span<const Input> inputs,
                                       const std::vector<std::string>& paths,
                                       const std::vector<double>& weights) {
  if (weights.empty()) return {};
  if (weights.size() != paths.size()) {
    refuse(fmt::format(
        "--mix has {} for {} of --data, and takes one for each; a folder or a quoted pattern "
        "('web/*.txt') is one path",
        weights.size() == 1 ? "one weight" : fmt::format("{} weights", weights.size()),
        paths.size() == 1 ? "one path" : fmt::format("{} paths", paths.size())));
  }
  std::vector<DataSource::Part> parts;
  for (std::size_t i = 0; i < paths.size(); ++i) parts.push_back({paths[i], weights[i]});
  const std::vector<bool> kept = kept_for_validation(inputs);
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    DataSource::Part& part = parts[inputs[i].part];
    ++(kept[i] ? part.validation : part.training);
  }
  return parts;
}

}  // namespace

std::vector<std::string> files_of_data(const std::string& path, bool shards) {
  std::vector<std::string> files;
  for (const std::string& each : expand(path)) {
    if (!std::filesystem::is_directory(each)) {
      // An earlier run left hashes beside shards: '*' finds them.
      if (!is_hash_file(each)) files.push_back(each);
      continue;
    }
    std::vector<std::string> inside;
    if (shards) inside = shards_in(each);
    if (inside.empty()) inside = texts_in(each);
    if (inside.empty()) {
      throw_bad_file(each, shards ? "no token shards (.bin files) and no text (.txt files) in this "
                                    "folder"
                                  : "no text (.txt files) in this folder");
    }
    files.insert(files.end(), inside.begin(), inside.end());
  }
  return files;
}

void refuse_without_header(const std::string& path) {
  refuse(
      fmt::format("{} has no header that we know. If it holds nanoGPT's uint16 tokens, give their "
                  "vocabulary with --vocab (50257 for GPT-2){}",
                  path, path.ends_with(".bin") ? "; text files must not end in .bin" : ""));
}

std::shared_ptr<const Tokenizer> make_tokenizer(const TokenizerChoice& choice,
                                                std::span<const std::string_view> texts) {
  std::shared_ptr<const Tokenizer> tokenizer;
  if (is_trained(choice.name)) {
    const std::uint32_t pieces = choice.vocab == 0 ? kDefaultPieces : choice.vocab;
    tokenizer = choice.name == "bpe"
                    ? bpe_tokenizer(train_bpe(texts, pieces), "", "the BPE trained on the text")
                    : sentencepiece_tokenizer(train_sentencepiece(texts, pieces),
                                              "the model trained on the text");
    if (choice.vocab > tokenizer->vocab()) {
      log(LogLevel::kWarning, "--vocab {}: the text has only {} pieces, and so has the vocabulary",
          choice.vocab, tokenizer->vocab());
    }
    return tokenizer;
  }
  const bool bytes = choice.name.empty() || choice.name == "bytes";
  tokenizer = bytes ? byte_tokenizer() : open_tokenizer(choice.name);
  if (choice.vocab != 0 && choice.vocab < tokenizer->vocab()) {
    refuse(fmt::format("--vocab {}: {} a vocabulary of {}", choice.vocab,
                       bytes ? "bytes have" : choice.name + " has", tokenizer->vocab()));
  }
  return tokenizer;
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
  source.tokenizer = tokenizer_for(tokenizer, texts);
  source.training.push_back(
      encode_text(documents.name, texts, *source.tokenizer, documents.entropy_per_byte));
  return completed(std::move(source));
}

DataSource open_data(const std::vector<std::string>& paths, const TokenizerChoice& tokenizer,
                     const std::vector<double>& weights) {
  if (paths.empty()) refuse("there is no data: no path is given");
  std::vector<Input> shards;
  std::vector<Input> texts;
  std::vector<std::size_t> found(weights.empty() ? 1 : paths.size());  // files of a part
  for (std::size_t i = 0; i < paths.size(); ++i) {
    const std::size_t part = weights.empty() ? 0 : i;
    const std::size_t before = shards.size() + texts.size();
    if (paths[i] == "-" || paths[i] == "/dev/stdin") {
      refuse(
          "text cannot come from standard input, because every worker and a later --resume read "
          "it again: write it to a file first");
    }
    for (const std::string& name : files_of_data(paths[i])) {
      if (is_shard(name)) {
        shards.push_back({name, part});
      } else {
        texts.push_back({name, part, std::make_shared<MappedFile>(name)});
      }
    }
    found[part] += shards.size() + texts.size() - before;
  }
  for (std::size_t part = 0; part < found.size(); ++part) {
    if (found[part] == 0) {
      refuse(fmt::format("{} holds no data, only hashes of other files", paths[part]));
    }
  }
  if (!shards.empty() && !texts.empty()) {
    refuse(
        fmt::format("{} is text and {} is not: train on one kind", texts[0].path, shards[0].path));
  }
  std::vector<DataSource::Part> mix = parts_of(texts.empty() ? shards : texts, paths, weights);
  DataSource source = texts.empty() ? open_shards(shards, tokenizer) : open_texts(texts, tokenizer);
  source.mix = std::move(mix);
  const std::vector<std::string> notes = notes_of(paths, texts.empty() ? shards : texts);
  source.notes.insert(source.notes.end(), notes.begin(), notes.end());
  source.name =
      paths.size() == 1 ? paths[0] : fmt::format("{} and {} more", paths[0], paths.size() - 1);
  return completed(std::move(source));
}

}  // namespace lockstep
