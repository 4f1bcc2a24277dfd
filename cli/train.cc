#include <fmt/format.h>

#include <atomic>
#include <csignal>
#include <optional>

#include "cli/commands.h"
#include "cli/options_file.h"
#include "lockstep/base/cores.h"
#include "lockstep/base/error.h"
#include "lockstep/base/log.h"
#include "lockstep/data/source.h"
#include "lockstep/model/weights_hash.h"
#include "lockstep/report/metrics.h"
#include "lockstep/report/training_log.h"
#include "lockstep/train/defaults.h"
#include "lockstep/train/model_files.h"
#include "lockstep/train/trainer.h"

namespace lockstep::cli {
namespace {

constexpr const char* kExplanation =
    R"(--data takes text files, token shards (those of `lockstep data`, of llm.c, of nanoGPT), or folders of
shards; files named val or validation are kept for validation, otherwise one sample in twenty is. Without
--data the model learns the built-in stories. Sizes that are not given are chosen to fit the data.

A step is cut into global-batch / micro-batch lanes, whose gradients are added in one fixed tree. The same
options and data give the same weights, bit for bit, for any number of threads; micro-batch is part of
the result.

--out DIR gets model.safetensors, config.json, the tokenizer, and metrics.jsonl with one object per step.
Ctrl-C stops after the step under way and saves. The last line is the hash of the weights.
Exit codes: 0 done, 1 failed, 2 wrong usage, 3 halted on a value that is not finite, 130 and 143 stopped.

  lockstep train --data my.txt --out my-model
  lockstep generate my-model --prompt "Once")";

struct Options {
  DataOptions data;
  std::string out;
  std::string init;
  std::string config;
  std::optional<std::int64_t> steps;
  std::uint64_t global_batch = 16;
  std::uint64_t micro_batch = 0;
  ModelConfig model;  // 0: chosen
  std::uint32_t vocab = 0;
  std::optional<double> learning_rate;
  std::optional<std::int64_t> warmup;
  Decay decay = Decay::kCosine;
  double weight_decay = 0.1;
  double clip = 1.0;
  std::uint64_t seed = 0;
  int threads = 0;
  Precision precision = Precision::kF32;
  std::optional<std::int64_t> eval_every;
  std::optional<LogStyle> log;
};

[[noreturn]] void refuse(const std::string& message) {
  throw Error(ErrorCode::kInvalidArgument, message);
}

// Set by the first SIGINT or SIGTERM; the second one finds the default action again.
std::atomic<int> g_stopped_by{0};

void stop_on_signals() {
  struct sigaction action {};
  action.sa_handler = [](int signal) { g_stopped_by.store(signal); };
  action.sa_flags = static_cast<int>(SA_RESETHAND) | SA_RESTART;
  ::sigaction(SIGINT, &action, nullptr);
  ::sigaction(SIGTERM, &action, nullptr);
}

std::uint64_t tokens_in(const std::vector<TokenShard>& shards) {
  std::uint64_t tokens = 0;
  for (const TokenShard& shard : shards) tokens += shard.size();
  return tokens;
}

// What the user gave, else the initial model's, else what fits the data.
ModelConfig choose_model(const Options& options, const DataSource& data,
                         const std::optional<SavedModel>& init) {
  ModelConfig model = init ? init->config : fitting_model(tokens_in(data.training));
  if (!init) model.vocab = static_cast<int>(std::max(data.vocab, options.vocab));
  const auto set = [&](int& value, int given, const char* flag) {
    if (given == 0 || given == value) return;
    if (init) refuse(fmt::format("{} {}, but the model of --init has {}", flag, given, value));
    value = given;
  };
  set(model.hidden, options.model.hidden, "--hidden");
  set(model.layers, options.model.layers, "--layers");
  set(model.heads, options.model.heads, "--heads");
  set(model.kv_heads, options.model.kv_heads, "--kv-heads");
  set(model.intermediate, options.model.intermediate, "--intermediate");
  if (!init && options.model.hidden != 0) {  // the rest follows the width
    if (options.model.heads == 0) model.heads = std::max(1, model.hidden / 32);
    if (options.model.kv_heads == 0) model.kv_heads = model.heads;
    if (options.model.intermediate == 0) model.intermediate = model.hidden * 3;
  } else if (!init && options.model.heads != 0 && options.model.kv_heads == 0) {
    model.kv_heads = model.heads;
  }
  if (options.model.context != 0) model.context = options.model.context;
  if (!init) model.tie_embeddings = options.model.tie_embeddings;
  if (static_cast<std::uint32_t>(model.vocab) < data.vocab) {
    refuse(fmt::format("the data has a vocabulary of {}, the model one of {}", data.vocab,
                       model.vocab));
  }
  validate(model);
  return model;
}

struct SplitSamples {
  Samples training;
  Samples validation;
};

SplitSamples split_samples(const DataSource& data, const ModelConfig& model) {
  const auto vocab = static_cast<std::uint32_t>(model.vocab);
  const Samples all(data.training, vocab, model.context);
  if (!data.validation.empty()) return {all, Samples(data.validation, vocab, model.context)};
  if (all.size() < 2) {
    throw Error(ErrorCode::kIo, fmt::format("{}: {} tokens are too few for a context of {}",
                                            data.name, tokens_in(data.training), model.context));
  }
  const std::uint64_t kept = validation_samples(all.size());
  return {all.slice(0, all.size() - kept), all.slice(all.size() - kept, kept)};
}

void announce(const DataSource& data, const Trainer& trainer, const TrainerOptions& options,
              int threads) {
  const ModelConfig& model = options.model;
  log(LogLevel::kInfo, "data: {}, {} tokens of {}, {} samples of {}", data.name,
      short_number(static_cast<double>(tokens_in(data.training))), data.vocab,
      trainer.lanes().samples, model.context);
  log(LogLevel::kInfo,
      "model: {} parameters (hidden {}, {} layers, {} heads, {} kv heads, intermediate {}), {} of "
      "state",
      short_number(static_cast<double>(trainer.layout().size())), model.hidden, model.layers,
      model.heads, model.kv_heads, model.intermediate,
      short_number(static_cast<double>(trainer.state_bytes())) + "B");
  log(LogLevel::kInfo,
      "run: {} steps of {} tokens in {} lanes, {} passes over the data, {}, {} threads",
      options.schedule.steps, options.global_batch * static_cast<std::uint64_t>(model.context),
      trainer.lanes().lanes(),
      fmt::format("{:.1f}",
                  trainer.lanes().epochs(static_cast<std::uint64_t>(options.schedule.steps))),
      to_string(options.precision), threads);
}

void tell_result(const DataSource& data, std::optional<double> validation_loss) {
  if (!validation_loss) return;
  std::string line = fmt::format("validation loss {:.4f} nats per token", *validation_loss);
  if (const auto bits = bits_per_byte(*validation_loss, data.bytes_per_token)) {
    line += fmt::format(", {:.4f} bits per byte", *bits);
    if (data.entropy_per_byte > 0) {
      line += fmt::format(" (the source itself has {:.4f})", data.entropy_per_byte);
    }
  }
  log_line(LogLevel::kInfo, line);
}

int run(const Options& options) {
  if (!supports(options.precision)) {
    refuse(fmt::format("this processor has no products in {}", to_string(options.precision)));
  }
  DataOptions data_options = options.data;
  data_options.vocab = options.vocab;
  data_options.seed = options.seed;
  const DataSource data = open_data(data_options);
  std::optional<SavedModel> init;
  if (!options.init.empty()) init = load_model(options.init);

  TrainerOptions trainer_options;
  trainer_options.model = choose_model(options, data, init);
  const SplitSamples samples = split_samples(data, trainer_options.model);
  trainer_options.precision = options.precision;
  trainer_options.global_batch = options.global_batch;
  trainer_options.micro_batch = options.micro_batch != 0
                                    ? options.micro_batch
                                    : (options.global_batch % 8 == 0 ? 8 : options.global_batch);
  trainer_options.adamw.weight_decay = options.weight_decay;
  trainer_options.clip = options.clip;
  trainer_options.seed = options.seed;
  Schedule& schedule = trainer_options.schedule;
  schedule.steps = options.steps.value_or(fitting_steps(
      ParameterLayout(trainer_options.model).size(),
      options.global_batch * static_cast<std::uint64_t>(trainer_options.model.context)));
  schedule.decay = options.decay;
  schedule.peak =
      options.learning_rate.value_or(fitting_learning_rate(trainer_options.model.hidden));
  schedule.floor = schedule.peak / 10;
  schedule.warmup = options.warmup.value_or(schedule.steps / 20);
  trainer_options.eval_every =
      options.eval_every.value_or(std::max<std::int64_t>(1, schedule.steps / 10));

  ThreadPool pool(options.threads > 0 ? options.threads : available_cores());
  Trainer trainer(trainer_options, samples.training, samples.validation, pool);
  if (init) std::ranges::copy(init->parameters.span(), trainer.parameters().begin());
  announce(data, trainer, trainer_options, pool.threads());

  std::optional<MetricsFile> metrics;
  if (!options.out.empty()) {
    make_folder(options.out);
    metrics.emplace(options.out + "/metrics.jsonl");
  }
  const auto save = [&] {
    if (options.out.empty()) return;
    save_model(options.out, trainer.layout(), trainer.parameters(), data.tokenizer.get(),
               trainer.steps_done());
  };
  stop_on_signals();
  std::optional<double> validation_loss;
  try {
    TrainingLog training_log(options.log.value_or(default_log_style()), schedule.steps,
                             data.bytes_per_token);
    trainer.run(g_stopped_by, [&](const StepReport& report) {
      training_log.step(report);
      if (metrics) metrics->write(metrics_line(report, data.bytes_per_token));
      if (report.validation_loss) validation_loss = report.validation_loss;
    });
  } catch (const Error& error) {
    if (error.code() == ErrorCode::kNonFinite) save();  // as they were before the step
    throw;
  }
  save();
  tell_result(data, validation_loss);
  const int signal = g_stopped_by.load();
  if (signal != 0) {
    log(LogLevel::kInfo, "stopped by signal {} after step {} of {}", signal, trainer.steps_done(),
        schedule.steps);
  }
  fmt::print("weights {}\n", weights_hash(trainer.layout(), trainer.parameters()));
  return signal == 0 ? 0 : 128 + signal;
}

// An option whose values are names that `parse` knows.
template <typename Value, typename Parse>
void add_named(CLI::App& command, const std::string& flag, Value& chosen, Parse parse,
               const std::vector<std::string>& names, const std::string& text,
               const std::string& description) {
  command
      .add_option_function<std::string>(
          flag, [&chosen, parse](const std::string& name) { chosen = *parse(name); }, description)
      ->check(CLI::IsMember(names))
      ->option_text(text);
}

void add_data_options(CLI::App& command, Options& options) {
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

void add_training_options(CLI::App& command, Options& options) {
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
            "NAME [cosine]", "How it falls after that: cosine, linear or constant");
  add("--weight-decay", options.weight_decay, "X [0.1]", "Decoupled, not on norms")
      ->check(CLI::NonNegativeNumber);
  add("--clip", options.clip, "X [1]", "Longest gradient; 0 does not clip")
      ->check(CLI::NonNegativeNumber);
  add("--seed", options.seed, "N [0]",
      "Of the first weights, the order of samples and the stories");
  add("--init", options.init, "DIR [fresh weights]", "Start from the weights of this model");
  command.get_option("--schedule")->group(group);
}

void add_run_options(CLI::App& command, Options& options) {
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
      {"fp32", "bf16"}, "NAME [fp32]", "Of matrix products: fp32 or bf16");
  command
      .add_option("--eval-every", options.eval_every, "Steps between validations; 0: only the last")
      ->check(CLI::NonNegativeNumber)
      ->option_text("N [a tenth]")
      ->group(group);
  add_named(command, "--log", options.log, parse_log_style, {"bar", "plain", "json"}, "NAME",
            "bar (on a terminal), plain lines, or json: one object per step");
  add_options_file(command, options.config);
  for (const char* flag : {"--precision", "--log", "--config"})
    command.get_option(flag)->group(group);
}

}  // namespace

void add_train(CLI::App& app, Job& job) {
  CLI::App& command = *app.add_subcommand("train", "Train a language model.");
  command.footer(kExplanation);
  const auto options = std::make_shared<Options>();
  add_data_options(command, *options);
  add_model_options(command, options->model);
  add_training_options(command, *options);
  add_run_options(command, *options);
  command.callback([options, &command, &job] {
    apply_options_file(command, options->config);
    job = [options] { return run(*options); };
  });
}

}  // namespace lockstep::cli
