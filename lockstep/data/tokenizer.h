#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "lockstep/data/token_shard.h"

namespace lockstep {

// A file of a tokenizer, as it lies in the folder of a model or of shards.
struct TokenizerFile {
  std::string name;
  std::string bytes;
};
constexpr const char* kSentencePieceFile = "tokenizer.model";
constexpr const char* kBpeFile = "tokenizer.json";
constexpr const char* kBpeConfigFile = "tokenizer_config.json";

// Text to tokens and back. Const calls may come from any thread.
class Tokenizer {
 public:
  virtual ~Tokenizer() = default;

  virtual TokenizerKind kind() const = 0;
  virtual std::uint32_t vocab() const = 0;
  // The token that begins a document and the one that ends it, where the tokenizer has them.
  virtual std::optional<std::int32_t> start_of_document() const { return std::nullopt; }
  virtual std::optional<std::int32_t> end_of_document() const = 0;
  // Appends the tokens of `text`, a document or a piece of one that piece_end() cut.
  virtual void encode(std::string_view text, std::vector<std::int32_t>& tokens) const = 0;
  // The first place at or after `least` where a document may be cut so that the tokens stay the
  // same: after a line's end, unless the tokenizer says otherwise.
  virtual std::size_t piece_end(std::string_view text, std::size_t least) const;
  // Tokens that begin and end documents, and other special ones, are no text. The bytes of the
  // tokens end to end: the text of more tokens begins with that of fewer.
  virtual std::string decode(std::span<const std::int32_t> tokens) const = 0;
  // The bytes of the file it is made from; empty for bytes.
  virtual std::string_view model() const = 0;
  // What a folder needs to have it: that file, and for others' programs what goes with it.
  virtual std::vector<TokenizerFile> files() const = 0;
};

// A token is a byte: vocabulary 256, no files. Byte 0 ends a document.
std::unique_ptr<Tokenizer> byte_tokenizer();

// SentencePiece. Without the library all three throw Error{kInvalidArgument}.
// From the bytes of a .model file; `name` appears in errors.
std::unique_ptr<Tokenizer> sentencepiece_tokenizer(std::string model, const std::string& name);
// Trains a model (byte-pair merges, bytes for what is left, nothing normalised, so that decoding
// gives the text back) of at most `vocab` pieces and returns the bytes of its file.
std::string train_sentencepiece(std::span<const std::string_view> texts, std::uint32_t vocab);

// Byte-level BPE in Hugging Face's tokenizer.json (docs/tokenizers.md): its bytes, those of the
// tokenizer_config.json beside it or none, and a name for errors. Throws Error{kIo} with file and
// place for what is broken and for what is not known here.
std::unique_ptr<Tokenizer> bpe_tokenizer(std::string json, std::string config,
                                         const std::string& name);
// Learns at most `vocab` tokens from the texts, with GPT-2's expression, and returns a
// tokenizer.json. The same merges as `tokenizers` learns. Throws Error{kInvalidArgument} for a
// vocabulary below 257.
std::string train_bpe(std::span<const std::string_view> texts, std::uint32_t vocab);

// The tokenizer of that kind whose files() have these bytes; none for kUnknown.
std::unique_ptr<Tokenizer> tokenizer_of_files(TokenizerKind kind, std::string model,
                                              std::string config, const std::string& name);

// How the header of a shard made with it begins: vocabulary, kind, hash of the model.
ShardHeader shard_header_for(const Tokenizer& tokenizer);

}  // namespace lockstep
