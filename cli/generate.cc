#include <fmt/format.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <iostream>
#include <iterator>
#include <memory>
#include <span>
#include <utility>

#include "cli/commands.h"
#include "cli/options.h"
#include "lockstep/base/cores.h"
#include "lockstep/base/error.h"
#include "lockstep/base/thread_pool.h"
#include "lockstep/base/utf8.h"
#include "lockstep/files/file_source.h"
#include "lockstep/model/cpu/decoder.h"
#include "lockstep/model/gpu_decoder.h"
#include "lockstep/run/device.h"
#include "lockstep/run/memory.h"
#include "lockstep/train/checkpoint/folders.h"
#include "lockstep/train/sampler.h"

namespace lockstep::cli {
namespace {

constexpr const char* kGenerateExplanation =
    R"(MODEL is a folder that `lockstep train --out` left, one of its checkpoints, or any LlamaForCausalLM of
Hugging Face in safetensors with a SentencePiece tokenizer.model or a byte-level BPE in tokenizer.json. The text goes
to standard output, the prompt first. The same seed gives the same text; of several samples each has the next seed,
which stands above it. On a GPU numbers differ in the last bits, and so may the text.

  lockstep generate my-model --prompt "Once upon a time" --temperature 0.7 --top-p 0.95 --seed 3
  lockstep generate my-model --prompt - --samples 3 < beginning.txt)";

struct GenerateFlags {
  std::string model;
  std::string prompt;
  std::int64_t tokens = 1000;
  std::uint64_t samples = 1;
  SamplerOptions sampler;
  std::string device = "cpu";
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

// All of standard input. The end of its last line is not part of the prompt.
std::string prompt_from_input() {
  std::string text{std::istreambuf_iterator<char>(std::cin), {}};
  if (text.ends_with('\n')) text.pop_back();
  return text;
}

SavedModel open_model(const std::string& folder) {
  if (!std::filesystem::is_directory(folder)) {
    const bool file = std::filesystem::exists(folder);
    throw Error(ErrorCode::kIo,
                fmt::format("{}: {}; a model is a folder with config.json and model.safetensors",
                            folder, file ? "this is a file" : "there is no such folder"));
  }
  StoredFiles files(folder);
  const ModelConfig config =
      parse_config_json(files.path(kConfigFile), files.text(kConfigFile)).model;
  if (const auto why =
          model_memory_refusal(config, config.context, available_memory().value_or(SIZE_MAX))) {
    throw Error(ErrorCode::kInvalidArgument, *why);
  }
  SavedModel model = load_model(folder);
  if (!model.tokenizer) {
    throw Error(ErrorCode::kIo,
                fmt::format("{}: there is no tokenizer, so tokens cannot become text{}{}", folder,
                            model.no_tokenizer.empty() ? "" : ": ", model.no_tokenizer));
  }
  return model;
}

// The tokens of the prompt, behind the one that begins a document where there is one.
std::vector<std::int32_t> encode_prompt(const SavedModel& model, const std::string& text) {
  if (const auto position = find_not_utf8(text)) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("the prompt is not UTF-8 at byte {}", *position));
  }
  std::vector<std::int32_t> tokens;
  if (model.start) tokens.push_back(*model.start);
  model.tokenizer->encode(text, tokens);
  if (tokens.empty()) {
    throw Error(ErrorCode::kInvalidArgument, "this model needs a --prompt to begin with");
  }
  return tokens;
}

// Prompt and continuation, as it comes. The reader forgets what it has read before.
void write_text(SequenceReader& reader, int context, const Tokenizer& tokenizer,
                std::span<const std::int32_t> prompt, const std::string& shown,
                const SamplerOptions& sampler, std::int64_t tokens) {
  reader.truncate(0);
  std::vector<std::int32_t> text;
  tokenizer.encode(shown, text);
  TextPrinter printer;
  printer.print(tokenizer.decode(text));
  generate_tokens(reader, context, prompt, sampler, tokens, tokenizer.end_of_document(),
                  [&](std::int32_t token) {
                    text.push_back(token);
                    printer.print(tokenizer.decode(text));
                    return std::ferror(stdout) == 0;
                  });
  std::fputs("\n", stdout);
}

int run_generate(const GenerateFlags& options) {
  const bool gpu = choose_device(options.device) == "cuda";
  const SavedModel model = open_model(options.model);
  const std::string text = options.prompt == "-" ? prompt_from_input() : options.prompt;
  const std::vector<std::int32_t> prompt = encode_prompt(model, text);
  ThreadPool pool(options.threads > 0 ? options.threads : available_cores());
  const ParameterLayout layout(model.config);
  std::unique_ptr<SequenceReader> reader;
  int context = model.config.context;
  if (gpu) {  // every token costs a pass over the whole context
    const auto longest = static_cast<std::int64_t>(prompt.size()) + options.tokens;
    context = static_cast<int>(std::min<std::int64_t>(context, longest));
    auto on_gpu = make_gpu_model(gpu_decoder_options(model.config, context));
    on_gpu->set_parameters(model.parameters.span());
    reader = std::make_unique<GpuDecoder>(std::move(on_gpu), context);
  } else {
    reader = std::make_unique<Decoder>(layout, model.parameters.span(), Precision::kF32, pool);
  }
  SamplerOptions sampler = options.sampler;
  sampler.vocab = model.tokenizer->vocab();
  for (std::uint64_t sample = 0; sample < options.samples && std::ferror(stdout) == 0; ++sample) {
    if (options.samples > 1)
      fmt::print("{}--- seed {} ---\n", sample > 0 ? "\n" : "", sampler.seed);
    write_text(*reader, context, *model.tokenizer, prompt, text, sampler, options.tokens);
    ++sampler.seed;
  }
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
  command
      .add_option("--prompt", options->prompt,
                  "What the text begins with; - reads it from standard input")
      ->option_text("TEXT");
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
      ->transform(any_seed())
      ->option_text("N [0]");
  command
      .add_option("--samples", options->samples,
                  "Several texts, with this seed and those that follow it")
      ->transform(whole_number(1, 1 << 20))
      ->option_text("N [1]");
  add_device_option(command, options->device);
  command.add_option("--threads", options->threads, "Compute threads")
      ->transform(whole_number(1, 1024))
      ->option_text("N [all cores]");
  command.callback([options, &action] { action = [options] { return run_generate(*options); }; });
}

}  // namespace lockstep::cli
