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

// Text to tokens and back. Const calls may come from any thread.
class Tokenizer {
 public:
  virtual ~Tokenizer() = default;

  virtual TokenizerKind kind() const = 0;
  virtual std::uint32_t vocab() const = 0;
  // The token that ends a document, where the tokenizer has one.
  virtual std::optional<std::int32_t> end_of_document() const = 0;
  // Appends the tokens of `text`, which ends at a line's end or the document's.
  virtual void encode(std::string_view text, std::vector<std::int32_t>& tokens) const = 0;
  virtual std::string decode(std::span<const std::int32_t> tokens) const = 0;
  // The file it is made from; empty for bytes.
  virtual std::string_view model() const = 0;
};

// A token is a byte: vocabulary 256, no files. Byte 0 ends a document.
std::unique_ptr<Tokenizer> byte_tokenizer();

// SentencePiece. Without the library all three throw Error{kInvalidArgument}.
// From the bytes of a .model file; `name` appears in errors.
std::unique_ptr<Tokenizer> sentencepiece_tokenizer(std::string model, const std::string& name);
// Trains a model (byte-pair merges, bytes for what is left, nothing normalised, so that decoding
// gives the text back) of at most `vocab` pieces and returns the bytes of its file.
std::string train_sentencepiece(std::span<const std::string_view> texts, std::uint32_t vocab);

// How the header of a shard made with it begins: vocabulary, kind, hash of the model.
ShardHeader shard_header_for(const Tokenizer& tokenizer);

}  // namespace lockstep
