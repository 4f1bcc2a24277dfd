#include "lockstep/run/train.h"

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string_view>

#include "cli/commands.h"
#include "cli/options.h"
#include "cli/stories/stories.h"
#include "lockstep/base/error.h"
#include "lockstep/base/log.h"
#include "lockstep/data/mix.h"
#include "lockstep/launch/host_agent.h"
#include "lockstep/launch/launch.h"
#include "lockstep/launch/rank_environment.h"
#include "lockstep/net/job/roster.h"
#include "lockstep/train/checkpoint/folders.h"
#include "lockstep/train/run_checkpoints.h"

namespace lockstep::cli {
namespace {

constexpr const char* kTrainExplanation =
    R"(--data takes text files, token shards (those of `lockstep data`, of llm.c, of nanoGPT), or folders of
either. Files with val, valid or validation in their name (val.txt, my_val.bin) are kept for validation;
without such a file the last twentieth of the samples is. With --mix 3,1 every step has three samples of the
first path for one of the second, whatever their sizes. Without --data the model learns the built-in stories.
Sizes that are not given are chosen to fit the data.

A step is cut into global-batch / micro-batch lanes, whose gradients are added in one fixed tree. The same
options and data give the same weights, bit for bit, for any number of threads and workers, over any
transport; micro-batch is part of the result. (--reduction ring, native or nccl and --wire-dtype bf16 keep
the workers equal, but their number then matters.) On GPUs the same holds for GPUs of one kind.

--workers N starts N processes here (threads with --transport local), each on its share of the cores. Under
torchrun, mpirun or Slurm the command is one worker of their world: RANK, WORLD_SIZE, MASTER_ADDR and
MASTER_PORT, or what Open MPI, MPICH and Slurm set instead. With --transport server the workers talk to a
gradient server: one that is started with them, or the one at --coordinator. With --protocol original that
may be a server of the original protocol, or the others its workers: then every worker has a run of its own
with the same seed or --init, prints the loss of its own lanes, and --out is for one of them.
Workers of a host take turns over its GPUs; gradients go from GPU to GPU where each worker has its own
(--exchange).
A worker that dies, stops or fails is lost, and the others go on with the same bits; one that is silent is
noticed after --timeout. A new one is started in its place and joins (--fail-fast: the first loss ends the run).
SIGTERM to one worker has it leave after a step. Other launchers may end the workers that are left: torchrun
ends those of the node (with --max_restarts N it restarts the workers of all nodes), and mpirun the whole job;
srun lets them live with --no-kill, which sbatch or salloc needs, too, for the loss of a node. With
`lockstep train --join` on each node the job survives under all of them.

--out DIR gets model.safetensors, config.json, the tokenizer, metrics.jsonl with one object per step, and
checkpoint-STEP folders, each complete or not there. Without --out nothing is kept. A folder with a model or
other files in it is refused; one run at a time may have it. Ctrl-C (or SIGTERM, or a terminal that is
closed) stops after the step under way and leaves a checkpoint; SIGUSR1 saves one and goes on. SIGUSR2
writes what every worker is doing, for `lockstep explain`, and goes on. `lockstep train --resume DIR` goes
on from the newest intact checkpoint, with any number of workers, and ends with the same weights as a run
that was never stopped. The checkpoint with the lowest validation loss is kept, too (unless --save-every is
0). The last line on standard output is the hash of the weights. A gradient that is not finite changes no
weights and stops all workers; halt.json in --out then says which lane it was.
Exit codes: 0 done, 1 failed, 2 wrong usage, 3 halted on a value that is not finite or on workers whose
weights differ, 129, 130 and 143 stopped.

  lockstep train --data my.txt --out my-model --workers 2
  lockstep generate my-model --prompt "Once")";

struct TrainFlags {
  TrainOptions run;
  std::vector<std::string> data;
  std::string mix;
  std::string tokenizer;
  bool force_tokenizer = false;
  std::string config;
  std::string resume;
  bool overwrite = false;
  double bucket_mb = 4;
  double timeout = 30;
  double worker_patience = 600;
  std::string token_file;
};

// An option whose values are names that `parse` knows.
template <typename Value, typename Parse>
CLI::Option* add_named(CLI::App& command, const std::string& flag, Value& chosen, Parse parse,
                       const std::vector<std::string>& names, const std::string& text,
                       const std::string& description) {
  return command
      .add_option_function<std::string>(
          flag, [&chosen, parse](const std::string& name) { chosen = *parse(name); }, description)
      ->check(one_of(names))
      ->option_text(text);
}

void add_data_options(CLI::App& command, TrainFlags& options) {
  command.option_defaults()->group("Data");
  command.add_option("data,--data", options.data, "Text files, token shards, or folders of either")
      ->option_text("PATH ... [built-in stories]");
  command
      .add_option("--mix", options.mix,
                  "Weights of the paths of --data: 3,1 draws three samples of the first "
                  "path for each one of the second")
      ->option_text("W,W,... [by size]");
  command
      .add_option(
          "--tokenizer", options.tokenizer,
          "For text: bytes; sentencepiece or bpe (trained on the text); a tokenizer.json or .model "
          "file, or the folder that has it")
      ->check(tokenizer_name())
      ->option_text("NAME or FILE [that of --init, else bytes]");
  command.add_flag("--force-tokenizer", options.force_tokenizer,
                   "Train the model of --init on the tokens of another tokenizer than its own");
  command
      .add_option("--vocab", options.run.vocab,
                  "Size of the vocabulary: that sentencepiece or bpe learns; that of "
                  "shards without a header; otherwise the model's, at least as large as "
                  "the tokenizer's")
      ->transform(whole_number(1, 1 << 24))
      ->option_text("N");
}

void add_model_options(CLI::App& command, TrainOptions& options) {
  command.option_defaults()->group("Model (what is not given is chosen to fit the data)");
  ModelConfig& model = options.model;
  command
      .add_option(
          "--model", options.preset,
          fmt::format("Sizes by name, with tied embeddings: {}. The options below change one "
                      "size each",
                      fmt::join(model_names(), ", ")))
      ->check(one_of(model_names()))
      ->option_text("NAME");
  const auto size = [&](const char* flag, int& value, const char* description) {
    command.add_option(flag, value, description)
        ->transform(whole_number(1, 1 << 24))
        ->option_text("N");
  };
  size("--context", model.context, "Tokens of a sample");
  size("--hidden", model.hidden, "Width, a multiple of 16");
  size("--layers", model.layers, "Blocks");
  size("--heads", model.heads, "Attention heads");
  size("--kv-heads", model.kv_heads, "Heads of keys and values, which divide the heads");
  size("--intermediate", model.intermediate, "Width of the feed-forward layers");
  command.add_flag("--tie-embeddings", model.tie_embeddings,
                   "One matrix for embedding and lm_head");
}

void add_training_options(CLI::App& command, TrainOptions& options) {
  command.option_defaults()->group("Training");
  const auto add = [&](const char* flag, auto& value, const char* text, const char* description) {
    return command.add_option(flag, value, description)->option_text(text);
  };
  add("--steps", options.steps, "N [10 tokens per parameter, at most 40 passes]",
      "How many steps to train")
      ->transform(whole_number(0, std::int64_t{1} << 50));
  add("--global-batch", options.global_batch, "N [16]", "Samples of a step")
      ->transform(whole_number(1, 1 << 24));
  add("--micro-batch", options.micro_batch, "N [for 8 lanes or more]",
      "Samples of a lane, which divide the global batch")
      ->transform(whole_number(1, 1 << 24));
  add("--lr", options.learning_rate, "RATE [by width; with --init a tenth]",
      "Highest learning rate")
      ->transform(real_number(0));
  add("--warmup", options.warmup, "N [a twentieth]",
      "Steps until the learning rate is at its highest")
      ->transform(whole_number(0, std::int64_t{1} << 50));
  add_named(command, "--schedule", options.decay, parse_decay, {"cosine", "linear", "constant"},
            "NAME [cosine]", "How the learning rate falls after that: cosine, linear or constant");
  add("--weight-decay", options.weight_decay, "X [0.1]",
      "Weight decay (decoupled); norm weights are not decayed")
      ->transform(real_number(0));
  add("--clip", options.clip, "X [1]",
      "Scale a gradient down whose norm is larger than this; 0: never")
      ->transform(real_number(0));
  add("--seed", options.seed, "N [0]",
      "Seed of the initial weights, the sample order and the built-in stories")
      ->transform(any_seed());
  add("--init", options.init, "DIR [fresh weights]",
      "Start from the weights of this model, with its tokenizer");
}

void add_checkpoint_options(CLI::App& command, TrainFlags& given) {
  command.option_defaults()->group("Checkpoints (in --out)");
  TrainOptions& options = given.run;
  command
      .add_option_function<std::string>(
          "--save-every",
          [&](const std::string& text) { options.save_every = parse_save_every(text); },
          "Save a checkpoint every so many steps (500) or after a time (30s, "
          "10m, 2h); also after the last step and every best validation; 0: only "
          "when stopped")
      ->check([](const std::string& text) {
        return parse_save_every(text) ? ""
                                      : text + " is neither steps (500) nor time (30s, 10m, 2h)";
      })
      ->option_text("N [10m]");
  command
      .add_option("--keep-last", options.keep_last,
                  "Checkpoints to keep, beside that of the best validation; 0: all")
      ->transform(whole_number(0, std::int64_t{1} << 50))
      ->option_text("N [3]");
  command.add_flag(
      "--save-wait", options.save_wait,
      "If a checkpoint is due while the previous one is still being written, wait; without "
      "this option the new one is skipped");
  command
      .add_option("--resume", given.resume,
                  "Go on from the newest intact checkpoint in DIR (or --out), with the "
                  "options and the data of that run; if there is no checkpoint, begin "
                  "with step 1")
      ->expected(0, 1)
      ->option_text("[DIR]");
  command.add_flag(
      "--overwrite", given.overwrite,
      "Begin a new run in an --out that is not empty. Removes all that the earlier run "
      "wrote (model, tokenizer, checkpoints, metrics, flight); keeps other files");
}

// The options of a run in its folder, so that --resume needs no other. What belongs to one start of
// the command is not among them.
constexpr std::string_view kNotRemembered[] = {
    "resume", "out",    "overwrite", "config", "log",  "coordinator", "help",
    "replay", "listen", "dry-run",   "expect", "join", "page"};

// What a worker that joins a job says itself. All other options are those of the job.
constexpr std::string_view kLocalOptions[] = {"join",      "data",       "device",        "threads",
                                              "workers",   "token-file", "log",           "config",
                                              "interface", "plain-wire", "wire-compress", "help"};

std::string to_remember(const CLI::App& command) {
  nlohmann::ordered_json options = nlohmann::ordered_json::object();
  for (const CLI::Option* option : command.get_options()) {
    const std::string name = option->get_single_name();
    if (option->count() == 0 ||
        std::ranges::find(kNotRemembered, name) != std::end(kNotRemembered)) {
      continue;
    }
    std::vector<std::string> values = option->results();
    for (std::string& value : values) {
      const bool file = name == "tokenizer" || name == "skip-lanes";  // or something else
      const bool path = name == "data" || name == "token-file" || name == "init" ||
                        (file && std::filesystem::exists(value));
      if (path) value = std::filesystem::absolute(value).lexically_normal();
    }
    options[name] = values;
  }
  const nlohmann::ordered_json run = {
      {"format", "lockstep run"}, {"version", 1}, {"options", std::move(options)}};
  return run.dump(1) + "\n";
}

// Sets the options that were not given. `source` is where they come from. Workers of a launcher's
// world are as many as it says.
void apply_options(CLI::App& command, const std::string& text, const std::string& source) {
  const bool joins = command.count("--join") > 0;
  const auto run = nlohmann::json::parse(text, nullptr, false);
  if (!run.is_object() || !run.contains("options") || !run["options"].is_object()) {
    throw CLI::ConfigError(source + ": not the options of a run");
  }
  for (const auto& [name, values] : run["options"].items()) {
    CLI::Option* option = command.get_option_no_throw("--" + name);
    if (option == nullptr || !values.is_array()) {
      throw CLI::ConfigError(fmt::format("{}: '{}' is not an option of train", source, name));
    }
    const bool local = std::ranges::find(kLocalOptions, name) != std::end(kLocalOptions);
    if (option->count() > 0 || (joins && local && name != "data") ||
        (name == "workers" && rank_environment())) {
      continue;
    }
    for (const auto& value : values) {
      if (value.is_string()) option->add_result(value.get<std::string>());
    }
    option->run_callback();
  }
}

void apply_remembered(CLI::App& command, const std::string& folder) {
  const std::string path = folder + "/" + kRunFile;
  std::ifstream file(path);
  if (!file) return;  // an older run, or checkpoints that were copied: the options say all
  apply_options(command, std::string(std::istreambuf_iterator<char>(file), {}), path);
}

void refuse_options_of_the_job(const CLI::App& command) {
  if (command.count("--join") == 0) return;
  for (const CLI::Option* option : command.get_options()) {
    const std::string name = option->get_single_name();
    if (option->count() == 0 || std::ranges::find(kLocalOptions, name) != std::end(kLocalOptions)) {
      continue;
    }
    throw CLI::ValidationError(
        fmt::format("--join takes the options of the job: --{} cannot be given with it", name));
  }
}

// For a folder that has no options of a run.
void refuse_without_run(const CLI::App& command, const std::string& out, bool named) {
  const bool checkpoints = !out.empty() && !list_checkpoints(out).empty();
  if (checkpoints && command.count("--data") == 0 && !is_launched()) {
    log(LogLevel::kWarning,
        "{} has no {}: what is not given is as for a new run, and without --data the data is the "
        "built-in stories",
        out, kRunFile);
  }
  if (checkpoints || !named) return;
  const std::filesystem::path path = std::filesystem::path(out + "/").parent_path();
  if (parse_checkpoint_name(path.filename().string())) {
    const std::string parent = path.parent_path();
    throw CLI::ValidationError(
        fmt::format("--resume {}: this is one checkpoint of a run; --resume "
                    "takes the run's folder, {}",
                    out, parent.empty() ? "." : parent));
  }
  throw CLI::ValidationError(fmt::format("--resume {}: there is no run in it to go on with", out));
}

// Options that would have no effect.
void refuse_ignored(const CLI::App& command, const TrainFlags& options) {
  for (const char* name : {"--overwrite", "--keep-last", "--save-wait"}) {
    if (command.count(name) > 0 && options.run.out.empty()) {
      throw CLI::ValidationError(fmt::format("{} needs --out", name));
    }
  }
  const TransportKind transport = options.run.job.transport;
  const bool over_tcp = transport == TransportKind::kTcp || transport == TransportKind::kAuto;
  if (options.run.job.wire_compression != WireCompression::kAuto && !over_tcp) {
    throw CLI::ValidationError(fmt::format("--wire-compress has no effect with --transport {}",
                                           to_string(transport)));
  }
  if (options.force_tokenizer && options.run.init.empty()) {
    throw CLI::ValidationError("--force-tokenizer is for a model to start from: it needs --init");
  }
}

// --resume with or without a folder of its own.
void choose_folder(CLI::App& command, TrainFlags& options) {
  TrainOptions& run = options.run;
  const bool resumes = command.count("--resume") > 0;
  if (resumes && options.overwrite) {
    throw CLI::ValidationError(
        "--resume goes on with the earlier run, --overwrite removes it: give "
        "one of them");
  }
  if (options.overwrite) run.folder = FolderUse::kOverwrite;
  if (!resumes) return;
  run.folder = FolderUse::kResume;
  const bool named = !options.resume.empty() && options.resume != "true";  // true: from a file
  if (named && !run.out.empty() && run.out != options.resume) {
    throw CLI::ValidationError(
        fmt::format("--resume {} and --out {} are two folders", options.resume, run.out));
  }
  if (named) run.out = options.resume;
  // Only rank 0 need have the folder.
  const auto world = rank_environment();
  const bool remembers = std::filesystem::exists(run.out + "/" + kRunFile);
  if ((!world || world->rank == 0) && !remembers) refuse_without_run(command, run.out, named);
  // One that is remembered counts only as long as there is no checkpoint.
  if (command.count("--init") > 0) {
    throw CLI::ValidationError("--resume has weights of its own: it does not go with --init");
  }
  if (!run.out.empty()) apply_remembered(command, run.out);
}

void add_run_options(CLI::App& command, TrainOptions& options) {
  command.option_defaults()->group("Run");
  command.add_option("--out", options.out, "Folder for the model, checkpoints and metrics")
      ->option_text("DIR");
  command.add_flag(
      "--dry-run", options.dry_run,
      "Print what the run would take (parameters, memory, steps, and the time, from three "
      "steps that are discarded), and write nothing");
  command.add_option("--threads", options.threads, "Compute threads")
      ->transform(whole_number(1, 1024))
      ->option_text("N [a worker's share of the cores]");
  add_named(
      command, "--precision", options.precision,
      [](const std::string& name) -> std::optional<Precision> {
        return name == "bf16" ? Precision::kBf16 : Precision::kF32;
      },
      {"fp32", "bf16"}, "NAME [fp32]",
      "Precision of matrix products: fp32, or bf16 on a GPU or a processor "
      "with AMX");
  add_device_option(command, options.device);
  command.add_flag("--recompute", options.recompute,
                   "Compute activations again instead of keeping them: less memory, about "
                   "a third more time, the same bits");
  command
      .add_option("--eval-every", options.eval_every, "Steps between validations; 0: only the last")
      ->transform(whole_number(0, std::int64_t{1} << 50))
      ->option_text("N [a tenth]");
  command
      .add_option("--early-stop", options.early_stop,
                  "End after N validations in a row that were not the best; 0: never")
      ->transform(whole_number(0, std::int64_t{1} << 50))
      ->option_text("N [0]");
  command
      .add_option(
          "--sample-every", options.sample_every,
          "Every N steps, print a text that the model writes (training pauses for it); 0: never")
      ->transform(whole_number(0, std::int64_t{1} << 50))
      ->option_text("N [0]");
  command
      .add_option(
          "--page", options.page,
          "Show the run on a live page, with its data as JSON (/api/run) and for Prometheus "
          "(/metrics); on this host only, unless HOST says otherwise, which takes a secret "
          "(--token-file); port 0: any, which is printed")
      ->option_text("[HOST:]PORT");
  command.add_flag("--tensorboard", options.tensorboard,
                   "Write event files for TensorBoard to DIR/tensorboard");
  add_named(command, "--log", options.log, parse_log_style, {"bar", "plain", "json"}, "NAME",
            "bar (on a terminal), plain lines, or json: one object per step");
}

// Which workers there are, and how their gradients meet.
void add_exchange_options(CLI::App& command, TrainFlags& given) {
  TrainOptions& options = given.run;
  command.add_option("--workers", options.workers, "Workers to start on this machine")
      ->transform(whole_number(1, kMaxWorldSize))
      ->option_text("N [1]");
  add_choice(command, "--transport", options.job.transport,
             "local (threads), tcp, shm, mpi, server (a gradient server), or auto: shared memory "
             "where workers share a host",
             {TransportKind::kLocal, TransportKind::kTcp, TransportKind::kShm, TransportKind::kAuto,
              TransportKind::kMpi, TransportKind::kServer})
      ->option_text("NAME [auto]");
  command
      .add_option("--coordinator", options.job.coordinator,
                  "The gradient server to join; means --transport server")
      ->option_text("HOST:PORT");
  add_choice(command, "--protocol", options.protocol,
             "With --coordinator: lanes; or original (block by block) or original-vector, for a "
             "server or workers of the original protocol: each worker's mean gradient is averaged, "
             "so the bits depend on the number of workers, and a loss ends the run",
             {StarProtocol::kLanes, StarProtocol::kOriginal, StarProtocol::kOriginalVector})
      ->option_text("NAME [lanes]");
  add_choice(command, "--reduction", options.reducer.reduction,
             "tree: the same bits for any number of workers; ring, native (MPI's own), nccl "
             "(NCCL's own): order-free",
             {Reduction::kTree, Reduction::kRing, Reduction::kNative, Reduction::kNccl})
      ->option_text("NAME [tree]");
  add_choice(command, "--exchange", options.exchange,
             "How the gradients of GPUs are summed: nccl (from GPU to GPU), host "
             "(over --transport), or auto: nccl where every worker has a GPU of its "
             "own and no other option needs the host",
             {ExchangeChoice::kAuto, ExchangeChoice::kHost, ExchangeChoice::kNccl})
      ->option_text("NAME [auto]");
  add_choice(command, "--wire-dtype", options.reducer.wire,
             "f32, or bf16: half the bytes, with error feedback, order-free",
             {DataType::kF32, DataType::kBf16})
      ->option_text("NAME [f32]");
  command
      .add_option("--bucket-mb", given.bucket_mb,
                  "Gradients travel in buckets of so many MiB, as they become final")
      ->transform(real_number(0.01, 4096.0))
      ->option_text("X [4]");
  command.add_flag_callback(
      "--no-overlap", [&options] { options.reducer.overlap = false; },
      "Buckets travel after the backward pass, not while it goes on");
  command.add_flag_callback("--overlap", [&options] { options.reducer.overlap = true; })
      ->group("");  // the default
  command.add_flag("--shard-optimizer", options.reducer.shard,
                   "Every worker keeps the moments of its share of the parameters only (ZeRO-1)");
  command.add_flag_callback(
      "--no-balance", [&options] { options.balance = false; },
      "Every worker keeps the lanes it began with. Without this option slow "
      "workers get fewer lanes, with the same bits; but not with --reduction "
      "or --wire-dtype bf16, whose bits depend on which worker has which "
      "lanes");
  command.add_flag_callback("--balance", [&options] { options.balance = true; })
      ->group("");  // the default
  command
      .add_option("--verify-every", options.verify_every,
                  "Steps between comparisons of the workers' weights; 0: only at the end")
      ->transform(whole_number(0, std::int64_t{1} << 50))
      ->option_text("N [100]");
}

// When a worker is lost, and what becomes of the run then.
void add_survival_options(CLI::App& command, TrainFlags& given) {
  TrainOptions& options = given.run;
  command
      .add_option("--timeout", given.timeout,
                  "A worker that is silent for S seconds counts as dead")
      ->transform(real_number(0.01, 1e7))
      ->option_text("S [30]");
  command.add_flag("--fail-fast", options.fail_fast,
                   "The first worker that is lost ends the run; no worker is restarted");
  command
      .add_option("--min-workers", options.min_workers,
                  "If fewer than N workers are left, save and wait for others "
                  "(--wait-for-workers)")
      ->transform(whole_number(1, kMaxWorldSize))
      ->option_text("N [1]");
  command
      .add_option("--wait-for-workers", given.worker_patience,
                  "How many seconds to wait when fewer than --min-workers are left; then "
                  "the run ends, and --resume can go on")
      ->transform(real_number(0, 1e7))
      ->option_text("S [600]");
  command.add_flag_callback(
      "--no-buddy", [&options] { options.reducer.buddy = false; },
      "With --shard-optimizer: one worker alone keeps each share. This takes "
      "half the memory, but after the loss of a worker the run goes back to "
      "the newest checkpoint");
  command.add_flag_callback("--buddy", [&options] { options.reducer.buddy = true; })
      ->group("");  // the default
}

// Jobs that others join, and the connections to them.
void add_joining_options(CLI::App& command, TrainFlags& given) {
  TrainOptions& options = given.run;
  command
      .add_option("--listen", options.listen,
                  "Let other workers join this job at this address; over a network this "
                  "needs a secret (--token-file)")
      ->option_text("HOST:PORT");
  command
      .add_option("--expect", options.expect,
                  "With --listen: begin when N workers have come, those of --workers "
                  "included")
      ->transform(whole_number(1, kMaxWorldSize))
      ->option_text("N [--workers]");
  command
      .add_option("--join", options.join,
                  "Join the job that was started with --listen, at the address of any member. All "
                  "options come from that job except --data, --device, --threads, --workers, "
                  "--interface, --token-file, --plain-wire, --wire-compress, --config and --log")
      ->option_text("HOST:PORT");
  command.add_option("--token-file", given.token_file, "The job's secret, needed between hosts")
      ->option_text("FILE");
  command.add_flag("--plain-wire", options.job.plain_wire,
                   "Between hosts: checksums instead of encryption, for a network that is "
                   "trusted; all workers must agree. Connections of MPI and NCCL are "
                   "never encrypted");
  add_wire_compression(command, options.job.wire_compression);
  command.add_option("--interface", options.job.interface, "Network interface to use")
      ->option_text("NAME");
}

// Lanes that halted a run.
void add_halt_options(CLI::App& command, TrainOptions& options) {
  command
      .add_option("--replay", options.replay,
                  "Compute again the lanes that a halt.json names, with the weights of "
                  "--init, and say what is not finite")
      ->option_text("FILE");
  command
      .add_option("--skip-lanes", options.skip_lanes,
                  "Lanes to leave out, as if they had no tokens: STEP:LANE, or a "
                  "halt.json file")
      ->delimiter(',')
      ->option_text("LIST");
}

void add_worker_options(CLI::App& command, TrainFlags& options) {
  command.option_defaults()->group("Workers");
  add_exchange_options(command, options);
  add_survival_options(command, options);
  add_joining_options(command, options);
  add_halt_options(command, options.run);
}

// A run that goes on looks where its data was.
void require_data(const std::vector<std::string>& paths) {
  for (const std::string& path : paths) {
    if (std::filesystem::exists(path) || path.find_first_of("*?[") != std::string::npos) continue;
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("the run's data, {}, is not there any more: --data PATH says where it "
                            "is now",
                            path));
  }
}

// What follows from the options as a whole.
void complete(TrainFlags& options) {
  TrainOptions& run = options.run;
  TokenizerChoice tokenizer = {options.tokenizer, run.vocab, {}, options.force_tokenizer};
  if (options.tokenizer == "sentencepiece" || options.tokenizer == "bpe") {
    run.vocab = 0;  // the text may have fewer pieces
  }
  const std::vector<double> weights = parse_mix(options.mix);
  if (!weights.empty() && options.data.empty()) {
    throw Error(ErrorCode::kInvalidArgument,
                "--mix weighs the paths of --data, and there are none");
  }
  run.data = [&options, tokenizer, weights](const std::optional<ModelTokenizer>& start) {
    TokenizerChoice choice = tokenizer;
    choice.inherited = start;
    if (options.run.folder == FolderUse::kResume) require_data(options.data);
    if (!options.data.empty()) return open_data(options.data, choice, weights);
    return encode_documents(built_in_stories(options.run.seed), choice);
  };
  run.job.timeout = duration_of(options.timeout);
  run.worker_patience = duration_of(options.worker_patience);
  run.job.token = token_from(options.token_file);
  run.reducer.bucket_bytes = static_cast<std::size_t>(options.bucket_mb * (1 << 20));
}

int run_train(TrainFlags& options, CLI::App& command, const std::vector<std::string>& arguments) {
  complete(options);
  options.run.adopt = [&options, &command](const std::string& text) {
    apply_options(command, text, "the job");
    complete(options);
    options.run.remembered = text;
    return options.run;
  };
  return train(options.run, arguments);
}

CLI::App& add_train_options(CLI::App& app, TrainFlags& options) {
  CLI::App& command = *app.add_subcommand("train", "Train a language model.");
  command.footer(kTrainExplanation);
  add_data_options(command, options);
  add_model_options(command, options.run);
  add_training_options(command, options.run);
  add_run_options(command, options.run);
  add_options_file(command, options.config);  // among those of the run
  add_checkpoint_options(command, options);
  add_worker_options(command, options);
  return command;
}

// A host says nothing of these: the launch does, or there is one process of the kind.
constexpr const char* kOfLaunch[] = {"--join",        "--workers", "--expect",
                                     "--coordinator", "--dry-run", "--replay"};

}  // namespace

HostCommand train_on_host(const HostOrder& order) {
  CLI::App app;
  TrainFlags options;
  CLI::App& command = add_train_options(app, options);
  let_the_last_count(app);
  if (order.joins) {  // who joins takes the job's, and its file need not be here
    command.get_option("--tokenizer")->get_validator(kOneOf)->active(false);
  }
  std::vector<std::string> words = order.arguments;
  words.insert(words.begin(), "train");
  try {
    if (const auto problem = missing_value(app, words)) {
      throw Error(ErrorCode::kInvalidArgument, *problem);
    }
    app.parse(std::vector<std::string>(words.rbegin(), words.rend()));
    apply_options_file(command, options.config);
  } catch (const CLI::ParseError& error) {
    throw Error(ErrorCode::kInvalidArgument, usage_problem(app, error));
  }
  for (const char* name : kOfLaunch) {
    if (command.count(name) == 0) continue;
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("{} does not go with lockstep launch", name));
  }
  if (command.count("--log") == 0) words.insert(words.end(), {"--log", order.log});
  if (!order.joins) {
    const std::string listen = options.run.listen.empty() ? order.address : options.run.listen;
    words.insert(words.end(), {"--workers", std::to_string(order.workers), "--expect",
                               std::to_string(order.expect), "--listen", listen});
    return {words, listen};
  }
  std::vector<std::string> own = {"train", "--join", order.address, "--workers",
                                  std::to_string(order.workers)};
  for (const CLI::Option* option : command.get_options()) {
    const std::string name = option->get_single_name();
    if (option->count() == 0 || name == "config" ||
        std::ranges::find(kLocalOptions, name) == std::end(kLocalOptions)) {
      continue;
    }
    const bool flag = option->get_items_expected_max() == 0;
    own.push_back("--" + name);
    if (!flag) own.insert(own.end(), option->results().begin(), option->results().end());
  }
  if (command.count("--log") == 0) own.insert(own.end(), {"--log", order.log});
  return {own, ""};
}

void add_train(CLI::App& app, const std::vector<std::string>& arguments, Action& action) {
  const auto options = std::make_shared<TrainFlags>();
  CLI::App& command = add_train_options(app, *options);
  command.callback([options, &command, &arguments, &action] {
    apply_options_file(command, options->config);
    refuse_options_of_the_job(command);
    choose_folder(command, *options);
    if (!options->run.job.coordinator.empty() && command.count("--transport") == 0) {
      options->run.job.transport = TransportKind::kServer;
    }
    refuse_ignored(command, *options);
    options->run.remembered = to_remember(command);
    action = [options, &command, &arguments] { return run_train(*options, command, arguments); };
  });
}

}  // namespace lockstep::cli
