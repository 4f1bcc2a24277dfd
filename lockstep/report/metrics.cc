#include "lockstep/report/metrics.h"

#include <fmt/format.h>

#include <cerrno>
#include <nlohmann/json.hpp>
#include <numbers>
#include <utility>

#include "lockstep/base/error.h"

namespace lockstep {

std::optional<double> bits_per_byte(double loss, double bytes_per_token) {
  if (bytes_per_token <= 0) return std::nullopt;
  return loss / std::numbers::ln2 / bytes_per_token;
}

std::string metrics_line(const StepReport& report, double bytes_per_token) {
  nlohmann::ordered_json line = {
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
  line["phases"] = nlohmann::ordered_json::array();
  for (const PhaseTimes& times : report.phases) {
    nlohmann::ordered_json entry;
    for (std::size_t i = 0; i < kPhases; ++i) {
      entry[std::string(to_string(static_cast<Phase>(i)))] = times.all()[i];
    }
    line["phases"].push_back(std::move(entry));
  }
  if (report.straggler) {
    line["straggler"] = {{"rank", report.straggler->rank}, {"slower", report.straggler->slower}};
  }
  if (report.validation_loss) {
    line["val_loss"] = *report.validation_loss;
    if (const auto bits = bits_per_byte(*report.validation_loss, bytes_per_token)) {
      line["val_bits_per_byte"] = *bits;
    }
  }
  return line.dump();
}

MetricsFile::MetricsFile(std::string path)
    : path_(std::move(path)), file_(std::fopen(path_.c_str(), "we")) {
  if (!file_) throw_io("creating " + path_, errno);
}

void MetricsFile::write(const std::string& line) {
  fmt::print(file_.get(), "{}\n", line);
  if (std::fflush(file_.get()) != 0) throw_io("writing " + path_, errno);
}

}  // namespace lockstep
