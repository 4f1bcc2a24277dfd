#include "lockstep/data/shard_builder.h"

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>

#include "lockstep/base/error.h"
#include "lockstep/files/atomic_file.h"
#include "lockstep/files/storage.h"

namespace lockstep {
namespace {

constexpr std::size_t kPiece = 1 << 20;  // bytes of text at once, then up to a place to cut

std::string shard_folder_text(const std::string& path) {
  const auto file = disk().open(path);
  return file->text(file->size());
}

}  // namespace

std::vector<std::string> shards_in(const std::string& folder) {
  std::vector<std::string> paths;
  std::error_code error;
  for (const auto& entry : std::filesystem::directory_iterator(folder, error)) {
    if (entry.path().extension() == ".bin") paths.push_back(entry.path());
  }
  if (error) throw_io("reading the folder " + folder, error.value());
  std::ranges::sort(paths);
  return paths;
}

ShardBuilder::ShardBuilder(const Options& options, const Tokenizer& tokenizer)
    : options_(options), tokenizer_(tokenizer) {
  make_folder(options_.folder);
  if (const auto there = shards_in(options_.folder); !there.empty()) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("{} is there already: shards of two runs do not mix", there[0]));
  }
  for (const TokenizerFile& made : tokenizer_.files()) {
    const std::string path = fmt::format("{}/{}", options_.folder, made.name);
    if (std::filesystem::exists(path) && shard_folder_text(path) != made.bytes) {
      throw Error(ErrorCode::kInvalidArgument,
                  fmt::format("{} is there already, and is another tokenizer: shards need a folder "
                              "of their own",
                              path));
    }
  }
  for (const TokenizerFile& made : tokenizer_.files()) {
    write_file(fmt::format("{}/{}", options_.folder, made.name), made.bytes);
  }
}

void ShardBuilder::for_validation() {
  if (writer_) end_shard();
  validation_ = true;
  part_shards_ = 0;
}

void ShardBuilder::add_document(std::string_view text,
                                const std::function<void(std::size_t)>& progress) {
  std::size_t done = 0;
  while (done < text.size()) {
    const std::size_t end = done + tokenizer_.piece_end(text.substr(done), kPiece);
    if (done == 0 && tokenizer_.start_of_document()) {
      tokens_.push_back(*tokenizer_.start_of_document());
    }
    tokenizer_.encode(text.substr(done, end - done), tokens_);
    std::size_t bytes = end - done;
    if (end == text.size() && tokenizer_.end_of_document()) {
      tokens_.push_back(*tokenizer_.end_of_document());
      ++bytes;
    }
    done = end;
    if (progress) progress(done);  // may throw: then nothing of the piece is in a shard
    write(bytes);
  }
  ++totals_.documents;
}

void ShardBuilder::write(std::size_t text_bytes) {
  if (!writer_) {
    ShardHeader header = shard_header_for(tokenizer_);
    header.entropy_per_byte = options_.entropy_per_byte;
    writer_ =
        std::make_unique<ShardWriter>(fmt::format("{}/{}_{:05}.bin", options_.folder,
                                                  validation_ ? "val" : "shard", part_shards_++),
                                      header);
    ++totals_.shards;
  }
  writer_->write(tokens_);
  shard_tokens_ += tokens_.size();
  shard_text_bytes_ += text_bytes;
  totals_.tokens += tokens_.size();
  totals_.text_bytes += text_bytes;
  tokens_.clear();
  if (shard_tokens_ >= options_.shard_tokens) end_shard();
}

void ShardBuilder::end_shard() {
  writer_->commit(shard_text_bytes_);
  writer_.reset();
  shard_tokens_ = 0;
  shard_text_bytes_ = 0;
}

ShardBuilder::Totals ShardBuilder::finish() {
  if (writer_) end_shard();
  return totals_;
}

}  // namespace lockstep
