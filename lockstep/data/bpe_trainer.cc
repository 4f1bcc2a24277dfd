#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <unordered_map>
#include <utility>

#include "lockstep/base/error.h"
#include "lockstep/data/byte_alphabet.h"
#include "lockstep/data/split_pattern.h"
#include "lockstep/data/tokenizer.h"
#include "lockstep/files/json.h"

namespace lockstep {
namespace {

constexpr const char* kEndOfText = "<|endoftext|>";
constexpr std::int64_t kLeastCount = 2;  // a pair that is there once is learned by heart

// Byte-pair merges as the trainer of `tokenizers` chooses them: the pair that is there most often,
// of those the one with the lowest ids. Counts are kept up to date merge by merge, in the words
// that have the pair; a queue holds the pairs with the counts they once had.
class BpeTrainer {
 public:
  explicit BpeTrainer(std::span<const std::string_view> texts) {
    add_token(kEndOfText);
    std::vector<std::pair<std::string, std::uint8_t>> letters;
    for (int byte = 0; byte < 256; ++byte) {
      letters.emplace_back(byte_letter(static_cast<std::uint8_t>(byte)), byte);
    }
    std::ranges::sort(letters);  // UTF-8 sorts as code points do
    std::array<std::uint32_t, 256> ids = {};
    for (const auto& [letter, byte] : letters) ids[byte] = add_token(letter);
    std::unordered_map<std::string_view, std::int64_t> counts;
    const TextSplitter splitter(SplitPattern::kGpt2);
    for (const std::string_view text : texts) {
      for (std::size_t at = 0; at < text.size();) {
        const std::size_t end = splitter.word_end(text, at);
        ++counts[text.substr(at, end - at)];
        at = end;
      }
    }
    for (const auto& [word, count] : counts) {
      Word& made = words_.emplace_back();
      made.count = count;
      for (const char byte : word) made.tokens.push_back(ids[static_cast<std::uint8_t>(byte)]);
    }
  }

  void train(std::size_t vocab) {
    for (std::uint32_t i = 0; i < words_.size(); ++i) {
      const auto& tokens = words_[i].tokens;
      for (std::size_t at = 0; at + 1 < tokens.size(); ++at) {
        change({tokens[at], tokens[at + 1]}, 1, i);
      }
    }
    enqueue_changed();
    while (tokens_.size() < vocab && !queue_.empty()) {
      std::ranges::pop_heap(queue_, later);
      Candidate top = std::move(queue_.back());
      queue_.pop_back();
      if (const std::int64_t count = counts_[key(top.pair)]; count != top.count) {
        top.count = count;
        push(std::move(top));
        continue;
      }
      if (top.count < kLeastCount) break;
      const std::uint32_t whole = add_token(tokens_[top.pair.first] + tokens_[top.pair.second]);
      merges_.push_back(top.pair);
      for (const std::uint32_t word : top.words) merge_in(word, top.pair, whole);
      enqueue_changed();
    }
  }

  // A tokenizer.json.
  std::string json() const {
    const auto quoted = [](const std::string& text) { return to_text(Json(text)); };
    std::string vocab, merges;
    for (std::size_t id = 0; id < tokens_.size(); ++id) {
      vocab += fmt::format("{}\n      {}: {}", id == 0 ? "" : ",", quoted(tokens_[id]), id);
    }
    for (const Pair& pair : merges_) {
      merges += fmt::format("{}\n      {}", merges.empty() ? "" : ",",
                            quoted(tokens_[pair.first] + " " + tokens_[pair.second]));
    }
    return fmt::format(R"({{
  "version": "1.0",
  "truncation": null,
  "padding": null,
  "added_tokens": [
    {{"id": 0, "content": {}, "single_word": false, "lstrip": false, "rstrip": false, "normalized": false, "special": true}}
  ],
  "normalizer": null,
  "pre_tokenizer": {{"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true}},
  "post_processor": null,
  "decoder": {{"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true}},
  "model": {{
    "type": "BPE",
    "dropout": null,
    "unk_token": null,
    "continuing_subword_prefix": null,
    "end_of_word_suffix": null,
    "fuse_unk": false,
    "byte_fallback": false,
    "ignore_merges": false,
    "vocab": {{{}
    }},
    "merges": [{}
    ]
  }}
}}
)",
                       quoted(kEndOfText), vocab, merges);
  }

 private:
  using Pair = std::pair<std::uint32_t, std::uint32_t>;
  struct Word {
    std::vector<std::uint32_t> tokens;
    std::int64_t count = 0;
  };
  struct Candidate {
    Pair pair;
    std::int64_t count = 0;  // as it was when this was put into the queue
    std::vector<std::uint32_t> words;
  };

  static std::uint64_t key(const Pair& pair) {
    return std::uint64_t{pair.first} << 32 | pair.second;
  }
  static bool later(const Candidate& a, const Candidate& b) {
    return a.count != b.count ? a.count < b.count : a.pair > b.pair;
  }

  // Two pairs may make the same token.
  std::uint32_t add_token(const std::string& token) {
    const auto made = ids_.emplace(token, static_cast<std::uint32_t>(tokens_.size()));
    if (made.second) tokens_.push_back(token);
    return made.first->second;
  }

  void push(Candidate candidate) {
    queue_.push_back(std::move(candidate));
    std::ranges::push_heap(queue_, later);
  }

  // One occurrence more or less of the pair in a word; called word by word.
  void change(const Pair& pair, int by, std::uint32_t word) {
    counts_[key(pair)] += by * words_[word].count;
    if (by < 0) return;
    auto& words = changed_[key(pair)];
    if (words.empty() || words.back() != word) words.push_back(word);
  }

  void enqueue_changed() {
    for (auto& [pair, words] : changed_) {
      const std::int64_t count = counts_[pair];
      if (count <= 0) continue;
      push({{static_cast<std::uint32_t>(pair >> 32), static_cast<std::uint32_t>(pair)},
            count,
            std::move(words)});
    }
    changed_.clear();
  }

  void merge_in(std::uint32_t word, const Pair& pair, std::uint32_t whole) {
    auto& tokens = words_[word].tokens;
    std::size_t kept = 0;
    for (std::size_t at = 0; at < tokens.size(); ++at) {
      if (at + 1 == tokens.size() || tokens[at] != pair.first || tokens[at + 1] != pair.second) {
        tokens[kept++] = tokens[at];
        continue;
      }
      if (kept > 0) {
        change({tokens[kept - 1], pair.first}, -1, word);
        change({tokens[kept - 1], whole}, 1, word);
      }
      if (at + 2 < tokens.size()) {
        change({pair.second, tokens[at + 2]}, -1, word);
        change({whole, tokens[at + 2]}, 1, word);
      }
      tokens[kept++] = whole;
      ++at;
    }
    tokens.resize(kept);
  }

  std::vector<std::string> tokens_;  // by id, in letters
  std::unordered_map<std::string, std::uint32_t> ids_;
  std::vector<Pair> merges_;
  std::vector<Word> words_;
  std::unordered_map<std::uint64_t, std::int64_t> counts_;
  std::unordered_map<std::uint64_t, std::vector<std::uint32_t>> changed_;
  std::vector<Candidate> queue_;
};

}  // namespace

std::string train_bpe(std::span<const std::string_view> texts, std::uint32_t vocab) {
  if (vocab < 257) {
    throw Error(
        ErrorCode::kInvalidArgument,
        fmt::format("a BPE of {} tokens: it needs 257, for bytes and {}", vocab, kEndOfText));
  }
  BpeTrainer trainer(texts);
  trainer.train(vocab);
  return trainer.json();
}

}  // namespace lockstep
