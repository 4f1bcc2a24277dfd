#include "cli/train_options.h"

#include "cli/options_file.h"

namespace lockstep::cli {
namespace {

constexpr const char* kExplanation =
    R"(--data takes text files, token shards (those of `lockstep data`, of llm.c, of nanoGPT), or folders of
shards; files named val or validation are kept for validation, otherwise one sample in twenty is. Without
--data the model learns the built-in stories. Sizes that are not given are chosen to fit the data.

A step is cut into global-batch / micro-batch lanes, whose gradients are added in one fixed tree. The same
options and data give the same weights, bit for bit, for any number of threads; micro-batch is part of
the result.

--out DIR gets model.safetensors, config.json, the tokenizer, and metrics.jsonl with one object per step;
with --save-every also checkpoint-STEP folders, each complete or not there. The same command with --resume
goes on from the newest intact one and ends with the same weights as a run that was never stopped.
Ctrl-C stops after the step under way and saves. The last line is the hash of the weights.
Exit codes: 0 done, 1 failed, 2 wrong usage, 3 halted on a value that is not finite, 130 and 143 stopped.

  lockstep train --data my.txt --out my-model
  lockstep generate my-model --prompt "Once")";

// An option whose values are names that `parse` knows.
template <typename Value, typename Parse>
CLI::Option* add_named(CLI::App& command, const std::string& flag, Value& chosen, Parse parse,
                       const std::vector<std::string>& names, const std::string& text,
                       const std::string& description) {
  return command
      .add_option_function<std::string>(
          flag, [&chosen, parse](const std::string& name) { chosen = *parse(name); }, description)
      ->check(CLI::IsMember(names))
      ->option_text(text);
}

void add_data_options(CLI::App& command, TrainOptions& options) {
  const char* group = "Data";
  command
      .add_option("--data", options.data.paths, "Text files, token shards, or folders of shards")
      ->option_text("PATH ... [built-in stories]")
      ->group(group);
  command
      .add_option(
          "--tokenizer", options.data.tokenizer,
          "For text: bytes, sentencepiece (trained on the text), or a SentencePiece .model file")
      ->option_text("NAME [bytes]")
      ->group(group);
  command
      .add_option("--vocab", options.vocab,
                  "Pieces for sentencepiece; otherwise the model's vocabulary")
      ->check(CLI::Range(1, 1 << 24))
      ->option_text("N")
      ->group(group);
}

void add_model_options(CLI::App& command, ModelConfig& model) {
  const char* group = "Model (what is not given is chosen to fit the data)";
  const auto size = [&](const char* flag, int& value, const char* description) {
    command.add_option(flag, value, description)
        ->check(CLI::Range(1, 1 << 24))
        ->option_text("N")
        ->group(group);
  };
  size("--context", model.context, "Tokens of a sample");
  size("--hidden", model.hidden, "Width, a multiple of 16");
  size("--layers", model.layers, "Blocks");
  size("--heads", model.heads, "Attention heads");
  size("--kv-heads", model.kv_heads, "Heads of keys and values, which divide the heads");
  size("--intermediate", model.intermediate, "Width of the feed-forward layers");
  command
      .add_flag("--tie-embeddings", model.tie_embeddings, "One matrix for embedding and lm_head")
      ->group(group);
}

void add_training_options(CLI::App& command, TrainOptions& options) {
  const char* group = "Training";
  const auto add = [&](const char* flag, auto& value, const char* text, const char* description) {
    return command.add_option(flag, value, description)->option_text(text)->group(group);
  };
  add("--steps", options.steps, "N [10 tokens per parameter]", "Steps")
      ->check(CLI::Range(std::int64_t{0}, std::int64_t{1} << 50));
  add("--global-batch", options.global_batch, "N [16]", "Samples of a step")
      ->check(CLI::Range(1, 1 << 24));
  add("--micro-batch", options.micro_batch, "N [8]",
      "Samples of a lane, which divide the global batch")
      ->check(CLI::Range(1, 1 << 24));
  add("--lr", options.learning_rate, "RATE [by width]", "Highest learning rate")
      ->check(CLI::NonNegativeNumber);
  add("--warmup", options.warmup, "N [a twentieth]", "Steps until it is reached")
      ->check(CLI::NonNegativeNumber);
  add_named(command, "--schedule", options.decay, parse_decay, {"cosine", "linear", "constant"},
            "NAME [cosine]", "How it falls after that: cosine, linear or constant")
      ->group(group);
  add("--weight-decay", options.weight_decay, "X [0.1]", "Decoupled, not on norms")
      ->check(CLI::NonNegativeNumber);
  add("--clip", options.clip, "X [1]", "Longest gradient; 0 does not clip")
      ->check(CLI::NonNegativeNumber);
  add("--seed", options.seed, "N [0]",
      "Of the first weights, the order of samples and the stories");
  add("--init", options.init, "DIR [fresh weights]", "Start from the weights of this model");
}

void add_checkpoint_options(CLI::App& command, TrainOptions& options) {
  const char* group = "Checkpoints (in --out)";
  command
      .add_option("--save-every", options.save_every,
                  "Steps between checkpoints, and one after the last; 0: none")
      ->check(CLI::NonNegativeNumber)
      ->option_text("N [0]")
      ->group(group);
  command.add_option("--keep-last", options.keep_last, "Checkpoints to keep; 0: all")
      ->check(CLI::NonNegativeNumber)
      ->option_text("N [3]")
      ->group(group);
  command
      .add_flag("--save-wait", options.save_wait,
                "Wait when one is due before the last is written; else it is skipped")
      ->group(group);
  command
      .add_flag("--resume", options.resume,
                "Go on from the newest intact checkpoint; begin anew when there is none")
      ->group(group);
}

void add_run_options(CLI::App& command, TrainOptions& options) {
  const char* group = "Run";
  command.add_option("--out", options.out, "Folder for weights and metrics")
      ->option_text("DIR")
      ->group(group);
  command.add_option("--threads", options.threads, "Compute threads")
      ->check(CLI::Range(1, 1024))
      ->option_text("N [all cores]")
      ->group(group);
  add_named(
      command, "--precision", options.precision,
      [](const std::string& name) -> std::optional<Precision> {
        return name == "bf16" ? Precision::kBf16 : Precision::kF32;
      },
      {"fp32", "bf16"}, "NAME [fp32]", "Of matrix products: fp32 or bf16")
      ->group(group);
  command
      .add_option("--eval-every", options.eval_every, "Steps between validations; 0: only the last")
      ->check(CLI::NonNegativeNumber)
      ->option_text("N [a tenth]")
      ->group(group);
  add_named(command, "--log", options.log, parse_log_style, {"bar", "plain", "json"}, "NAME",
            "bar (on a terminal), plain lines, or json: one object per step")
      ->group(group);
  add_options_file(command, options.config)->group(group);
}

}  // namespace

void add_train_options(CLI::App& command, TrainOptions& options) {
  command.footer(kExplanation);
  add_data_options(command, options);
  add_model_options(command, options.model);
  add_training_options(command, options);
  add_run_options(command, options);
  add_checkpoint_options(command, options);
}

}  // namespace lockstep::cli
