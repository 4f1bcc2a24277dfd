#include "lockstep/data/bpe_file.h"

#include <fmt/format.h>

#include <algorithm>
#include <functional>
#include <utility>

#include "lockstep/base/index.h"
#include "lockstep/base/utf8.h"
#include "lockstep/data/byte_alphabet.h"
#include "lockstep/data/tokenizer.h"
#include "lockstep/files/json.h"
#include "lockstep/files/json_scanner.h"
#include "lockstep/files/mapped_file.h"

namespace lockstep {
namespace {

constexpr std::size_t kMostFile = std::size_t{256} << 20;
constexpr std::uint64_t kMostBpeTokens = std::uint64_t{1} << 22;
constexpr std::size_t kMostAddedToken = 1024;  // bytes
constexpr std::size_t kMostPart = 1 << 20;     // bytes of a member that becomes a tree

// A member of the file as a tree, and its name for messages.
class JsonPart {
 public:
  JsonPart(const std::string& path, std::string place, const SortedJson& json)
      : path_(path), place_(std::move(place)), json_(json) {}

  [[noreturn]] void refuse(const std::string& what) const {
    throw_bad_file(path_, fmt::format("{}: {}", place_, what));
  }
  const SortedJson& json() const { return json_; }
  // A null value when it is missing.
  const SortedJson& value(const char* key) const {
    static const SortedJson kNull;
    if (!json_.is_object()) refuse("not an object");
    const auto found = json_.find(key);
    return found == json_.end() ? kNull : *found;
  }
  std::string text(const char* key) const {
    const SortedJson& found = value(key);
    if (!found.is_string()) refuse(fmt::format("'{}' is not a text", key));
    return found.get<std::string>();
  }
  bool flag(const char* key, bool otherwise) const {
    const SortedJson& found = value(key);
    if (found.is_null()) return otherwise;
    if (!found.is_boolean()) refuse(fmt::format("'{}' is neither true nor false", key));
    return found.get<bool>();
  }
  std::vector<JsonPart> list(const char* key) const {
    const SortedJson& found = value(key);
    if (!found.is_array()) refuse(fmt::format("'{}' is not a list", key));
    std::vector<JsonPart> parts;
    for (const SortedJson& element : found) {
      parts.emplace_back(path_, fmt::format("{}.{}[{}]", place_, key, parts.size()), element);
    }
    return parts;
  }
  JsonPart within(const char* key) const { return {path_, place_ + "." + key, value(key)}; }

 private:
  const std::string& path_;
  std::string place_;
  const SortedJson& json_;
};

class BpeFileReader {
 public:
  BpeFileReader(const std::string& path, std::string_view text) : path_(path), top_(path, text) {
    if (text.size() > kMostFile) throw_bad_file(path, "larger than a tokenizer can be");
    if (const auto bad = find_not_utf8(text)) throw_bad_file(path, *bad, "not UTF-8");
  }

  BpeFile read() {
    const Members members = members_of(top_);
    top_.finish();
    const auto version = members.find("version");
    if (version != members.end() && version->second != "\"1.0\"") {
      top_.at(version->second).fail("a version other than 1.0");
    }
    const auto model = members.find("model");
    if (model == members.end()) throw_bad_file(path_, "there is no 'model'");
    read_model(top_.at(model->second));
    with_part(members, "normalizer", [&](const JsonPart& part) { read_normalizer(part); });
    if (const auto added = members.find("added_tokens"); added != members.end()) {
      read_added_tokens(top_.at(added->second));
    }
    if (!with_part(members, "pre_tokenizer", [&](const JsonPart& part) { read_splits(part); })) {
      throw_bad_file(path_, "there is no 'pre_tokenizer', so this is no byte-level BPE");
    }
    with_part(members, "post_processor", [&](const JsonPart& part) { read_template(part); });
    with_part(members, "decoder", [&](const JsonPart& part) {
      if (part.text("type") != "ByteLevel") part.refuse("only ByteLevel is known");
    });
    return std::move(file_);
  }

 private:
  using Members = std::unordered_map<std::string, std::string_view>;

  Members members_of(JsonScanner& scanner) {
    Members members;
    scanner.object([&](const std::string& key) {
      const std::size_t position = scanner.position();
      if (!members.emplace(key, scanner.skip()).second) {
        scanner.fail(position, fmt::format("'{}' is there twice", key));
      }
    });
    return members;
  }

  // False: it is missing or null.
  bool with_part(const Members& members, const char* name,
                 const std::function<void(const JsonPart&)>& read) {
    const auto found = members.find(name);
    if (found == members.end() || found->second == "null") return false;
    if (found->second.size() > kMostPart) top_.at(found->second).fail("too long");
    const SortedJson json = parse_sorted_json(found->second);
    read(JsonPart(path_, name, json));
    return true;
  }

  void read_model(JsonScanner scanner) {
    const std::size_t begin = scanner.position();
    const Members members = members_of(scanner);
    const auto value = [&](const char* key) {
      const auto found = members.find(key);
      return found == members.end() ? std::string_view("null") : found->second;
    };
    const auto refuse = [&](const char* key, const std::string& what) {
      const std::string_view text = value(key);
      const std::size_t position = text == "null" ? begin : top_.at(text).position();
      top_.fail(position, fmt::format("model.{}: {}", key, what));
    };
    if (value("type") != "\"BPE\"" && value("type") != "null") refuse("type", "only BPE is known");
    if (value("dropout") != "null" && value("dropout") != "0.0" && value("dropout") != "0") {
      refuse("dropout", "tokens would be drawn by lot, which is not done here");
    }
    for (const char* key : {"continuing_subword_prefix", "end_of_word_suffix"}) {
      if (value(key) != "null" && value(key) != "\"\"") refuse(key, "is not for byte-level BPE");
    }
    if (value("byte_fallback") != "null" && value("byte_fallback") != "false") {
      refuse("byte_fallback", "this is a SentencePiece model: use its tokenizer.model");
    }
    if (value("ignore_merges") != "null") {
      file_.ignore_merges = top_.at(value("ignore_merges")).flag();
    }
    if (value("vocab") == "null") refuse("vocab", "is missing");
    if (value("merges") == "null") refuse("merges", "is missing");
    read_vocab(top_.at(value("vocab")));
    for (int byte = 0; byte < 256; ++byte) {
      if (!file_.vocab.contains(byte_letter(static_cast<std::uint8_t>(byte)))) {
        refuse("vocab", fmt::format("lacks byte {:#04x}, so not every text can be encoded", byte));
      }
    }
    read_merges(top_.at(value("merges")));
  }

  void read_vocab(JsonScanner scanner) {
    scanner.object([&](const std::string& token) {
      const std::size_t position = scanner.position();
      const auto id = static_cast<std::int32_t>(scanner.whole(kMostBpeTokens - 1));
      if (!file_.vocab.emplace(token, id).second) {
        scanner.fail(position, fmt::format("model.vocab: '{}' is there twice", token));
      }
      claim(scanner, position, id, token);
    });
  }

  void claim(const JsonScanner& scanner, std::size_t position, std::int32_t id,
             const std::string& token) {
    if (index_of(id) >= taken_.size()) taken_.resize(index_of(id) + 1);
    if (taken_[index_of(id)]) {
      scanner.fail(position, fmt::format("id {} of '{}' belongs to another token", id, token));
    }
    taken_[index_of(id)] = true;
  }

  // ["a b", ...] or [["a", "b"], ...]
  void read_merges(JsonScanner scanner) {
    scanner.list([&] {
      const std::size_t position = scanner.position();
      const std::string place = fmt::format("model.merges[{}]", file_.merges.size());
      if (file_.merges.size() == kMostBpeTokens) scanner.fail(position, place + ": too many");
      std::string left, right;
      if (scanner.kind() == '[') {
        int parts = 0;
        scanner.list([&] { (parts++ == 0 ? left : right) = scanner.text(); });
        if (parts != 2) scanner.fail(position, place + ": not a pair");
      } else {
        const std::string pair = scanner.text();
        const std::size_t space = pair.find(' ');
        if (space == std::string::npos || pair.find(' ', space + 1) != std::string::npos) {
          scanner.fail(position, place + ": not two tokens with a space between");
        }
        left = pair.substr(0, space);
        right = pair.substr(space + 1);
      }
      const auto id = [&](const std::string& token) {
        const auto found = file_.vocab.find(token);
        if (found == file_.vocab.end()) {
          scanner.fail(position, fmt::format("{}: '{}' is not in the vocabulary", place, token));
        }
        return found->second;
      };
      file_.merges.push_back({id(left), id(right), id(left + right)});
    });
  }

  void read_added_tokens(JsonScanner scanner) {
    std::unordered_map<std::string, std::int32_t> ids;
    auto next = static_cast<std::int32_t>(file_.vocab.size());
    scanner.list([&] {
      const std::size_t position = scanner.position();
      AddedToken token;
      bool single_word = false;
      bool has_normalized = false;
      scanner.object([&](const std::string& key) {
        const auto take = [&](bool& flag) { flag = scanner.flag(); };
        if (key == "id") {
          token.id = static_cast<std::int32_t>(scanner.whole(kMostBpeTokens - 1));
        } else if (key == "content") {
          token.content = scanner.text();
        } else if (key == "single_word") {
          take(single_word);
        } else if (key == "lstrip") {
          take(token.lstrip);
        } else if (key == "rstrip") {
          take(token.rstrip);
        } else if (key == "normalized") {
          take(token.normalized);
          has_normalized = true;
        } else if (key == "special") {
          take(token.special);
        } else {
          scanner.skip();
        }
      });
      if (!has_normalized) token.normalized = !token.special;
      const auto refuse = [&](const std::string& what) {
        scanner.fail(position, fmt::format("added_tokens: '{}' {}", token.content, what));
      };
      if (token.content.empty()) refuse("is empty");
      if (token.content.size() > kMostAddedToken) refuse("is too long");
      if (single_word) refuse("has single_word, which is not known here");
      // `tokenizers` numbers them itself and only warns when the file says otherwise.
      const auto known = file_.vocab.find(token.content);
      const std::int32_t id = known != file_.vocab.end() ? known->second : next++;
      if (token.id != id) {
        refuse(fmt::format("has id {}, but its place in the file gives it {}", token.id, id));
      }
      if (!ids.emplace(token.content, id).second) refuse("is there twice");
      if (known == file_.vocab.end()) claim(scanner, position, id, token.content);
      file_.added.push_back(std::move(token));
    });
  }

  void read_normalizer(const JsonPart& part) {
    const std::string type = part.text("type");
    if (type == "NFC") {
      file_.nfc = true;
    } else if (type == "Sequence") {
      for (const JsonPart& inner : part.list("normalizers")) {
        if (inner.text("type") != "NFC") inner.refuse("only NFC is known");
        file_.nfc = true;
      }
    } else {
      part.refuse(fmt::format("{} is not known, only NFC", type));
    }
  }

  // ByteLevel alone, or a Split and then ByteLevel without an expression of its own.
  void read_splits(const JsonPart& part) {
    const std::string type = part.text("type");
    if (type == "ByteLevel") {
      read_byte_level(part);
      return;
    }
    if (type != "Sequence") part.refuse(fmt::format("{} is not known", type));
    const auto steps = part.list("pretokenizers");
    if (steps.size() == 1 && steps[0].text("type") == "ByteLevel") {
      read_byte_level(steps[0]);
      return;
    }
    if (steps.size() != 2 || steps[0].text("type") != "Split" ||
        steps[1].text("type") != "ByteLevel") {
      part.refuse("neither ByteLevel nor a Split and ByteLevel");
    }
    read_byte_level(steps[1]);
    if (file_.pattern != SplitPattern::kNone || file_.prefix_space) {
      steps[1].refuse("after a Split only without use_regex and add_prefix_space");
    }
    const JsonPart& split = steps[0];
    const std::string regex = split.within("pattern").text("Regex");
    const auto pattern = parse_split_pattern(regex);
    if (!pattern) {
      split.refuse(
          fmt::format("not the expression of GPT-2, Llama 3 (cl100k) or Qwen 2: {}", regex));
    }
    file_.pattern = *pattern;
    // The expressions leave nothing between their matches, so both of these are the same.
    const std::string behavior = split.text("behavior");
    const bool invert = split.flag("invert", false);
    if (behavior != "Isolated" && !(behavior == "Removed" && invert)) {
      split.refuse(fmt::format("behavior {} is not known", behavior));
    }
  }

  void read_byte_level(const JsonPart& part) {
    file_.pattern = part.flag("use_regex", true) ? SplitPattern::kGpt2 : SplitPattern::kNone;
    file_.prefix_space = part.flag("add_prefix_space", true);
  }

  void read_template(const JsonPart& part) {
    const std::string type = part.text("type");
    if (type == "ByteLevel") return;  // offsets, which are not kept here
    if (type == "Sequence") {
      for (const JsonPart& inner : part.list("processors")) {
        if (inner.text("type") == "Sequence") inner.refuse("a Sequence in a Sequence");
        read_template(inner);
      }
      return;
    }
    if (type != "TemplateProcessing") part.refuse(fmt::format("{} is not known", type));
    bool sequence = false;
    for (const JsonPart& step : part.list("single")) {
      if (!step.value("Sequence").is_null()) {
        if (sequence) step.refuse("the text stands there twice");
        sequence = true;
        continue;
      }
      const std::string name = step.within("SpecialToken").text("id");
      const auto ids = part.within("special_tokens").within(name.c_str()).list("ids");
      std::optional<std::int32_t>& place = sequence ? file_.after : file_.before;
      if (ids.size() != 1 || place) step.refuse("more than one token before or after the text");
      const SortedJson& id = ids[0].json();
      const auto token = std::ranges::find_if(
          file_.added, [&](const AddedToken& added) { return id == SortedJson(added.id); });
      if (token == file_.added.end()) ids[0].refuse("not the id of an added token");
      place = token->id;
    }
    if (!sequence) part.refuse("the text is not in it");
  }

  const std::string& path_;
  JsonScanner top_;
  BpeFile file_;
  std::vector<bool> taken_;  // ids that have a token
};

}  // namespace

BpeFile read_bpe_file(const std::string& path, std::string_view text) {
  return BpeFileReader(path, text).read();
}

std::optional<std::string> read_eos_token(const std::string& path, std::string_view config) {
  const SortedJson json = parse_sorted_json(config);
  const JsonPart part(path, kBpeConfigFile, json);
  const SortedJson& eos = part.value("eos_token");
  if (eos.is_null()) return std::nullopt;
  return eos.is_string() ? eos.get<std::string>() : part.within("eos_token").text("content");
}

}  // namespace lockstep
