#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <csignal>
#include <optional>

#include "cli/commands.h"
#include "cli/options_file.h"
#include "cli/train_checkpoints.h"
#include "cli/train_options.h"
#include "lockstep/base/cores.h"
#include "lockstep/base/error.h"
#include "lockstep/base/log.h"
#include "lockstep/data/atomic_file.h"
#include "lockstep/data/source.h"
#include "lockstep/model/weights_hash.h"
#include "lockstep/report/metrics.h"
#include "lockstep/report/training_log.h"
#include "lockstep/train/defaults.h"
#include "lockstep/train/model_files.h"
#include "lockstep/train/trainer.h"

namespace lockstep::cli {
namespace {

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
ModelConfig choose_model(const TrainOptions& options, const DataSource& data,
                         const std::optional<SavedModel>& init) {
  ModelConfig model = init ? init->config : fitting_model(tokens_in(data.training));
  if (!init) model.vocab = static_cast<int>(std::max(data.vocab, options.vocab));
  const auto set = [&](int& value, int given, const char* flag) {
    if (given == 0 || given == value) return;
    if (init) refuse(fmt::format("{} {}, but the model it starts from has {}", flag, given, value));
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

TrainerOptions trainer_options(const TrainOptions& options, const ModelConfig& model) {
  TrainerOptions result;
  result.model = model;
  result.precision = options.precision;
  result.global_batch = options.global_batch;
  result.micro_batch = options.micro_batch != 0        ? options.micro_batch
                       : options.global_batch % 8 == 0 ? 8
                                                       : options.global_batch;
  result.adamw.weight_decay = options.weight_decay;
  result.clip = options.clip;
  result.seed = options.seed;
  const std::uint64_t tokens_per_step =
      options.global_batch * static_cast<std::uint64_t>(model.context);
  Schedule& schedule = result.schedule;
  schedule.steps =
      options.steps.value_or(fitting_steps(ParameterLayout(model).size(), tokens_per_step));
  schedule.decay = options.decay;
  schedule.peak = options.learning_rate.value_or(fitting_learning_rate(model.hidden));
  schedule.floor = schedule.peak / 10;
  schedule.warmup = options.warmup.value_or(schedule.steps / 20);
  result.eval_every = options.eval_every.value_or(std::max<std::int64_t>(1, schedule.steps / 10));
  return result;
}

// Steps with everything that people and files are told about them.
void run_steps(Trainer& trainer, const TrainOptions& options, std::int64_t steps,
               const DataSource& data, TrainCheckpoints& checkpoints) {
  std::optional<MetricsFile> metrics;
  if (!options.out.empty()) {
    metrics.emplace(options.out + "/metrics.jsonl", trainer.steps_done());
  }
  std::optional<double> validation_loss;
  {
    TrainingLog training_log(options.log.value_or(default_log_style()), steps,
                             data.bytes_per_token);
    trainer.run(g_stopped_by, [&](const StepReport& report) {
      training_log.step(report);
      if (metrics) metrics->write(metrics_line(report, data.bytes_per_token));
      if (report.validation_loss) validation_loss = report.validation_loss;
      checkpoints.after_step(trainer);
    });
  }
  tell_result(data, validation_loss);
}

int run(const TrainOptions& options) {
  if (!supports(options.precision)) {
    refuse(fmt::format("this processor has no products in {}", to_string(options.precision)));
  }
  DataOptions data_options = options.data;
  data_options.vocab = options.vocab;
  data_options.seed = options.seed;
  const DataSource data = open_data(data_options);
  std::optional<ResumePoint> resumed = resume_point(options);
  std::optional<SavedModel> init;
  if (!options.init.empty()) init = load_model(options.init);
  if (resumed) init.emplace().config = resumed->state.run.settings.model;
  const TrainerOptions how = trainer_options(options, choose_model(options, data, init));
  const SplitSamples samples = split_samples(data, how.model);
  ThreadPool pool(options.threads > 0 ? options.threads : available_cores());
  Trainer trainer(how, samples.training, samples.validation, pool);
  if (init) std::ranges::copy(init->parameters.span(), trainer.parameters().begin());
  RunState run_now = run_state(how, samples.training);
  if (resumed) restore(trainer, *resumed, run_now);
  run_now.step = trainer.steps_done();
  if (!options.out.empty()) make_folder(options.out);
  TrainCheckpoints checkpoints(options, run_now, data.tokenizer,
                               resumed ? resumed->known_bad : std::vector<std::int64_t>());
  announce(data, trainer, how, pool.threads());

  const auto save = [&] {
    if (options.out.empty()) return;
    save_model(options.out, trainer.layout(), trainer.parameters(), data.tokenizer.get(),
               trainer.steps_done());
  };
  stop_on_signals();
  try {
    run_steps(trainer, options, how.schedule.steps, data, checkpoints);
  } catch (const Error& error) {
    if (error.code() == ErrorCode::kNonFinite) {  // as they were before the step
      checkpoints.finish(trainer);
      save();
    }
    throw;
  }
  checkpoints.finish(trainer);
  save();
  const int signal = g_stopped_by.load();
  if (signal != 0) {
    log(LogLevel::kInfo, "stopped by signal {} after step {} of {}", signal, trainer.steps_done(),
        how.schedule.steps);
  }
  fmt::print("weights {}\n", weights_hash(trainer.layout(), trainer.parameters()));
  return signal == 0 ? 0 : 128 + signal;
}

}  // namespace

void add_train(CLI::App& app, Job& job) {
  CLI::App& command = *app.add_subcommand("train", "Train a language model.");
  const auto options = std::make_shared<TrainOptions>();
  add_train_options(command, *options);
  command.callback([options, &command, &job] {
    apply_options_file(command, options->config);
    job = [options] { return run(*options); };
  });
}

}  // namespace lockstep::cli
