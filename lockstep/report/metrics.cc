#include "lockstep/report/metrics.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <fstream>
#include <numbers>
#include <utility>

#include "lockstep/base/error.h"
#include "lockstep/files/atomic_file.h"
#include "lockstep/files/json.h"

namespace lockstep {

std::optional<double> bits_per_byte(double loss, double bytes_per_token) {
  if (bytes_per_token <= 0) return std::nullopt;
  return loss / std::numbers::ln2 / bytes_per_token;
}

std::string metrics_line(const StepReport& report, double bytes_per_token) {
  Json line = {
      {"step", report.step},
      {"epoch", report.epoch},
      {"loss", report.loss},
      {"grad_norm", report.gradient_norm},
      {"lr", report.learning_rate},
      {"tokens", report.tokens},
      {"seconds", report.seconds},
      {"tokens_per_s",
       report.seconds > 0 ? static_cast<double>(report.tokens) / report.seconds : 0},
  };
  line["phases"] = Json::array();
  for (const PhaseTimes& times : report.phases) {
    Json entry;
    for (std::size_t i = 0; i < kPhases; ++i) {
      entry[std::string(to_string(static_cast<Phase>(i)))] = times.all()[i];
    }
    line["phases"].push_back(std::move(entry));
  }
  line["lanes"] = report.lanes;
  if (report.straggler) {
    line["straggler"] = {{"rank", report.straggler->rank}, {"slower", report.straggler->slower}};
  }
  if (report.validation_loss) {
    line["val_loss"] = *report.validation_loss;
    if (const auto bits = bits_per_byte(*report.validation_loss, bytes_per_token)) {
      line["val_bits_per_byte"] = *bits;
    }
  }
  return to_text(line);
}

namespace {

// The step of a complete line; nothing for anything else.
std::optional<std::int64_t> step_of(const Json& line) {
  if (!line.is_object() || !line.contains("step") || !line["step"].is_number()) return std::nullopt;
  return line["step"].get<std::int64_t>();
}

// The complete lines of steps 1 to `steps`. Later steps will be done again.
std::string lines_until(const std::string& path, std::int64_t steps) {
  std::string kept;
  std::ifstream file(path);
  for (std::string line; steps > 0 && std::getline(file, line);) {
    const auto step = step_of(parse_json(line));
    if (step && *step <= steps) kept += line + "\n";
  }
  return kept;
}

}  // namespace

MetricsFile::MetricsFile(std::string path, std::int64_t steps_done, WriteGuard guard)
    : guard_(std::move(guard)), path_(std::move(path)), last_step_(steps_done) {
  AtomicFile file(path_, guard_);
  file.write(lines_until(path_, steps_done));
  file.commit();
  open();
}

MetricsFile::MetricsFile(std::string path, WriteGuard guard, GoOn)
    : guard_(std::move(guard)), path_(std::move(path)) {
  guard_.require(path_);
  std::ifstream file(path_);
  std::uintmax_t complete = 0;  // bytes
  for (std::string line; std::getline(file, line) && !file.eof();) {
    complete += line.size() + 1;
    const Json json = parse_json(line);
    const auto step = step_of(json);
    if (step && !json.contains("event")) last_step_ = std::max(last_step_, *step);
  }
  open();
  if (::ftruncate(::fileno(file_.get()), static_cast<off_t>(complete)) != 0) {
    throw_io("cutting an incomplete line off " + path_, errno);
  }
}

MetricsFile MetricsFile::go_on(std::string path, WriteGuard guard) {
  return {std::move(path), std::move(guard), GoOn()};
}

void MetricsFile::open() {
  file_.reset(std::fopen(path_.c_str(), "ae"));
  if (!file_) throw_io("creating " + path_, errno);
}

void MetricsFile::write_step(std::int64_t step, const std::string& line) {
  if (step <= last_step_) return;
  write(line);
  last_step_ = step;
}

void MetricsFile::write_event(const std::string& line) { write(line); }

void MetricsFile::write(const std::string& line) {
  guard_.require(path_);
  fmt::print(file_.get(), "{}\n", line);
  if (std::fflush(file_.get()) != 0) throw_io("writing " + path_, errno);
}

}  // namespace lockstep
