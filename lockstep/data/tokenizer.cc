#include "lockstep/data/tokenizer.h"

#include <algorithm>
#include <utility>

namespace lockstep {
namespace {

class ByteTokenizer final : public Tokenizer {
 public:
  TokenizerKind kind() const override { return TokenizerKind::kBytes; }
  std::uint32_t vocab() const override { return 256; }
  std::optional<std::int32_t> end_of_document() const override { return 0; }
  void encode(std::string_view text, std::vector<std::int32_t>& tokens) const override {
    tokens.reserve(tokens.size() + text.size());
    for (const char c : text) tokens.push_back(static_cast<unsigned char>(c));
  }
  std::string decode(std::span<const std::int32_t> tokens) const override {
    std::string text;
    for (const std::int32_t token : tokens) {
      if (token > 0 && token < 256) text += static_cast<char>(token);
    }
    return text;
  }
  std::string_view model() const override { return {}; }
  std::vector<TokenizerFile> files() const override { return {}; }
};

}  // namespace

std::size_t Tokenizer::piece_end(std::string_view text, std::size_t least) const {
  if (least >= text.size()) return text.size();
  return std::min(text.find('\n', least), text.size() - 1) + 1;
}

std::unique_ptr<Tokenizer> byte_tokenizer() { return std::make_unique<ByteTokenizer>(); }

std::unique_ptr<Tokenizer> tokenizer_of_files(TokenizerKind kind, std::string model,
                                              std::string config, const std::string& name) {
  switch (kind) {
    case TokenizerKind::kUnknown: break;
    case TokenizerKind::kBytes: return byte_tokenizer();
    case TokenizerKind::kSentencePiece: return sentencepiece_tokenizer(std::move(model), name);
    case TokenizerKind::kBpe: return bpe_tokenizer(std::move(model), std::move(config), name);
  }
  return nullptr;
}

ShardHeader shard_header_for(const Tokenizer& tokenizer) {
  ShardHeader header;
  header.vocab = tokenizer.vocab();
  header.token_bytes = header.vocab <= 65536 ? 2 : 4;
  header.tokenizer = tokenizer.kind();
  if (!tokenizer.model().empty()) {
    header.tokenizer_model = blake3(std::as_bytes(std::span(tokenizer.model())));
  }
  return header;
}

}  // namespace lockstep
