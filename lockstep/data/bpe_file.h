#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "lockstep/data/split_pattern.h"

namespace lockstep {

// A token that is found in the text as it is, before the text is cut into words.
struct AddedToken {
  std::string content = {};
  std::int32_t id = 0;
  bool special = false;     // no part of the text when it is decoded
  bool normalized = false;  // found in the normalized text
  bool lstrip = false;      // takes the space before it
  bool rstrip = false;      // takes the space after it
};

// What a tokenizer.json says, checked.
struct BpeFile {
  std::unordered_map<std::string, std::int32_t> vocab = {};
  struct Merge {
    std::int32_t left;
    std::int32_t right;
    std::int32_t whole;
  };
  std::vector<Merge> merges = {};
  bool ignore_merges = false;  // a word of the vocabulary is one token, whatever the merges say
  std::vector<AddedToken> added = {};
  bool nfc = false;
  SplitPattern pattern = SplitPattern::kNone;
  bool prefix_space = false;
  std::optional<std::int32_t> before = {};  // a document, by the post-processor
  std::optional<std::int32_t> after = {};
};

// Reads a tokenizer.json that may be anything; `path` is for messages. Throws Error{kIo} with file
// and place, also for what is well said but not done here. Pure.
BpeFile read_bpe_file(const std::string& path, std::string_view text);

// The eos_token of a tokenizer_config.json; nothing when it has none. Throws as above; `path` is
// that of the tokenizer.json beside it.
std::optional<std::string> read_eos_token(const std::string& path, std::string_view config);

}  // namespace lockstep
