#include "lockstep/run/narrator.h"

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <utility>

#include "lockstep/base/error.h"
#include "lockstep/base/log.h"
#include "lockstep/base/utf8.h"
#include "lockstep/model/cpu/decoder.h"
#include "lockstep/model/gpu_model.h"
#include "lockstep/train/checkpoint/folders.h"
#include "lockstep/train/run_checkpoints.h"
#include "lockstep/train/sampler.h"

namespace lockstep {
namespace {

constexpr auto kBetweenLaneNotes = std::chrono::seconds(30);
// Lines of metrics that wait while another process holds the folder; then the oldest go.
constexpr std::size_t kMostWaiting = 100'000;

void announce_plan(const TrainPlan& plan, Trainer& trainer, int threads) {
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
  log(LogLevel::kInfo, "checkpoints: every {}, {}B each, written behind training; {} stay in {}",
      every.steps > 0 ? counted(every.steps, "step") : to_string(every), short_number(bytes),
      options.keep_last > 0 ? fmt::format("the last {} and the best", options.keep_last) : "all",
      options.out);
}

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
                   bool takes_over, OutputHold& hold)
    : data_(plan.data),
      out_(options.out),
      steps_done_(steps_done),
      takes_over_(takes_over),
      hold_(hold) {
  log_.emplace(options.log.value_or(default_log_style()), plan.how.schedule.steps,
               plan.data.bytes_per_token);
}

void Narrator::step(const StepReport& report) {
  log_->step(report);
  if (report.save && out_.empty()) log_->note("nothing is saved: there is no --out");
  write({report.step, metrics_line(report, data_.bytes_per_token)});
  if (report.validation_loss) validation_loss_ = report.validation_loss;
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
  write({std::nullopt, metrics_line(event)});
}

void Narrator::write(Line line) {
  if (out_.empty()) return;
  waiting_.push_back(std::move(line));
  if (waiting_.size() > kMostWaiting) waiting_.pop_front();
  write_waiting();
}

void Narrator::write_waiting() {
  if (waiting_.empty() || !hold_.held()) return;
  const std::string path = out_ + "/" + kMetricsFile;
  if (!metrics_) {
    metrics_.emplace(takes_over_ ? MetricsFile::go_on(path, hold_.guard())
                                 : MetricsFile(path, steps_done_, hold_.guard()));
  }
  for (; !waiting_.empty(); waiting_.pop_front()) {
    const Line& line = waiting_.front();
    if (line.step) {
      metrics_->write_step(*line.step, line.text);
    } else {
      metrics_->write_event(line.text);
    }
  }
}

void Narrator::result() {
  log_.reset();
  try {
    if (!waiting_.empty()) hold_.guard().require(out_ + "/" + kMetricsFile);
    write_waiting();
  } catch (const Error& error) {
    log(LogLevel::kWarning, "the last lines of metrics are not written: {}", error.message());
  }
  tell_result(data_, validation_loss_);
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
