#include <fmt/format.h>

#include <cstdio>
#include <filesystem>

#include "cli/commands.h"
#include "cli/options.h"
#include "lockstep/base/cores.h"
#include "lockstep/base/error.h"
#include "lockstep/base/utf8.h"
#include "lockstep/train/checkpoint/folders.h"
#include "lockstep/train/sampler.h"

namespace lockstep::cli {
namespace {

constexpr const char* kGenerateExplanation =
    R"(MODEL is a folder that `lockstep train --out` left, one of its checkpoints, or any LlamaForCausalLM of
Hugging Face in safetensors with a SentencePiece tokenizer.model or a byte-level BPE in tokenizer.json. The text goes
to standard output, the prompt first. The same seed gives the same text.

  lockstep generate my-model --prompt "Once upon a time" --temperature 0.7 --top-p 0.95 --seed 3)";

struct GenerateFlags {
  std::string model;
  std::string prompt;
  std::int64_t tokens = 1000;
  SamplerOptions sampler;
  int threads = 0;
};

// Writes what is new in a text that grows, in whole characters. A model of bytes may well write
// what is no UTF-8.
class TextPrinter {
 public:
  void print(std::string_view text) {
    const std::size_t whole = whole_characters(text);
    if (whole <= printed_) return;
    fmt::print("{}", repair_utf8(text.substr(printed_, whole - printed_)));
    std::fflush(stdout);
    printed_ = whole;
  }

 private:
  std::size_t printed_ = 0;
};

int run_generate(const GenerateFlags& options) {
  if (!std::filesystem::is_directory(options.model)) {
    throw Error(ErrorCode::kIo,
                fmt::format("{}: there is no such folder; a model is a folder with config.json and "
                            "model.safetensors",
                            options.model));
  }
  const SavedModel model = load_model(options.model);
  if (!model.tokenizer) {
    throw Error(
        ErrorCode::kIo,
        fmt::format("{}: there is no tokenizer, so tokens cannot become text{}{}", options.model,
                    model.no_tokenizer.empty() ? "" : ": ", model.no_tokenizer));
  }
  if (const auto position = find_not_utf8(options.prompt)) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("--prompt is not UTF-8 at byte {}", *position));
  }
  const Tokenizer& tokenizer = *model.tokenizer;
  std::vector<std::int32_t> prompt;
  if (model.start) prompt.push_back(*model.start);
  const std::size_t before = prompt.size();
  tokenizer.encode(options.prompt, prompt);
  if (prompt.empty()) {
    throw Error(ErrorCode::kInvalidArgument, "this model needs a --prompt to begin with");
  }
  std::vector<std::int32_t> text(prompt.begin() + static_cast<std::ptrdiff_t>(before),
                                 prompt.end());

  SamplerOptions sampler = options.sampler;
  sampler.vocab = tokenizer.vocab();
  ThreadPool pool(options.threads > 0 ? options.threads : available_cores());
  const ParameterLayout layout(model.config);
  Decoder decoder(layout, model.parameters.span(), Precision::kF32, pool);
  TextPrinter printer;
  printer.print(tokenizer.decode(text));
  generate_tokens(decoder, model.config.context, prompt, sampler, options.tokens,
                  tokenizer.end_of_document(), [&](std::int32_t token) {
                    text.push_back(token);
                    printer.print(tokenizer.decode(text));
                    return std::ferror(stdout) == 0;
                  });
  std::fputs("\n", stdout);
  return 0;
}

}  // namespace

void add_generate(CLI::App& app, Action& action) {
  CLI::App& command = *app.add_subcommand("generate", "Write text with a trained model.");
  command.footer(kGenerateExplanation);
  const auto options = std::make_shared<GenerateFlags>();
  command.add_option("model", options->model, "The model's folder")
      ->required()
      ->option_text("MODEL");
  command.add_option("--prompt", options->prompt, "What the text begins with")->option_text("TEXT");
  command.add_option("--tokens", options->tokens, "At most so many tokens")
      ->transform(whole_number(1, std::int64_t{1} << 40))
      ->option_text("N [1000]");
  command
      .add_option("--temperature", options->sampler.temperature,
                  "Lower is more predictable, higher more varied; 0: always the likeliest token")
      ->transform(real_number(0))
      ->option_text("X [0.8]");
  command.add_option("--top-k", options->sampler.top_k, "Only the K likeliest; 0: all")
      ->transform(whole_number(0, std::int64_t{1} << 50))
      ->option_text("K [0]");
  command
      .add_option("--top-p", options->sampler.top_p,
                  "Only the likeliest that together have this probability")
      ->transform(real_number(0.0, 1.0))
      ->option_text("P [1]");
  command.add_option("--seed", options->sampler.seed, "Which of the possible texts")
      ->option_text("N [0]");
  command.add_option("--threads", options->threads, "Compute threads")
      ->transform(whole_number(1, 1024))
      ->option_text("N [all cores]");
  command.callback([options, &action] { action = [options] { return run_generate(*options); }; });
}

}  // namespace lockstep::cli
