#include "lockstep/report/metrics.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdint>
#include <numbers>
#include <span>
#include <string_view>
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
      {"correct", report.correct},
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
    if (report.validation_accuracy) line["val_accuracy"] = *report.validation_accuracy;
    if (const auto bits = bits_per_byte(*report.validation_loss, bytes_per_token)) {
      line["val_bits_per_byte"] = *bits;
    }
  }
  return to_text(line);
}

namespace {

// The step of a complete line; nothing for anything else.
std::optional<std::int64_t> step_of(const Json& line) {
  if (!line.is_object() || !line.contains("step")) return std::nullopt;
  return whole<std::int64_t>(line["step"]);
}

// What the file holds; nothing when there is none.
std::string contents_of(const FilePlace& place) {
  const auto file = place.folder->find(place.name);
  return file ? file->text(SIZE_MAX) : std::string();
}

// Calls `body` with every line, and whether the line is complete.
template <typename Body>
void for_lines(std::string_view text, Body&& body) {
  while (!text.empty()) {
    const std::size_t end = text.find('\n');
    body(text.substr(0, end), end != std::string_view::npos);
    text.remove_prefix(end == std::string_view::npos ? text.size() : end + 1);
  }
}

// The lines of steps 1 to `steps` that can be read. Later steps will be done again.
std::string lines_until(std::string_view text, std::int64_t steps) {
  std::string kept;
  if (steps == 0) return kept;
  for_lines(text, [&](std::string_view line, bool) {
    const auto step = step_of(parse_json(line));
    if (step && *step <= steps) kept.append(line).append("\n");
  });
  return kept;
}

}  // namespace

MetricsFile::MetricsFile(std::string path, std::int64_t steps_done, WriteGuard guard,
                         Storage& storage)
    : guard_(std::move(guard)), path_(std::move(path)), last_step_(steps_done) {
  const FilePlace place = place_of(path_, storage);
  AtomicFile file(path_, guard_, storage);
  file.write(lines_until(contents_of(place), steps_done));
  file.commit();
  file_ = place.folder->open(place.name, Folder::Mode::kAppend);
}

MetricsFile::MetricsFile(std::string path, WriteGuard guard, Storage& storage, GoOn)
    : guard_(std::move(guard)), path_(std::move(path)) {
  guard_.require(path_);
  const FilePlace place = place_of(path_, storage);
  std::uint64_t complete = 0;  // bytes
  for_lines(contents_of(place), [&](std::string_view line, bool whole) {
    if (!whole) return;
    complete += line.size() + 1;
    const Json json = parse_json(line);
    const auto step = step_of(json);
    if (step && !json.contains("event")) last_step_ = std::max(last_step_, *step);
  });
  file_ = place.folder->open(place.name, Folder::Mode::kAppend);
  file_->truncate(complete);
}

MetricsFile MetricsFile::go_on(std::string path, WriteGuard guard, Storage& storage) {
  return {std::move(path), std::move(guard), storage, GoOn()};
}

void MetricsFile::write_step(std::int64_t step, const std::string& line) {
  if (step <= last_step_) return;
  write(line);
  last_step_ = step;
}

void MetricsFile::write_event(const std::string& line) { write(line); }

void MetricsFile::write(const std::string& line) {
  intact_ = false;
  guard_.require(path_);
  const std::uint64_t before = file_->size();
  try {
    append_whole(*file_, line + "\n");
  } catch (const Error&) {
    intact_ = file_->size() == before;
    throw;
  }
  intact_ = true;
}

}  // namespace lockstep
