#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
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
  // Of a mix: what a path of --data has given. The shards of the parts follow each other.
  struct Part {
    std::string name;  // for people
    double weight = 0;
    std::size_t training = 0;  // shards
    std::size_t validation = 0;
  };
  std::vector<Part> mix;           // empty: one source
  std::vector<std::string> notes;  // what people should know of it
};

// The tokenizer of the model that training starts from.
struct ModelTokenizer {
  std::string model;                           // its folder, for people
  std::shared_ptr<const Tokenizer> tokenizer;  // none: it was trained on tokens made elsewhere
  bool same_run = false;  // the run goes on: its tokenizer was trained on its data
};

struct TokenizerChoice {
  // "bytes"; "sentencepiece" or "bpe" (trained on the text); a .model or tokenizer.json file, or
  // the folder that has one.
  std::string name = {};
  std::uint32_t vocab = 0;  // tokens to train, or the vocabulary of shards that do not say
  // Text is encoded with the tokenizer of this model. Another tokenizer is refused unless `force`.
  std::optional<ModelTokenizer> inherited = {};
  bool force = false;
};

// Opens text files, shards, and folders of either; at least one path, which may have wildcards.
// Throws Error{kIo} for input that is broken, with file and position, and Error{kInvalidArgument}
// for what does not go together. With weights, one for each path, the paths are mixed.
DataSource open_data(const std::vector<std::string>& paths, const TokenizerChoice& tokenizer = {},
                     const std::vector<double>& weights = {});

// Texts in memory, each of them a document.
struct Documents {
  std::string name;  // for people
  std::vector<std::string> texts;
  double entropy_per_byte = 0;  // of where they come from, in bits; 0: not known
};
DataSource encode_documents(const Documents& documents, const TokenizerChoice& tokenizer = {});

// The files that a path stands for: itself, those of a pattern, and of a folder its shards (.bin)
// or else its texts (.txt); without `shards` always the texts. Throws as open_data() does.
std::vector<std::string> files_of_data(const std::string& path, bool shards = true);

// Any bytes would do for tokens: somebody has to say that they are. Throws Error{kInvalidArgument}.
[[noreturn]] void refuse_without_header(const std::string& path);

// The tokenizer of that name; with no name: bytes. Only one that is trained reads the texts. Throws
// Error{kInvalidArgument} for a vocabulary that the tokenizer cannot have.
std::shared_ptr<const Tokenizer> make_tokenizer(const TokenizerChoice& choice,
                                                std::span<const std::string_view> texts);

// Whether a file's name says that it is for validation: val.txt, fineweb_val_000000.bin.
bool is_for_validation(const std::string& path);

}  // namespace lockstep
