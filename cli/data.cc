#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <iostream>
#include <iterator>
#include <span>

#include "cli/commands.h"
#include "cli/options.h"
#include "cli/stories/stories.h"
#include "lockstep/base/error.h"
#include "lockstep/base/log.h"
#include "lockstep/base/utf8.h"
#include "lockstep/data/shard_builder.h"
#include "lockstep/data/source.h"
#include "lockstep/files/mapped_file.h"
#include "lockstep/files/storage.h"
#include "lockstep/report/progress.h"

namespace lockstep::cli {
namespace {

constexpr const char* kDataExplanation =
    R"(Text files must be UTF-8; each is one document. A folder stands for its .txt files, a quoted pattern ('web/*.txt')
for those it matches, - for standard input. Files with val, valid or validation in their name (val.txt) become shards
of their own, val_00000.bin, which training keeps for validation. Shards are read piece by piece when they are trained on, so they
may be larger than memory; docs/data_format.md specifies them. `lockstep train` takes the folder.

  lockstep data book.txt letters.txt --out shards                          bytes, no files needed
  lockstep data book.txt --out shards --tokenizer sentencepiece --vocab 4096
  lockstep data book.txt --out shards --tokenizer bpe --vocab 8192         learns a tokenizer.json
  lockstep data book.txt --out shards --tokenizer Qwen2.5/tokenizer.json   byte-level BPE of Hugging Face
  lockstep data --stories 20000 --out stories                              the built-in corpus
  lockstep data --stories 3 --print                                        a look at it
  lockstep data --check shards                                             reads every token once)";

struct DataFlags {
  std::vector<std::string> files;
  std::string out;
  TokenizerChoice tokenizer;
  std::uint64_t stories = 0;
  std::uint64_t seed = 0;
  std::uint64_t shard_tokens = 100'000'000;
  bool print = false;
  bool check = false;
};

[[noreturn]] void refuse(const std::string& message) {
  throw Error(ErrorCode::kInvalidArgument, message);
}

// Percent done, on a terminal only and a few times a second.
class Percent {
 public:
  explicit Percent(std::size_t total) : total_(total), shown_(::isatty(STDERR_FILENO) != 0) {}
  ~Percent() {
    if (drawn_) std::fputs("\r\x1b[K", stderr);
  }
  void done(std::size_t bytes) {
    const auto now = std::chrono::steady_clock::now();
    if (!shown_ || now - last_ < std::chrono::milliseconds(200)) return;
    last_ = now;
    drawn_ = true;
    fmt::print(stderr, "\r{} of {}B, {}%\x1b[K", short_number(static_cast<double>(bytes)),
               short_number(static_cast<double>(total_)),
               bytes * 100 / std::max<std::size_t>(total_, 1));
    std::fflush(stderr);
  }

 private:
  std::size_t total_;
  bool shown_;
  bool drawn_ = false;
  std::chrono::steady_clock::time_point last_;
};

struct Texts {
  std::vector<std::string_view> training;
  std::vector<std::string_view> validation = {};  // no tokenizer learns from it
  std::vector<MappedFile> files = {};             // whose texts they are

  void require_whole() const {
    for (const MappedFile& file : files) file.require_whole();
  }
};

void build(const DataFlags& options, const Texts& texts, double entropy) {
  const auto tokenizer = make_tokenizer(options.tokenizer, texts.training);
  texts.require_whole();
  std::size_t total = 0;
  for (const auto* part : {&texts.training, &texts.validation}) {
    for (const std::string_view text : *part) total += text.size();
  }
  ShardBuilder builder({options.out, options.shard_tokens, entropy}, *tokenizer);
  ShardBuilder::Totals totals;
  {
    Percent percent(total);
    std::size_t before = 0;
    const auto add = [&](std::span<const std::string_view> part) {
      for (const std::string_view text : part) {
        builder.add_document(text, [&](std::size_t bytes) {
          texts.require_whole();
          percent.done(before + bytes);
        });
        before += text.size();
      }
    };
    add(texts.training);
    if (!texts.validation.empty()) builder.for_validation();
    add(texts.validation);
    totals = builder.finish();
  }
  const std::size_t kept = texts.validation.size();
  fmt::print("{}: {} document{}{}, {} tokens of {}, {:.3f} bytes per token, {} shard{}\n",
             options.out, totals.documents, totals.documents == 1 ? "" : "s",
             kept > 0 ? fmt::format(" ({} for validation)", kept) : "", totals.tokens,
             tokenizer->vocab(),
             static_cast<double>(totals.text_bytes) / static_cast<double>(totals.tokens),
             totals.shards, totals.shards == 1 ? "" : "s");
}

bool is_standard_input(const std::string& path) { return path == "-" || path == "/dev/stdin"; }

std::string text_of_input() {
  std::string text{std::istreambuf_iterator<char>(std::cin), {}};
  if (text.empty()) throw_bad_file("standard input", "there is no text");
  if (const auto position = find_not_utf8(text)) {
    throw_bad_file("standard input", fmt::format("byte {}: not UTF-8", *position));
  }
  return text;
}

int build_from_files(const DataFlags& options) {
  std::vector<std::string> paths;
  for (const std::string& given : options.files) {
    if (is_standard_input(given)) continue;
    const std::vector<std::string> files = files_of_data(given, false);
    paths.insert(paths.end(), files.begin(), files.end());
  }
  Texts texts;
  std::string input;
  if (std::ranges::any_of(options.files, is_standard_input)) {
    input = text_of_input();
    texts.training.push_back(input);
  }
  // As in training: files whose name says so, if there are others.
  const bool others = !input.empty() || std::ranges::any_of(paths, [](const std::string& path) {
    return !is_for_validation(path);
  });
  texts.files.reserve(paths.size());
  for (const std::string& path : paths) {
    texts.files.emplace_back(path);
    (others && is_for_validation(path) ? texts.validation : texts.training)
        .push_back(text_of(texts.files.back()));
  }
  if (texts.training.empty()) refuse("there is no text in what was given");
  build(options, texts, 0);
  return 0;
}

int build_stories(const DataFlags& options) {
  const Documents stories = built_in_stories(options.seed, options.stories);
  if (options.print) {
    for (const std::string& story : stories.texts) fmt::print("{}\n\n", story);
  }
  const double entropy = stories.entropy_per_byte;
  if (!options.out.empty()) {
    build(options, {.training = {stories.texts.begin(), stories.texts.end()}}, entropy);
  }
  const GrammarMeans means = expected(story_grammar());
  fmt::print(
      "entropy of the grammar: {:.3f} bits per story of {:.1f} bytes, {:.5f} bits per byte\n",
      means.bits, means.bytes, entropy);
  return 0;
}

std::string_view name_of(ShardFormat format) {
  switch (format) {
    case ShardFormat::kLockstep: return "lockstep";
    case ShardFormat::kLlmC: return "llm.c";
    case ShardFormat::kNanoGpt: return "nanoGPT";
  }
  return "";
}

int check(const DataFlags& options) {
  for (const std::string& path : options.files) {
    const bool folder = std::filesystem::is_directory(path);
    const auto shards = folder ? shards_in(path) : std::vector<std::string>{path};
    if (shards.empty()) throw_bad_file(path, "no .bin files in this folder");
    for (const std::string& name : shards) {
      if (is_hash_file(name)) continue;
      const std::string begin = disk().open(name)->text(kLongestShardHeader);
      if (options.tokenizer.vocab == 0 && !has_shard_magic(std::as_bytes(std::span(begin)))) {
        refuse_without_header(name);
      }
      const TokenShard shard = TokenShard::open(name);
      const std::uint32_t vocab = std::max(shard.header().vocab, options.tokenizer.vocab);
      const std::uint32_t largest = shard.largest(vocab);
      shard.payload().read_all();  // throws where the header has another hash
      fmt::print("{}: {}, {} tokens of {} bytes, largest {}, vocabulary {}\n", name,
                 name_of(shard.format()), shard.size(), shard.header().token_bytes, largest, vocab);
    }
  }
  return 0;
}

int run_data(const DataFlags& options) {
  if (options.check) {
    if (options.files.empty()) refuse("--check needs shards to read");
    return check(options);
  }
  if ((options.stories > 0) == !options.files.empty())
    refuse("give either text files or --stories N");
  const std::string& tokenizer = options.tokenizer.name;
  if (options.tokenizer.vocab != 0 && tokenizer != "sentencepiece" && tokenizer != "bpe") {
    refuse("--vocab is for a tokenizer that is trained: --tokenizer sentencepiece or bpe");
  }
  if (options.out.empty() && !(options.print && options.stories > 0)) {
    refuse("--out DIR is needed, for the shards");
  }
  return options.stories > 0 ? build_stories(options) : build_from_files(options);
}

}  // namespace

void add_data(CLI::App& app, Action& action) {
  CLI::App& command =
      *app.add_subcommand("data", "Turn text into token shards; make the built-in corpus.");
  command.footer(kDataExplanation);
  const auto options = std::make_shared<DataFlags>();
  command
      .add_option("files", options->files, "Text files, or folders of them; - is standard input")
      ->option_text("FILE ...");
  command.add_option("--out", options->out, "Folder for the shards")->option_text("DIR");
  command
      .add_option("--tokenizer", options->tokenizer.name,
                  "bytes; sentencepiece or bpe (trained on the text); a tokenizer.json or .model "
                  "file, or the folder that has it")
      ->check(tokenizer_name())
      ->option_text("NAME or FILE [bytes]");
  command
      .add_option("--vocab", options->tokenizer.vocab,
                  "Tokens of a sentencepiece or bpe that is trained; with --check the vocabulary "
                  "of shards without a header")
      ->transform(whole_number(1, 1 << 24))
      ->option_text("N [4096]");
  command.add_option("--stories", options->stories, "Make N stories of the built-in corpus")
      ->transform(whole_number(0, std::int64_t{1} << 40))
      ->option_text("N");
  command.add_option("--seed", options->seed, "Seed of the stories")
      ->transform(any_seed())
      ->option_text("N [0]");
  command
      .add_option("--shard-tokens", options->shard_tokens, "Begin a new shard after so many tokens")
      ->transform(whole_number(1, std::int64_t{1} << 50))
      ->option_text("N [100000000]");
  command.add_flag("--print", options->print, "Print the stories");
  command.add_flag("--check", options->check, "Read the given shards and say what they hold");
  command.callback([options, &action] { action = [options] { return run_data(*options); }; });
}

}  // namespace lockstep::cli
