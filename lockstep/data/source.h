#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "lockstep/data/token_shard.h"
#include "lockstep/data/tokenizer.h"

namespace lockstep {

// What a run trains on, from wherever it comes.
struct DataSource {
  std::string name;  // for people
  std::vector<TokenShard> training;
  std::vector<TokenShard> validation;          // empty: to be split off the training shards
  std::shared_ptr<const Tokenizer> tokenizer;  // none: shards made elsewhere
  std::uint32_t vocab = 0;
  double bytes_per_token = 0;   // 0: not known
  double entropy_per_byte = 0;  // of the source, in bits; 0: not known
};

struct DataOptions {
  std::vector<std::string> paths =
      {};                      // text files, shards, folders of shards; none: built-in stories
  std::string tokenizer = {};  // "bytes", "sentencepiece" (trained on the text), or a .model file
  std::uint32_t vocab = 0;     // pieces to train, or the vocabulary of shards that do not say
  std::uint64_t stories = 20'000;
  std::uint64_t seed = 0;  // of the stories
};

// Throws Error{kIo} for input that is broken, with file and position, and Error{kInvalidArgument}
// for what does not go together.
DataSource open_data(const DataOptions& options);

// "bytes", "sentencepiece" or a file, applied to texts. With no name: bytes.
std::shared_ptr<const Tokenizer> make_tokenizer(const std::string& name, std::uint32_t vocab,
                                                std::span<const std::string_view> texts);

// Whether a file's name says that it is for validation: val.bin, fineweb_val_000000.bin.
bool is_for_validation(const std::string& path);

}  // namespace lockstep
