#include "lockstep/run/worker.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <span>

#include "lockstep/base/cores.h"
#include "lockstep/base/error.h"
#include "lockstep/base/host.h"
#include "lockstep/base/index.h"
#include "lockstep/base/log.h"
#include "lockstep/base/utf8.h"
#include "lockstep/files/atomic_file.h"
#include "lockstep/model/cpu/decoder.h"
#include "lockstep/model/gpu_model.h"
#include "lockstep/model/weights_hash.h"
#include "lockstep/report/metrics.h"
#include "lockstep/run/fault.h"
#include "lockstep/run/memory.h"
#include "lockstep/run/plan.h"
#include "lockstep/run/signals.h"
#include "lockstep/train/checkpoint/folders.h"
#include "lockstep/train/resume.h"
#include "lockstep/train/run_checkpoints.h"
#include "lockstep/train/sampler.h"

namespace lockstep {
namespace {

// "1 step", "2 steps"
std::string counted(std::int64_t count, const char* what) {
  return fmt::format("{} {}{}", count, what, count == 1 ? "" : "s");
}

void announce(const TrainPlan& plan, Trainer& trainer, int threads) {
  const ModelConfig& model = plan.how.model;
  log(LogLevel::kInfo, "data: {}, {} tokens of {}, {} samples of {}", plan.data.name,
      short_number(static_cast<double>(tokens_in(plan.data.training))), plan.data.vocab,
      trainer.lanes().samples, model.context);
  log(LogLevel::kInfo,
      "model: {} parameters (hidden {}, {} layers, {} heads, {} kv heads, intermediate {}), {} of "
      "state",
      short_number(static_cast<double>(trainer.layout().size())), model.hidden, model.layers,
      model.heads, model.kv_heads, model.intermediate,
      short_number(static_cast<double>(trainer.replica().state_bytes())) + "B");
  log(LogLevel::kInfo, "run: {} steps of {} tokens in {} lanes, {} passes over the data, {}, {}",
      plan.how.schedule.steps, plan.how.global_batch * static_cast<std::uint64_t>(model.context),
      trainer.lanes().lanes(),
      fmt::format("{:.1f}",
                  trainer.lanes().epochs(static_cast<std::uint64_t>(plan.how.schedule.steps))),
      to_string(plan.how.precision), plan.gpu ? gpu_name() : counted(threads, "thread"));
}

// What --init decides that nobody has asked for.
void announce_start(const TrainOptions& options, const TrainPlan& plan) {
  if (options.init.empty()) return;
  const bool own_tokenizer = plan.data.tokenizer && plan.data.tokenizer == plan.init->tokenizer;
  const std::string rate =
      fmt::format("; --lr {:.2g}, a tenth of what fresh weights get", plan.how.schedule.peak);
  log(LogLevel::kInfo, "start: the weights{} of {}{}", own_tokenizer ? " and the tokenizer" : "",
      options.init, options.learning_rate ? "" : rate);
}

void announce_workers(Trainer& trainer) {
  const int workers = trainer.communicator().world_size();
  if (workers == 1) return;
  const ReducerOptions& how = trainer.options().reducer;
  const auto buckets = static_cast<std::int64_t>(trainer.reducer().buckets());
  const bool exact = how.reduction == Reduction::kTree && how.wire == DataType::kF32;
  log(LogLevel::kInfo, "workers: {}{}, {}", workers,
      how.on_device ? "" : fmt::format(", {} of gradients", counted(buckets, "bucket")),
      exact ? "the same bits for any number of workers"
            : "order-free: replicas are identical, another number of workers gives other bits");
  if (trainer.reducer().traffic() > 1) {
    log(LogLevel::kInfo,
        "workers: {:.2f} times the gradient travels per worker, because {} lanes do not divide "
        "evenly; a power of two of lanes per worker avoids it",
        trainer.reducer().traffic(), trainer.lanes().lanes());
  }
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

SaveEvery save_every(const TrainOptions& options) {
  if (options.out.empty()) return {};
  return options.save_every.value_or(kDefaultSaveEvery);
}

// What will be left, told before the time is spent.
void announce_folder(const TrainOptions& options, const Trainer& trainer) {
  if (options.out.empty()) {
    log(LogLevel::kWarning, "there is no --out DIR: the model will not be kept");
    return;
  }
  const SaveEvery every = save_every(options);
  if (every == SaveEvery{}) {
    log(LogLevel::kInfo, "checkpoints: only when the run is stopped (--save-every 0)");
    return;
  }
  const auto bytes = static_cast<double>(trainer.layout().size() * 3 * sizeof(float));
  log(LogLevel::kInfo, "checkpoints: every {}, {}B each, written behind training; {} stay in {}",
      every.steps > 0 ? counted(every.steps, "step") : to_string(every), short_number(bytes),
      options.keep_last > 0 ? fmt::format("the last {} and the best", options.keep_last) : "all",
      options.out);
}

constexpr auto kBetweenLaneNotes = std::chrono::seconds(30);

// What people and files are told of the steps; on rank 0.
class Narrator {
 public:
  Narrator(const TrainOptions& options, const TrainPlan& plan, std::int64_t steps_done)
      : data_(plan.data),
        log_(options.log.value_or(default_log_style()), plan.how.schedule.steps,
             plan.data.bytes_per_token) {
    if (!options.out.empty()) metrics_.emplace(options.out + "/" + kMetricsFile, steps_done);
  }

  void step(const StepReport& report) {
    log_.step(report);
    if (report.save && !metrics_) log_.note("nothing is saved: there is no --out");
    if (metrics_) metrics_->write_step(report.step, metrics_line(report, data_.bytes_per_token));
    if (report.validation_loss) validation_loss_ = report.validation_loss;
    if (!report.next_lanes.empty()) tell_lanes(report);
    if (report.straggler) {
      log_.note(
          fmt::format("rank {} takes {:.0f} % longer to compute than the median of the others",
                      report.straggler->rank, 100 * report.straggler->slower));
    }
  }
  std::optional<double> validation_loss() const { return validation_loss_; }

 private:
  // At most once in a while; metrics.jsonl has every move.
  void tell_lanes(const StepReport& report) {
    const auto now = std::chrono::steady_clock::now();
    if (told_lanes_.empty()) told_lanes_ = report.lanes;
    if (told_at_ && now - *told_at_ < kBetweenLaneNotes) return;
    const std::string text = describe_lanes(told_lanes_, report.next_lanes);
    if (text.empty()) return;  // back where they were
    log_line(LogLevel::kInfo, text);
    told_lanes_ = report.next_lanes;
    told_at_ = now;
  }

  const DataSource& data_;
  TrainingLog log_;
  std::vector<std::uint32_t> told_lanes_;  // by rank, as people were told last
  std::optional<std::chrono::steady_clock::time_point> told_at_;
  std::optional<MetricsFile> metrics_;
  std::optional<double> validation_loss_;
};

// What the model writes now, on one line.
std::string sample_text(Trainer& trainer, const Tokenizer& tokenizer, ThreadPool& pool) {
  constexpr std::int64_t kSampleTokens = 48;
  FloatBuffer parameters(trainer.layout().size());
  trainer.replica().get_parameters(parameters.span());
  Decoder decoder(trainer.layout(), parameters.span(), Precision::kF32, pool);
  std::vector<std::int32_t> prompt;
  if (tokenizer.end_of_document()) {
    prompt.push_back(*tokenizer.end_of_document());  // a document begins
  } else {
    tokenizer.encode("The", prompt);
  }
  std::vector<std::int32_t> tokens;
  const SamplerOptions how = {.seed = static_cast<std::uint64_t>(trainer.steps_done()),
                              .vocab = tokenizer.vocab()};
  generate_tokens(decoder, trainer.options().model.context, prompt, how, kSampleTokens,
                  tokenizer.end_of_document(), [&](std::int32_t token) {
                    tokens.push_back(token);
                    return true;
                  });
  std::string text = repair_utf8(tokenizer.decode(tokens));
  std::ranges::replace_if(
      text, [](char c) { return static_cast<unsigned char>(c) < ' '; }, ' ');
  return text;
}

// Returns the signal that stopped it, if one did.
int run_steps(Trainer& trainer, const TrainOptions& options, const TrainPlan& plan,
              RunCheckpoints& checkpoints, ThreadPool& pool) {
  std::optional<Narrator> narrator;
  if (trainer.communicator().rank() == 0) narrator.emplace(options, plan, trainer.steps_done());
  int stopped = 0;
  const auto requests = [&] {
    Requests wanted = requests_of_signals();
    wanted.save = wanted.save || checkpoints.interval_passed();
    return wanted;
  };
  trainer.run(requests, [&](const StepReport& report) {
    if (narrator) narrator->step(report);
    if (narrator && plan.data.tokenizer && options.sample_every > 0 &&
        report.step % options.sample_every == 0) {
      log(LogLevel::kInfo, "sample after step {}: {}", report.step,
          sample_text(trainer, *plan.data.tokenizer, pool));
    }
    stopped = report.stop;
    checkpoints.after_step({.stopping = stopped != 0 || report.ends_early,
                            .requested = report.save,
                            .best = report.best});
  });
  if (!narrator) return stopped;
  const auto validation_loss = narrator->validation_loss();
  narrator.reset();
  tell_result(plan.data, validation_loss);
  return stopped;
}

void save(const TrainOptions& options, const TrainPlan& plan, Trainer& trainer) {
  if (options.out.empty() || trainer.communicator().rank() != 0) return;
  FloatBuffer parameters(trainer.layout().size());
  trainer.replica().get_parameters(parameters.span());
  save_model(options.out, trainer.layout(), parameters.span(), plan.data.tokenizer.get(),
             trainer.steps_done());
}

CheckpointPolicy checkpoint_policy(const TrainOptions& options, const TrainPlan& plan,
                                   const ResumePoint& resume) {
  return {.out = options.out,
          .save_every = save_every(options).steps,
          .interval = save_every(options).interval,
          .keep_last = options.keep_last,
          .wait = options.save_wait,
          .last_step = plan.how.schedule.steps,
          .damaged = resume.damaged,
          .saved = note_checkpoint};
}

void write_halt(const TrainOptions& options, Trainer& trainer) {
  if (trainer.communicator().rank() != 0 || !trainer.halt_report() || options.out.empty()) return;
  const std::string path = options.out + "/" + kHaltFile;
  AtomicFile file(path);
  file.write(to_json(*trainer.halt_report()) + "\n");
  file.commit();
  log(LogLevel::kInfo,
      "{} says which lane it was: --replay {} computes it once more, --skip-lanes {} leaves it out",
      path, path, path);
}

// How the run ended, what it leaves, and what to do with it.
void tell_end(const TrainOptions& options, const TrainPlan& plan, const Trainer& trainer,
              int stopped, double seconds) {
  const std::int64_t steps = trainer.steps_done();
  const std::string of_all = fmt::format("step {} of {}", steps, plan.how.schedule.steps);
  std::string how = "done: " + counted(steps, "step");
  if (stopped != 0) {
    how = fmt::format("stopped by signal {} after {}", stopped, of_all);
  } else if (steps < plan.how.schedule.steps) {
    how = fmt::format("ended early after {}: {} without a better one", of_all,
                      counted(trainer.validation().since_best, "validation"));
  }
  log(LogLevel::kInfo, "{}, in {}", how, short_duration(seconds));
  if (options.out.empty()) {
    log(LogLevel::kWarning, "the model is not kept: there was no --out DIR");
    return;
  }
  const ValidationRecord& record = trainer.validation();
  const std::string best = checkpoint_path(options.out, record.best_step);
  if (record.best_step > 0 && record.best_step < steps) {
    log(LogLevel::kInfo, "the best validation loss was {:.4f}, after step {}{}", record.best_loss,
        record.best_step, std::filesystem::exists(best) ? ": " + best : "");
  }
  std::string next = fmt::format("lockstep generate {} --prompt \"Once\"", options.out);
  if (!plan.data.tokenizer) next = "lockstep verify " + options.out;
  if (stopped != 0) next = "lockstep train --resume " + options.out;
  log(LogLevel::kInfo, "the model is in {}; next: {}", options.out, next);
}

// All steps, and what follows them on all workers. Returns the exit code.
int run_and_save(Trainer& trainer, const TrainOptions& options, const TrainPlan& plan,
                 RunCheckpoints& checkpoints, ThreadPool& pool) {
  Communicator& communicator = trainer.communicator();
  const auto begin = std::chrono::steady_clock::now();
  const int stopped = run_steps(trainer, options, plan, checkpoints, pool);
  const std::string hash = trainer.verify();
  checkpoints.finish(stopped != 0);
  save(options, plan, trainer);
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
  if (communicator.rank() == 0) {
    tell_end(options, plan, trainer, stopped, took.count());
    if (communicator.world_size() > 1) {
      log(LogLevel::kInfo, "the weights of all {} workers are the same", communicator.world_size());
    }
    fmt::print("weights {}\n", hash);
    std::fflush(stdout);
  }
  communicator.barrier(
      {.deadline = Deadline::after(kDiskPatience)});  // nobody goes while rank 0 still writes
  return stopped == 0 ? 0 : 128 + stopped;
}

// All as it was before the step. If that fails, why the run is halted still counts more.
void save_halted(Trainer& trainer, const TrainOptions& options, const TrainPlan& plan,
                 RunCheckpoints& checkpoints) {
  try {
    checkpoints.finish(true);
    save(options, plan, trainer);
    write_halt(options, trainer);
  } catch (const std::exception& failed) {
    log(LogLevel::kError, "the state before the halt is not saved: {}", failed.what());
  }
}

// Nobody goes while rank 0 still writes: who goes ends the others.
void part_after_halt(Communicator& communicator, const Error& cause) {
  try {
    communicator.barrier({.deadline = Deadline::after(kDiskPatience)});
  } catch (const Error&) {  // somebody has gone all the same
  }
  communicator.abort(cause.what());  // for a gradient server, which knows nothing of it yet
}

// What of the host this worker uses.
struct Share {
  int threads;  // of the cores that it may use, with those who may use the same
  int device;   // a GPU, the workers of a host taking turns
};
Share choose_share(int threads, Communicator& communicator) {
  const std::string host = this_host().boot_id + " ";
  const std::string place = host + core_list(own_cores());
  const std::vector<std::string> places = gather_texts(communicator, place);
  const auto same_cores = static_cast<int>(std::ranges::count(places, place));
  const auto before = std::span(places).first(index_of(communicator.rank()));
  const auto same_host = std::ranges::count_if(
      before, [&](const std::string& other) { return other.starts_with(host); });
  return {threads > 0 ? threads : std::max(1, available_cores() / same_cores),
          static_cast<int>(same_host)};
}

// So that --resume needs no other option.
void remember(const TrainOptions& options) {
  if (options.out.empty() || options.remembered.empty()) return;
  AtomicFile file(options.out + "/" + kRunFile);
  file.write(options.remembered);
  file.commit();
}

std::string data_hash(const TrainPlan& plan) {
  return to_hex(plan.training.fingerprint()) + to_hex(plan.validation.fingerprint());
}

// Why this worker fails, and not only that it has gone. What all find out alike needs no telling.
void tell_others(Communicator& communicator, const Error& error) {
  switch (error.code()) {
    case ErrorCode::kInvalidArgument:
    case ErrorCode::kNonFinite:
    case ErrorCode::kReplicaMismatch: return;
    default: communicator.abort(error.what());  // nothing, if the job has failed already
  }
}

// What the run would take. The steps that are measured are thrown away.
int dry_run(const TrainOptions& options, const TrainPlan& plan, Trainer& trainer) {
  constexpr std::int64_t kMeasured = 3;
  double fastest = 0;
  const std::int64_t steps = plan.how.schedule.steps;
  for (std::int64_t i = 0; i < std::min(kMeasured, steps); ++i) {
    const double seconds = trainer.step().seconds;
    fastest = i == 0 ? seconds : std::min(fastest, seconds);
  }
  Communicator& communicator = trainer.communicator();
  if (communicator.rank() == 0) {
    const bool saves = save_every(options) != SaveEvery{};
    const auto bytes_of = [&](int rank) {
      const std::size_t bytes =
          cpu_bytes_needed(plan.how, rank, communicator.world_size(), saves && rank == 0);
      return short_number(static_cast<double>(bytes)) + "B";
    };
    if (plan.gpu) {
      log(LogLevel::kInfo, "memory: {}B of state on every GPU, and activations",
          short_number(static_cast<double>(trainer.replica().state_bytes())));
    } else {
      log(LogLevel::kInfo, "memory: about {} for rank 0{}", bytes_of(0),
          communicator.world_size() > 1 ? ", " + bytes_of(1) + " for every other" : "");
    }
    log(LogLevel::kInfo, "time: about {} for {}, {:.3f} s each here and now",
        short_duration(fastest * static_cast<double>(steps)), counted(steps, "step"), fastest);
    log(LogLevel::kInfo, "this was a dry run: nothing was written");
  }
  communicator.barrier();  // who goes earlier would end the others
  return 0;
}

// Before any memory is taken: whether all workers of a host fit it. All ranks decide alike.
void check_memory(const TrainOptions& options, const TrainPlan& plan, Communicator& communicator) {
  if (plan.gpu) return;
  const std::size_t available = available_memory().value_or(SIZE_MAX);
  const std::vector<std::string> told =
      gather_texts(communicator, fmt::format("{} {}", available, this_host().boot_id));
  std::map<std::string, std::pair<std::vector<int>, std::size_t>> hosts;
  for (std::size_t rank = 0; rank < told.size(); ++rank) {
    const std::string host = told[rank].substr(told[rank].find(' ') + 1);
    auto& [ranks, least] = hosts.try_emplace(host, std::vector<int>(), SIZE_MAX).first->second;
    ranks.push_back(static_cast<int>(rank));
    least = std::min<std::size_t>(least, std::stoull(told[rank]));
  }
  const bool saves = save_every(options) != SaveEvery{};
  for (const auto& [host, of_host] : hosts) {
    const auto refusal =
        memory_refusal(plan.how, of_host.first, communicator.world_size(), saves, of_host.second);
    if (refusal) throw Error(ErrorCode::kInvalidArgument, *refusal);
  }
}

int work(const TrainOptions& options, Job& job) {
  Communicator& communicator = job.communicator();
  const int rank = communicator.rank();
  ResumePoint resume;
  if (!options.dry_run) resume = find_resume_point(communicator, options.out, options.folder);
  TrainPlan plan = make_train_plan(options, resume);
  const Share share = choose_share(options.threads, communicator);
  ThreadPool pool(share.threads);
  choose_exchange(options.exchange, plan.gpu, share.device, communicator, plan.how.reducer);
  check_memory(options, plan, communicator);
  ReplicaOptions for_replica = replica_options(plan.how, rank, communicator.world_size());
  for_replica.device = share.device;
  const auto replica = plan.gpu ? make_gpu_replica(for_replica, communicator)
                                : make_cpu_replica(for_replica, communicator, pool);
  plan.how.at = planned_fault(rank, *replica);
  Trainer trainer(plan.how, plan.training, plan.validation, *replica, communicator);
  if (resume.run) {
    restore(trainer, resume);
  } else if (rank == 0 && plan.init) {
    replica->set_parameters(plan.init->parameters.span());
  } else if (rank == 0) {
    initialise(*replica, options.seed, pool);
  }
  if (rank == 0) {
    announce(plan, trainer, pool.threads());
    announce_start(options, plan);
    announce_workers(trainer);
    if (!options.dry_run) {
      announce_folder(options, trainer);
      remember(options);
    }
  }
  plan.init.reset();
  trainer.start({{"data hash", data_hash(plan)},
                 {"save every", to_string(save_every(options))},
                 {"out", options.out.empty() ? "none" : "a folder"},
                 {"device", plan.gpu ? gpu_name() : "cpu"}});
  if (options.dry_run) return dry_run(options, plan, trainer);
  RunCheckpoints checkpoints(trainer, checkpoint_policy(options, plan, resume),
                             plan.data.tokenizer);
  try {
    return run_and_save(trainer, options, plan, checkpoints, pool);
  } catch (const Error& error) {
    if (error.code() == ErrorCode::kNonFinite) save_halted(trainer, options, plan, checkpoints);
    if (trainer.halt_report()) part_after_halt(communicator, error);
    tell_others(communicator, error);  // before what is under way is given up
    throw;
  }
}

}  // namespace

int train_worker(const TrainOptions& options, Job& job) {
  try {
    return work(options, job);
  } catch (const Error& error) {
    tell_others(job.communicator(), error);
    throw;
  } catch (const std::exception& error) {
    job.communicator().abort(error.what());
    throw;
  }
}

}  // namespace lockstep
