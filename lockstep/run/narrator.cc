#include "lockstep/run/narrator.h"

#include <fmt/format.h>

#include <algorithm>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <utility>
#include <variant>

#include "lockstep/base/cores.h"
#include "lockstep/base/error.h"
#include "lockstep/base/host.h"
#include "lockstep/base/log.h"
#include "lockstep/base/processor.h"
#include "lockstep/base/text.h"
#include "lockstep/base/utf8.h"
#include "lockstep/files/json.h"
#include "lockstep/model/cpu/decoder.h"
#include "lockstep/model/gpu_model.h"
#include "lockstep/run/memory.h"
#include "lockstep/train/checkpoint/folders.h"
#include "lockstep/train/checkpoint/manifest.h"
#include "lockstep/train/run_checkpoints.h"
#include "lockstep/train/sampler.h"

namespace lockstep {
namespace {

constexpr auto kBetweenLaneNotes = std::chrono::seconds(30);
// Bytes of lines of metrics that wait, which the next rank 0 is told.
constexpr std::size_t kMostHandedOver = std::size_t{8} << 20;

// Which samples are kept for validation: those of files with such a name, or the last ones.
std::string kept_samples(const TrainPlan& plan) {
  const auto& files = plan.data.validation;
  std::string which;
  if (plan.data.mix.empty() && files.empty()) which = ", the last of the data,";
  if (plan.data.mix.empty() && !files.empty()) {
    which = fmt::format(", of {}{},", files[0].name(),
                        files.size() > 1 ? fmt::format(" and {} more", files.size() - 1) : "");
  }
  const std::uint64_t kept = plan.validation.size();
  return fmt::format("{} more{} {} for validation", kept, which, kept == 1 ? "is" : "are");
}

void announce_plan(const TrainPlan& plan, Trainer& trainer, int threads) {
  const ModelConfig& model = plan.how.model;
  log(LogLevel::kInfo, "data: {}, {} tokens of {}, {} of {}; {}", plan.data.name,
      short_number(static_cast<double>(tokens_in(plan.data.training))), plan.data.vocab,
      counted(static_cast<std::int64_t>(trainer.lanes().samples), "sample"), model.context,
      kept_samples(plan));
  for (const std::string& note : plan.data.notes) log(LogLevel::kInfo, "data: {}", note);
  const auto drawn =
      static_cast<double>(plan.how.global_batch) * static_cast<double>(plan.how.schedule.steps);
  for (std::size_t i = 0; i < plan.data.mix.size(); ++i) {
    const MixPart& part = plan.how.mix.training[i];
    log(LogLevel::kInfo, "mix: {:g} % {}, {}, {:.1f} passes over them",
        100 * static_cast<double>(part.share) / static_cast<double>(kMixBlock),
        plan.data.mix[i].name, counted(static_cast<std::int64_t>(part.samples), "sample"),
        passes(part, drawn));
  }
  log(LogLevel::kInfo, "model: {} parameters (hidden {}, {}, {}, {}, intermediate {}), {} of state",
      short_number(static_cast<double>(trainer.layout().size())), model.hidden,
      counted(model.layers, "layer"), counted(model.heads, "head"),
      counted(model.kv_heads, "kv head"), model.intermediate,
      short_number(static_cast<double>(trainer.replica().state_bytes())) + "B");
  log(LogLevel::kInfo, "run: {} of {} tokens in {}, {} passes over the data, {}, {}",
      counted(plan.how.schedule.steps, "step"),
      plan.how.global_batch * static_cast<std::uint64_t>(model.context),
      counted(static_cast<std::int64_t>(trainer.lanes().lanes()), "lane"),
      fmt::format("{:.1f}",
                  trainer.lanes().epochs(static_cast<std::uint64_t>(plan.how.schedule.steps))),
      to_string(plan.how.precision), plan.gpu ? gpu_name() : counted(threads, "thread"));
}

// What --init decides that nobody has asked for.
void announce_start(const TrainOptions& options, const TrainPlan& plan) {
  if (!plan.init) return;
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
  if (how.shard && how.buddy && workers <= 3) {
    log(LogLevel::kInfo,
        "workers: with {} of them --shard-optimizer saves no memory, because buddies hold each "
        "other's shards; more workers do, and --no-buddy does",
        workers);
  }
  if (trainer.reducer().traffic() > 1) {
    log(LogLevel::kInfo,
        "workers: {:.2f} times the gradient travels per worker, because {} lanes do not divide "
        "evenly; a power of two of lanes per worker avoids it",
        trainer.reducer().traffic(), trainer.lanes().lanes());
  }
}

void tell_result(const DataSource& data, const std::optional<StepReport>& validated) {
  if (!validated) return;
  const double loss = *validated->validation_loss;
  std::string line = fmt::format("validation loss {:.4f} nats per token", loss);
  if (validated->validation_accuracy) {
    line += fmt::format(", {:.1f} % of tokens correct", 100 * *validated->validation_accuracy);
  }
  if (const auto bits = bits_per_byte(loss, data.bytes_per_token)) {
    line += fmt::format(", {:.4f} bits per byte", *bits);
    if (data.entropy_per_byte > 0) {
      line += fmt::format(" (the source itself has {:.4f})", data.entropy_per_byte);
    }
  }
  log_line(LogLevel::kInfo, line);
}

std::string name_of_signal(int signal) {
  switch (signal) {
    case SIGINT: return "Ctrl-C";
    case SIGTERM: return "SIGTERM";
    case SIGHUP: return "the end of its terminal";
    default: return fmt::format("signal {}", signal);
  }
}

}  // namespace

std::string counted(std::int64_t count, const char* what) {
  return fmt::format("{} {}{}", count, what, count == 1 ? "" : "s");
}

SaveEvery save_every(const TrainOptions& options) {
  if (options.out.empty()) return {};
  return options.save_every.value_or(kDefaultSaveEvery);
}

void announce(const TrainOptions& options, const TrainPlan& plan, Trainer& trainer, int threads) {
  announce_plan(plan, trainer, threads);
  announce_start(options, plan);
  announce_workers(trainer);
}

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
  log(LogLevel::kInfo,
      "checkpoints: every {}, after every best validation and at the end, {}B each, written behind "
      "training; {} stay in {}",
      every.steps > 0 ? counted(every.steps, "step") : to_string(every), short_number(bytes),
      options.keep_last > 0 ? fmt::format("the last {} and the best", options.keep_last) : "all",
      options.out);
}

void tell_end(const TrainOptions& options, const TrainPlan& plan, const Trainer& trainer,
              const HowEnded& how) {
  const std::int64_t steps = trainer.steps_done();
  const std::string of_all = fmt::format("step {} of {}", steps, plan.how.schedule.steps);
  const bool stopped = how.stopped != 0 || how.end == RunEnd::kOutside;
  const bool early = !stopped && steps < plan.how.schedule.steps;
  std::string words = "done: " + counted(steps, "step");
  if (how.stopped != 0) {
    words = fmt::format("stopped by {} after {}", name_of_signal(how.stopped), of_all);
  } else if (how.end == RunEnd::kOutside) {
    words = fmt::format("the coordinator has ended the job after {}", of_all);
  } else if (early) {
    words = fmt::format("ended early after {}: {} without a better one", of_all,
                        counted(trainer.validation().since_best, "validation"));
  }
  if (how.nothing_left) {
    log(LogLevel::kInfo, "this run is complete ({}); to train further, resume it with {}", words,
        early ? "--early-stop 0" : "--steps N");
  } else {
    log(LogLevel::kInfo, "{}, in {}", words, short_duration(how.seconds));
  }
  if (options.out.empty()) {
    log(LogLevel::kWarning, "the model is not kept: there was no --out DIR");
    return;
  }
  const ValidationRecord& record = trainer.validation();
  std::string best = checkpoint_path(options.out, record.best_step);
  if (!std::filesystem::exists(best)) best.clear();
  if (record.best_step > 0 && (record.best_step < steps || how.nothing_left)) {
    log(LogLevel::kInfo, "the best validation loss was {:.4f}, after step {}{}", record.best_loss,
        record.best_step, best.empty() ? "" : ": " + best);
  }
  // After an early end the last model is known to be the worse one.
  const std::string& model = early && !best.empty() ? best : options.out;
  std::string next = fmt::format("lockstep generate {} --prompt \"Once\"", shell_word(model));
  if (!plan.data.tokenizer) next = "lockstep verify " + shell_word(options.out);
  if (stopped) next = "lockstep train --resume " + shell_word(options.out);
  log(LogLevel::kInfo, "the model is in {}; next: {}", options.out, next);
}

RunStart run_start(const TrainOptions& options, const TrainPlan& plan, Trainer& trainer,
                   const RunState& state, int threads) {
  RunStart start;
  start.step = trainer.steps_done() + 1;
  start.steps = plan.how.schedule.steps;
  const Communicator& communicator = trainer.communicator();
  for (int rank = 0; rank < communicator.world_size(); ++rank) {
    start.members.push_back(communicator.name_of(rank));
  }
  start.lanes = lanes_by_rank(trainer.owners(), communicator.world_size());
  const Json given = parse_json(options.remembered);
  start.settings = {{"data", plan.data.name},
                    {"training_tokens", tokens_in(plan.data.training)},
                    {"parameters", trainer.layout().size()},
                    {"lanes", trainer.lanes().lanes()},
                    {"transport", to_string(options.job.transport)},
                    {"save_every", to_string(save_every(options))},
                    {"options", given.is_object() ? given.value("options", Json()) : Json()},
                    {"run", parse_json(to_json(state))}};
  start.machine = {{"host", this_host().hostname},
                   {"processor", processor_level()},
                   {"cores", available_cores()},
                   {"threads", threads},
                   {"device", plan.gpu ? gpu_name() : "cpu"}};
  if (const auto memory = available_memory()) start.machine["free_memory_bytes"] = *memory;
  return start;
}

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

Narrator::Narrator(const TrainOptions& options, const TrainPlan& plan, std::int64_t steps_done,
                   bool takes_over, OutputHold& hold, Listener listener)
    : data_(plan.data),
      out_(options.out),
      tensorboard_(options.tensorboard),
      listener_(std::move(listener)),
      steps_done_(steps_done),
      hold_(hold) {
  log_.emplace(options.log.value_or(default_log_style()), plan.how.schedule.steps,
               plan.data.bytes_per_token);
  if (out_.empty()) return;
  metrics_.emplace(MetricsQueue::Options{.path = out_ + "/" + kMetricsFile,
                                         .steps_done = steps_done,
                                         .takes_over = takes_over,
                                         .guard = hold.guard(),
                                         .held = [&hold] { return hold.held(); }});
}

void Narrator::step(const StepReport& report) {
  log_->step(report);
  if (report.save && out_.empty()) log_->note("nothing is saved: there is no --out");
  ForBoard for_board;
  if (tensorboard_) for_board = [report](TensorBoardFile& board) { board.add(report); };
  add(report.step, metrics_line(report, data_.bytes_per_token), std::move(for_board));
  if (metrics_) metrics_->write();
  if (report.validation_loss) validated_ = report;
  if (!report.next_lanes.empty()) tell_lanes(report);
  if (report.straggler) {
    log_->note(fmt::format("rank {} takes {:.0f} % longer to compute than the median of the others",
                           report.straggler->rank, 100 * report.straggler->slower));
  }
}

void Narrator::event(const RunEvent& event) {
  told_lanes_.clear();  // ranks are others now
  const bool in_order =
      event.kind == RunEvent::Kind::kJoined || event.kind == RunEvent::Kind::kLeft;
  if (in_order) {
    log_line(LogLevel::kInfo, describe(event));
  } else {
    log_->note(describe(event));
  }
  write_event(metrics_line(event), "events", event.step, describe(event));
}

void Narrator::start(const RunStart& start) {
  const Json settings = {{"settings", start.settings}, {"machine", start.machine}};
  // TensorBoard shows text as Markdown, where this is text as it is.
  write_event(metrics_line(start), "settings", start.step,
              "```json\n" + to_text(settings, 2) + "\n```");
}

void Narrator::saved(const std::string& path) {
  const auto step = parse_checkpoint_name(std::filesystem::path(path).filename().string());
  std::ifstream file(path + "/" + kManifestFile);
  const auto parsed = parse_manifest(std::string(std::istreambuf_iterator<char>(file), {}));
  const auto* manifest = std::get_if<Manifest>(&parsed);
  if (!step || manifest == nullptr) return;  // a later one has taken its place
  write_event(saved_line(*step, checkpoint_name(*step), manifest->weights), "events", *step,
              fmt::format("saved {}, weights {}", checkpoint_name(*step), manifest->weights));
}

void Narrator::halted(std::int64_t step, const std::string& why) {
  write_event(halted_line(step, why), "events", step, "halted: " + why);
}

void Narrator::write_event(std::string text, std::string tag, std::int64_t step,
                           std::string words) {
  add_event(std::move(text), std::move(tag), step, std::move(words));
  if (metrics_) metrics_->write();
}

void Narrator::add_event(std::string text, std::string tag, std::int64_t step, std::string words) {
  ForBoard for_board;
  if (tensorboard_) {
    for_board = [tag = std::move(tag), step, words = std::move(words)](TensorBoardFile& board) {
      board.add_text(tag, words, step);
    };
  }
  add(std::nullopt, std::move(text), std::move(for_board));
}

std::string Narrator::waiting_lines() const {
  return metrics_ ? metrics_->waiting(kMostHandedOver) : "";
}

void Narrator::take_lines(const std::string& lines) {
  if (metrics_) metrics_->put_before(lines);
}

void Narrator::add(std::optional<std::int64_t> step, std::string text, ForBoard for_board) {
  if (listener_) listener_(text);
  if (!metrics_) return;
  std::function<void()> written;
  if (for_board) written = [this, write = std::move(for_board)] { write_to_board(write); };
  metrics_->add({step, std::move(text), std::move(written)});
}

// What does not get into the files for TensorBoard is lost there; metrics.jsonl has it.
void Narrator::write_to_board(const ForBoard& write) {
  try {
    if (!board_) board_.emplace(out_, steps_done_, hold_.guard());
    write(*board_);
  } catch (const Error& error) {
    if (!std::exchange(board_fails_, true)) {
      log(LogLevel::kWarning, "the files for TensorBoard are not complete: {}", error.message());
    }
  }
}

void Narrator::result(const RunFinish& end) {
  log_.reset();
  add_event(metrics_line(end), "events", end.step,
            fmt::format("{} after step {}, weights {}", end.how, end.step, end.hash));
  try {
    if (metrics_) metrics_->write_last();
  } catch (const Error& error) {
    log(LogLevel::kWarning, "the last lines of metrics are not written: {}", error.message());
  }
  tell_result(data_, validated_);
}

// At most once in a while; metrics.jsonl has every move.
void Narrator::tell_lanes(const StepReport& report) {
  const auto now = std::chrono::steady_clock::now();
  if (told_lanes_.empty()) told_lanes_ = report.lanes;
  if (told_at_ && now - *told_at_ < kBetweenLaneNotes) return;
  const std::string text = describe_lanes(told_lanes_, report.next_lanes);
  if (text.empty()) return;  // back where they were
  log_line(LogLevel::kInfo, text);
  told_lanes_ = report.next_lanes;
  told_at_ = now;
}

}  // namespace lockstep
