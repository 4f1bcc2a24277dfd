#include <fmt/format.h>
#include <sentencepiece_processor.h>
#include <sentencepiece_trainer.h>

#include <algorithm>
#include <unordered_map>
#include <utility>

#include "lockstep/base/error.h"
#include "lockstep/base/utf8.h"
#include "lockstep/data/tokenizer.h"

namespace lockstep {
namespace {

constexpr std::size_t kMostSentence = 4096;  // bytes that the trainer looks at in one piece

class SentencePieceTokenizer final : public Tokenizer {
 public:
  SentencePieceTokenizer(std::string model, const std::string& name) : model_(std::move(model)) {
    const auto status = processor_.LoadFromSerializedProto(model_);
    if (!status.ok() || processor_.GetPieceSize() <= 0) {
      throw Error(ErrorCode::kIo, fmt::format("{}: not a SentencePiece model", name));
    }
  }

  TokenizerKind kind() const override { return TokenizerKind::kSentencePiece; }
  std::uint32_t vocab() const override {
    return static_cast<std::uint32_t>(processor_.GetPieceSize());
  }
  std::optional<std::int32_t> end_of_document() const override {
    if (processor_.eos_id() < 0) return std::nullopt;
    return processor_.eos_id();
  }

  // Line by line: no piece spans a line's end, and the library is slow on long texts.
  void encode(std::string_view text, std::vector<std::int32_t>& tokens) const override {
    std::vector<int> ids;
    while (!text.empty()) {
      const std::size_t line = std::min(text.find('\n'), text.size() - 1) + 1;
      const auto status = processor_.Encode(text.substr(0, line), &ids);
      if (!status.ok()) throw Error(ErrorCode::kIo, "SentencePiece: " + status.ToString());
      tokens.insert(tokens.end(), ids.begin(), ids.end());
      text.remove_prefix(line);
    }
  }

  std::string decode(std::span<const std::int32_t> tokens) const override {
    std::string text;
    const std::vector<int> ids(tokens.begin(), tokens.end());
    const auto status = processor_.Decode(ids, &text);
    if (!status.ok()) throw Error(ErrorCode::kIo, "SentencePiece: " + status.ToString());
    return text;
  }

  std::string_view model() const override { return model_; }
  std::vector<TokenizerFile> files() const override { return {{kSentencePieceFile, model_}}; }

 private:
  std::string model_;
  sentencepiece::SentencePieceProcessor processor_;
};

// The lines of all texts, long ones in pieces.
class Lines final : public sentencepiece::SentenceIterator {
 public:
  explicit Lines(std::span<const std::string_view> texts) : texts_(texts) { Next(); }

  bool done() const override { return done_; }
  const std::string& value() const override { return line_; }
  sentencepiece::util::Status status() const override { return {}; }
  void Next() override {
    line_.clear();
    while (line_.empty()) {
      while (rest_.empty()) {
        if (next_ == texts_.size()) {
          done_ = true;
          return;
        }
        rest_ = texts_[next_++];
      }
      const std::size_t end = std::min(rest_.find('\n'), rest_.size());
      const std::string_view line = utf8_prefix(rest_.substr(0, end), kMostSentence);
      line_ = line;
      rest_.remove_prefix(std::min(line.size() + (line.size() == end ? 1 : 0), rest_.size()));
    }
  }

 private:
  std::span<const std::string_view> texts_;
  std::size_t next_ = 0;
  std::string_view rest_;
  std::string line_;
  bool done_ = false;
};

}  // namespace

std::unique_ptr<Tokenizer> sentencepiece_tokenizer(std::string model, const std::string& name) {
  return std::make_unique<SentencePieceTokenizer>(std::move(model), name);
}

std::string train_sentencepiece(std::span<const std::string_view> texts, std::uint32_t vocab) {
  const std::unordered_map<std::string, std::string> options = {
      {"model_type", "bpe"},
      {"vocab_size", std::to_string(vocab)},
      {"hard_vocab_limit", "false"},  // a short text may not have so many
      {"byte_fallback", "true"},
      {"character_coverage", "0.9999"},
      {"normalization_rule_name", "identity"},
      {"remove_extra_whitespaces", "false"},
      {"add_dummy_prefix", "false"},
      {"input_sentence_size", "1000000"},
      {"shuffle_input_sentence", "false"},  // so that the same text gives the same model
      {"max_sentence_length", std::to_string(kMostSentence)},
      {"num_threads", "1"},
      {"minloglevel", "2"},
  };
  Lines lines(texts);
  std::string model;
  const auto status = sentencepiece::SentencePieceTrainer::Train(options, &lines, &model);
  if (!status.ok()) {
    // "Vocabulary size is smaller than required_chars. 10 vs 288. ..."
    const std::string said = status.ToString();
    const std::size_t least = said.find(" vs ");
    if (least != std::string::npos && said.find("smaller than required") != std::string::npos) {
      const std::string number = said.substr(least + 4, said.find('.', least) - least - 4);
      throw Error(
          ErrorCode::kInvalidArgument,
          fmt::format("--vocab {}: SentencePiece needs at least {} pieces for this text, one "
                      "for every byte and every letter",
                      vocab, number));
    }
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("training a SentencePiece model of {} pieces: {}", vocab, said));
  }
  return model;
}

}  // namespace lockstep
