#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <functional>
#include <mutex>
#include <unordered_map>
#include <utility>

#include "lockstep/base/error.h"
#include "lockstep/base/index.h"
#include "lockstep/data/bpe_file.h"
#include "lockstep/data/byte_alphabet.h"
#include "lockstep/data/split_pattern.h"
#include "lockstep/data/tokenizer.h"
#include "lockstep/data/unicode.h"
#include "lockstep/files/json.h"
#include "lockstep/files/mapped_file.h"

namespace lockstep {
namespace {

// Added tokens in a text: the leftmost, and of those the longest.
class AddedTokenFinder {
 public:
  void add(AddedToken token) {
    std::uint32_t node = 0;
    for (const char c : token.content) {
      const auto made = next_.emplace(key(node, c), static_cast<std::uint32_t>(ends_.size()));
      if (made.second) ends_.push_back(-1);
      node = made.first->second;
    }
    begins_[static_cast<std::uint8_t>(token.content[0])] = true;
    ends_[node] = static_cast<std::int32_t>(tokens_.size());
    tokens_.push_back(std::move(token));
  }

  // Calls with every token and every text between tokens, in their order; no text is empty.
  template <typename OnToken, typename OnText>
  void split(std::string_view text, OnToken&& on_token, OnText&& on_text) const {
    std::size_t done = 0;
    for (std::size_t at = 0; !tokens_.empty() && at < text.size();) {
      std::size_t end = at;
      const AddedToken* token = longest_at(text, at, end);
      if (token == nullptr) {
        ++at;
        continue;
      }
      std::size_t begin = at;
      at = end;  // the next is looked for behind the token, not behind the space it takes
      if (token->lstrip) begin = space_before(text, std::min(done, begin), begin);
      if (token->rstrip) end = space_after(text, end);
      if (done < begin) on_text(text.substr(done, begin - done));
      on_token(*token);
      done = end;
    }
    if (done < text.size()) on_text(text.substr(done));
  }

 private:
  static std::uint64_t key(std::uint32_t node, char c) {
    return std::uint64_t{node} << 8 | static_cast<std::uint8_t>(c);
  }

  const AddedToken* longest_at(std::string_view text, std::size_t at, std::size_t& end) const {
    if (!begins_[static_cast<std::uint8_t>(text[at])]) return nullptr;
    const AddedToken* found = nullptr;
    std::uint32_t node = 0;
    for (; at < text.size(); ++at) {
      const auto next = next_.find(key(node, text[at]));
      if (next == next_.end()) break;
      node = next->second;
      if (ends_[node] >= 0) {
        found = &tokens_[index_of(ends_[node])];
        end = at + 1;
      }
    }
    return found;
  }

  static std::size_t space_before(std::string_view text, std::size_t least, std::size_t at) {
    while (at > least) {
      std::size_t begin = at - 1;
      while (begin > least && (static_cast<std::uint8_t>(text[begin]) & 0xc0) == 0x80) --begin;
      if (Unicode::get().read(text, begin).type != CharacterClass::kSpace) break;
      at = begin;
    }
    return at;
  }
  static std::size_t space_after(std::string_view text, std::size_t at) {
    while (at < text.size()) {
      const Character character = Unicode::get().read(text, at);
      if (character.type != CharacterClass::kSpace) break;
      at += character.length;
    }
    return at;
  }

  std::vector<AddedToken> tokens_;
  std::unordered_map<std::uint64_t, std::uint32_t> next_;  // a trie: node and byte to node
  std::vector<std::int32_t> ends_ = {-1};                  // by node: which token, or -1
  std::array<bool, 256> begins_ = {};
};

// Which merge joins two tokens.
class MergeTable {
 public:
  struct Merge {
    std::uint32_t rank = 0;
    std::int32_t whole = -1;
  };

  explicit MergeTable(std::size_t merges) {
    shift_ = 64 - static_cast<int>(std::bit_width(2 * merges + 1));
    slots_.resize(std::size_t{1} << (64 - shift_));
  }
  void set(std::int32_t left, std::int32_t right, Merge merge) {
    Slot& slot = slots_[find_slot(key(left, right))];
    slot = {key(left, right), merge};
  }
  // nullptr: none does.
  const Merge* find(std::int32_t left, std::int32_t right) const {
    const Slot& slot = slots_[find_slot(key(left, right))];
    return slot.key == kEmpty ? nullptr : &slot.merge;
  }

 private:
  static constexpr std::uint64_t kEmpty = UINT64_MAX;
  struct Slot {
    std::uint64_t key = kEmpty;
    Merge merge = {};
  };

  static std::uint64_t key(std::int32_t left, std::int32_t right) {
    return std::uint64_t{static_cast<std::uint32_t>(left)} << 32 |
           static_cast<std::uint32_t>(right);
  }
  std::size_t find_slot(std::uint64_t key) const {
    std::size_t at = (key ^ key >> 29) * 0x9e3779b97f4a7c15u >> shift_;
    while (slots_[at].key != key && slots_[at].key != kEmpty) at = (at + 1) % slots_.size();
    return at;
  }

  int shift_;
  std::vector<Slot> slots_;
};

// The tokens of short words that were met before. A word takes the place of another one.
class WordCache {
 public:
  static constexpr std::size_t kMostBytes = 31;
  static constexpr std::size_t kMostCached = 7;  // tokens
  using Key = std::array<std::uint64_t, 4>;      // the bytes, zeros, the length

  static Key key_of(std::string_view word) {
    std::array<char, 32> bytes = {};
    std::memcpy(bytes.data(), word.data(), word.size());
    bytes[31] = static_cast<char>(word.size());
    return std::bit_cast<Key>(bytes);
  }
  struct Entry {
    Key key = {};
    std::uint32_t count = 0;
    std::array<std::int32_t, kMostCached> tokens = {};
  };
  Entry& entry(const Key& key) {
    std::uint64_t hash = 0;
    for (const std::uint64_t part : key) {
      hash = (hash ^ part) * 0x9e3779b97f4a7c15u;
      hash ^= hash >> 32;
    }
    return entries_[hash * 0x9e3779b97f4a7c15u >> (64 - kBits)];
  }

 private:
  static constexpr int kBits = 16;
  std::vector<Entry> entries_ = std::vector<Entry>(std::size_t{1} << kBits);
};

class BpeTokenizer final : public Tokenizer {
 public:
  BpeTokenizer(std::string json, std::string config, const std::string& name)
      : BpeTokenizer(read_bpe_file(name, json)) {
    model_ = std::move(json);
    choose_ends(config, name);
    config_ = config.empty() ? make_config() : std::move(config);
  }

  TokenizerKind kind() const override { return TokenizerKind::kBpe; }
  std::uint32_t vocab() const override { return static_cast<std::uint32_t>(places_.size() - 1); }
  std::optional<std::int32_t> start_of_document() const override { return start_; }
  std::optional<std::int32_t> end_of_document() const override { return end_; }
  std::string_view model() const override { return model_; }
  std::vector<TokenizerFile> files() const override {
    return {{kBpeFile, model_}, {kBpeConfigFile, config_}};
  }

  void encode(std::string_view text, std::vector<std::int32_t>& tokens) const override {
    std::unique_ptr<Scratch> scratch = borrow();
    const auto on_token = [&](const AddedToken& token) { tokens.push_back(token.id); };
    added_.split(text, on_token, [&](std::string_view piece) {
      if (nfc_) piece = Unicode::get().nfc(piece, scratch->normalized);
      added_normalized_.split(piece, on_token,
                              [&](std::string_view rest) { encode_text(rest, *scratch, tokens); });
    });
    give_back(std::move(scratch));
  }

  // After the end of a line before a letter: there every expression ends a word, and begins the
  // next one as if nothing were before it.
  std::size_t piece_end(std::string_view text, std::size_t least) const override {
    if (!may_cut_) return text.size();
    for (std::size_t at = std::max<std::size_t>(least, 2) - 1; at < text.size(); ++at) {
      at = text.find('\n', at);
      if (at == std::string_view::npos || at + 1 == text.size()) break;
      std::size_t before = at - 1;
      while (before > 0 && (static_cast<std::uint8_t>(text[before]) & 0xc0) == 0x80) --before;
      if (Unicode::get().read(text, before).type != CharacterClass::kSpace &&
          Unicode::get().read(text, at + 1).type == CharacterClass::kLetter) {
        return at + 1;
      }
    }
    return text.size();
  }

  std::string decode(std::span<const std::int32_t> tokens) const override {
    std::string text;
    for (const std::int32_t token : tokens) {
      if (token >= 0 && static_cast<std::uint32_t>(token) < vocab() && !special_[index_of(token)]) {
        text += bytes_of(token);
      }
    }
    return text;
  }

 private:
  struct Symbol {
    std::int32_t token;  // -1: joined to the one before
    std::uint32_t previous;
    std::uint32_t next;
  };
  // What a call of encode() works with.
  struct Scratch {
    std::string normalized;
    std::string prefixed;
    std::vector<Symbol> symbols;
    std::vector<std::uint64_t> queue;
    WordCache cache;
  };
  static constexpr std::uint32_t kNone = UINT32_MAX;

  explicit BpeTokenizer(BpeFile file)
      : merges_(file.merges.size()),
        splitter_(file.pattern),
        nfc_(file.nfc),
        prefix_space_(file.prefix_space),
        start_(file.before),
        end_(file.after) {
    for (std::size_t rank = 0; rank < file.merges.size(); ++rank) {
      const auto& merge = file.merges[rank];
      merges_.set(merge.left, merge.right, {static_cast<std::uint32_t>(rank), merge.whole});
    }
    std::int32_t largest = 0;
    for (const auto& [token, id] : file.vocab) largest = std::max(largest, id);
    for (const AddedToken& token : file.added) largest = std::max(largest, token.id);
    std::vector<std::string> bytes(index_of(largest) + 1);
    special_.resize(bytes.size());
    for (const auto& [token, id] : file.vocab) {
      auto said = bytes_of_letters(token);
      const bool from_words = said.has_value();
      bytes[index_of(id)] = said ? *std::move(said) : token;
      if (from_words && bytes[index_of(id)].size() == 1) {
        byte_tokens_[static_cast<std::uint8_t>(bytes[index_of(id)][0])] = id;
      }
      if (from_words && file.ignore_merges) words_.emplace(bytes[index_of(id)], id);
    }
    may_cut_ = file.pattern != SplitPattern::kNone && !prefix_space_;
    for (AddedToken& token : file.added) {
      bytes[index_of(token.id)] = token.content;
      special_[index_of(token.id)] = token.special;
      if (token.lstrip || token.content.find('\n') != std::string::npos) may_cut_ = false;
      added_ids_.emplace(token.content, token.id);
      if (token.normalized && nfc_) {
        std::string storage;
        token.content = Unicode::get().nfc(token.content, storage);
      }
      (token.normalized ? added_normalized_ : added_).add(std::move(token));
    }
    places_.push_back(0);
    for (const std::string& token : bytes) {
      bytes_ += token;
      places_.push_back(static_cast<std::uint32_t>(bytes_.size()));
    }
  }

  std::string_view bytes_of(std::int32_t token) const {
    const std::size_t begin = places_[index_of(token)];
    return std::string_view(bytes_).substr(begin, places_[index_of(token) + 1] - begin);
  }

  // The end of a document: what the post-processor puts there, else what tokenizer_config.json
  // calls eos_token, else, without that file, what the families call it.
  void choose_ends(const std::string& config, const std::string& name) {
    if (end_) return;
    if (config.empty()) {
      for (const char* usual : {"<|endoftext|>", "<|end_of_text|>", "</s>"}) {
        if (const auto found = added_ids_.find(usual); found != added_ids_.end()) {
          end_ = found->second;
          return;
        }
      }
      return;
    }
    const auto content = read_eos_token(name, config);
    if (!content) return;
    const auto found = added_ids_.find(*content);
    if (found == added_ids_.end()) {
      throw_bad_file(name, fmt::format("{}: eos_token '{}' is not among the added tokens",
                                       kBpeConfigFile, *content));
    }
    end_ = found->second;
  }

  // For a tokenizer.json that came alone.
  std::string make_config() const {
    Json json = {{"tokenizer_class", "PreTrainedTokenizerFast"},
                 {"clean_up_tokenization_spaces", false}};
    const auto name = [&](const char* key, std::optional<std::int32_t> token) {
      if (token) json[key] = bytes_of(*token);
    };
    name("bos_token", start_ ? start_ : end_);
    name("eos_token", end_);
    return to_text(json, 2) + "\n";
  }

  void encode_text(std::string_view text, Scratch& scratch,
                   std::vector<std::int32_t>& tokens) const {
    if (prefix_space_ && text[0] != ' ') {
      scratch.prefixed.assign(1, ' ').append(text);
      text = scratch.prefixed;
    }
    for (std::size_t at = 0; at < text.size();) {
      const std::size_t end = splitter_.word_end(text, at);
      encode_word(text.substr(at, end - at), scratch, tokens);
      at = end;
    }
  }

  void encode_word(std::string_view word, Scratch& scratch,
                   std::vector<std::int32_t>& tokens) const {
    if (word.size() > WordCache::kMostBytes) {
      merge_word(word, scratch, tokens);
      return;
    }
    const WordCache::Key key = WordCache::key_of(word);
    WordCache::Entry& entry = scratch.cache.entry(key);
    if (entry.key != key) {
      const std::size_t before = tokens.size();
      merge_word(word, scratch, tokens);
      const std::size_t count = tokens.size() - before;
      if (count > WordCache::kMostCached) return;
      entry.key = key;
      entry.count = static_cast<std::uint32_t>(count);
      std::copy_n(tokens.end() - static_cast<std::ptrdiff_t>(count), count, entry.tokens.begin());
      return;
    }
    tokens.insert(tokens.end(), entry.tokens.begin(), entry.tokens.begin() + entry.count);
  }

  // The merge of the lowest rank first, of those the leftmost: a queue of pairs, the newest of a
  // place being the one that counts. n log n for any word.
  void merge_word(std::string_view word, Scratch& scratch,
                  std::vector<std::int32_t>& tokens) const {
    if (!words_.empty()) {
      if (const auto found = words_.find(std::string(word)); found != words_.end()) {
        tokens.push_back(found->second);
        return;
      }
    }
    if (word.size() >= kNone) {
      throw Error(ErrorCode::kIo, fmt::format("a word of {} bytes in the text", word.size()));
    }
    auto& symbols = scratch.symbols;
    auto& queue = scratch.queue;
    symbols.clear();
    queue.clear();
    const auto size = static_cast<std::uint32_t>(word.size());
    for (std::uint32_t i = 0; i < size; ++i) {
      symbols.push_back({byte_tokens_[static_cast<std::uint8_t>(word[i])], i == 0 ? kNone : i - 1,
                         i + 1 < size ? i + 1 : kNone});
    }
    const auto rank_at = [&](std::uint32_t at) -> const MergeTable::Merge* {
      const std::uint32_t next = symbols[at].next;
      return next == kNone ? nullptr : merges_.find(symbols[at].token, symbols[next].token);
    };
    const auto entry_of = [](std::uint32_t rank, std::uint32_t at) {
      return std::uint64_t{rank} << 32 | at;
    };
    for (std::uint32_t i = 0; i + 1 < size; ++i) {
      if (const auto* merge = rank_at(i)) queue.push_back(entry_of(merge->rank, i));
    }
    std::ranges::make_heap(queue, std::greater<>());
    const auto enqueue = [&](std::uint32_t at) {
      if (const auto* merge = rank_at(at)) {
        queue.push_back(entry_of(merge->rank, at));
        std::ranges::push_heap(queue, std::greater<>());
      }
    };
    while (!queue.empty()) {
      const std::uint64_t top = queue.front();
      std::ranges::pop_heap(queue, std::greater<>());
      queue.pop_back();
      const auto at = static_cast<std::uint32_t>(top);
      if (symbols[at].token < 0) continue;
      const auto* merge = rank_at(at);
      if (merge == nullptr || merge->rank != top >> 32) continue;
      Symbol& left = symbols[at];
      Symbol& right = symbols[left.next];
      left.token = merge->whole;
      left.next = right.next;
      right.token = -1;
      if (left.next != kNone) symbols[left.next].previous = at;
      if (left.previous != kNone) enqueue(left.previous);
      enqueue(at);
    }
    for (std::uint32_t i = 0; i != kNone; i = symbols[i].next) tokens.push_back(symbols[i].token);
  }

  std::unique_ptr<Scratch> borrow() const {
    const std::lock_guard lock(mutex_);
    if (idle_.empty()) return std::make_unique<Scratch>();
    auto scratch = std::move(idle_.back());
    idle_.pop_back();
    return scratch;
  }
  void give_back(std::unique_ptr<Scratch> scratch) const {
    const std::lock_guard lock(mutex_);
    idle_.push_back(std::move(scratch));
  }

  std::string model_;
  std::string config_;
  MergeTable merges_;
  std::array<std::int32_t, 256> byte_tokens_ = {};
  std::unordered_map<std::string, std::int32_t> words_;  // with ignore_merges
  TextSplitter splitter_;
  bool nfc_;
  bool prefix_space_;
  bool may_cut_ = false;
  AddedTokenFinder added_;
  AddedTokenFinder added_normalized_;
  std::unordered_map<std::string, std::int32_t> added_ids_;
  std::optional<std::int32_t> start_;
  std::optional<std::int32_t> end_;
  std::string bytes_;                  // of all tokens, end to end
  std::vector<std::uint32_t> places_;  // where a token's begin; one more at the end
  std::vector<bool> special_;
  mutable std::mutex mutex_;
  mutable std::vector<std::unique_ptr<Scratch>> idle_;  // as many as were in use at once
};

}  // namespace

std::unique_ptr<Tokenizer> bpe_tokenizer(std::string json, std::string config,
                                         const std::string& name) {
  return std::make_unique<BpeTokenizer>(std::move(json), std::move(config), name);
}

}  // namespace lockstep
