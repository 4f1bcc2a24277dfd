#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "lockstep/data/token_shard.h"
#include "lockstep/data/tokenizer.h"

namespace lockstep {

// Documents to a folder of shards, shard_00000.bin and so on, and the tokenizer's files beside
// them. Throws Error{kInvalidArgument} when the folder has shards or another tokenizer already.
class ShardBuilder {
 public:
  struct Options {
    std::string folder = {};
    std::uint64_t shard_tokens = 100'000'000;  // a shard ends with the piece that reaches so many
    double entropy_per_byte = 0;               // for the header
  };
  struct Totals {
    std::uint64_t shards = 0;
    std::uint64_t documents = 0;
    std::uint64_t tokens = 0;
    std::uint64_t text_bytes = 0;
  };

  ShardBuilder(const Options& options, const Tokenizer& tokenizer);

  // `progress` is told the bytes of this document that are done, piece by piece. If it throws, no
  // shard has anything of that piece.
  void add_document(std::string_view text, const std::function<void(std::size_t)>& progress);
  // What is added from now on goes to val_00000.bin and so on, which training keeps for validation.
  void for_validation();
  // The last shard is complete only now.
  Totals finish();

 private:
  void write(std::size_t text_bytes);
  void end_shard();

  const Options options_;
  const Tokenizer& tokenizer_;
  Totals totals_;
  std::unique_ptr<ShardWriter> writer_;
  std::vector<std::int32_t> tokens_;  // of the piece under way
  bool validation_ = false;
  std::uint64_t part_shards_ = 0;   // for training, or for validation
  std::uint64_t shard_tokens_ = 0;  // in the shard under way
  std::uint64_t shard_text_bytes_ = 0;
};

// The files of a folder that end in .bin, by name.
std::vector<std::string> shards_in(const std::string& folder);

}  // namespace lockstep
