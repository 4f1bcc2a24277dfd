#include "lockstep/report/run_record.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <utility>

#include "lockstep/base/index.h"

namespace lockstep {
namespace {

constexpr double kWeightOfStep = 0.1;  // of the newest, in the moving average of the time it takes

std::optional<double> number_at(const Json& object, const char* key) {
  const auto found = object.find(key);
  if (found == object.end() || !found->is_number()) return std::nullopt;
  return found->get<double>();
}

std::int64_t whole_at(const Json& object, const char* key, std::int64_t otherwise) {
  const auto found = object.find(key);
  return found == object.end() || !found->is_number_integer() ? otherwise
                                                              : found->get<std::int64_t>();
}

std::vector<std::string> texts_at(const Json& object, const char* key) {
  std::vector<std::string> texts;
  const auto found = object.find(key);
  if (found == object.end() || !found->is_array()) return texts;
  for (const Json& text : *found) {
    if (text.is_string()) texts.push_back(text.get<std::string>());
  }
  return texts;
}

std::string text_at(const Json& object, const char* key) {
  const auto found = object.find(key);
  return found == object.end() || !found->is_string() ? "" : found->get<std::string>();
}

// Makes `mean`, which stands for `steps`, the mean of itself and of `later`.
void fold(RunPoint& mean, double steps, const RunPoint& later, double later_steps) {
  const auto mix = [&](double& value, double other) {
    value = (value * steps + other * later_steps) / (steps + later_steps);
  };
  mix(mean.loss, later.loss);
  mix(mean.gradient_norm, later.gradient_norm);
  mix(mean.learning_rate, later.learning_rate);
  mix(mean.tokens_per_second, later.tokens_per_second);
  mix(mean.seconds, later.seconds);
  mean.step = later.step;
  mean.tokens = later.tokens;
  if (later.validation_loss) mean.validation_loss = later.validation_loss;
}

}  // namespace

namespace {

std::size_t place_in(decltype(RunRecord::kCounted)::const_iterator counted) {
  return static_cast<std::size_t>(counted - RunRecord::kCounted.begin());
}

}  // namespace

void RunRecord::add(std::string_view text) {
  const Json line = parse_json(text);
  if (!line.is_object()) return;
  if (line.contains("event")) {
    add_event(line);
  } else {
    add_step(line);
  }
}

void RunRecord::add_step(const Json& line) {
  const std::int64_t step = whole_at(line, "step", 0);
  if (step <= 0) return;
  step_ = step;
  RunPoint point;
  point.step = step;
  point.loss = number_at(line, "loss").value_or(NAN);
  point.gradient_norm = number_at(line, "grad_norm").value_or(NAN);
  point.learning_rate = number_at(line, "lr").value_or(NAN);
  point.tokens_per_second = number_at(line, "tokens_per_s").value_or(NAN);
  point.seconds = number_at(line, "seconds").value_or(0);
  point.validation_loss = number_at(line, "val_loss");
  point.tokens = tokens() + (step > furthest_ ? whole_at(line, "tokens", 0) : 0);
  epoch_ = number_at(line, "epoch").value_or(epoch_);
  if (point.seconds > 0) {
    seconds_per_step_ =
        seconds_per_step_ == 0
            ? point.seconds
            : seconds_per_step_ + kWeightOfStep * (point.seconds - seconds_per_step_);
  }
  if (point.validation_loss) validation_loss_ = point.validation_loss;
  if (const auto bits = number_at(line, "val_bits_per_byte")) validation_bits_ = bits;
  if (const auto share = number_at(line, "val_accuracy")) validation_accuracy_ = share;
  // Nobody looks for one in the steps between.
  if (step % kStragglerWindow == 0) straggler_.reset();
  if (const auto found = line.find("straggler"); found != line.end() && found->is_object()) {
    straggler_ = {static_cast<int>(whole_at(*found, "rank", 0)),
                  number_at(*found, "slower").value_or(0)};
  }
  if (state_ == "unknown" && !start_.is_null()) state_ = "running";
  add_phases(line);
  last_ = point;
  if (step <= furthest_) return;
  furthest_ = step;
  add_point(point);
}

void RunRecord::add_phases(const Json& line) {
  const auto phases = line.find("phases");
  if (phases == line.end() || !phases->is_array()) return;
  const auto lanes = line.find("lanes");
  std::vector<RankPhases> ranks;
  for (const Json& times : *phases) {
    RankPhases rank;
    for (std::size_t i = 0; i < kPhases && times.is_object(); ++i) {
      const std::string name(to_string(static_cast<Phase>(i)));
      rank.mean.all()[i] = number_at(times, name.c_str()).value_or(0);
    }
    const std::size_t place = ranks.size();
    if (lanes != line.end() && lanes->is_array() && place < lanes->size() &&
        (*lanes)[place].is_number_unsigned()) {
      rank.lanes = (*lanes)[place].get<std::uint32_t>();
    }
    ranks.push_back(rank);
  }
  if (!recent_.empty() && recent_.back().size() != ranks.size()) {
    recent_.clear();
    if (straggler_ && !line.contains("straggler")) straggler_.reset();
  }
  recent_.push_back(std::move(ranks));
  if (recent_.size() > kRecentSteps) recent_.pop_front();
}

void RunRecord::add_point(const RunPoint& point) {
  if (points_.empty() || in_last_ == stride_) {
    if (points_.size() == kMostPoints) halve();
    points_.push_back(point);
    in_last_ = 1;
    return;
  }
  fold(points_.back(), static_cast<double>(in_last_), point, 1);
  ++in_last_;
}

void RunRecord::halve() {
  for (std::size_t i = 0; i + 1 < points_.size(); i += 2) {
    fold(points_[i], 1, points_[i + 1], 1);
    points_[i / 2] = points_[i];
  }
  points_.resize(points_.size() / 2);
  stride_ *= 2;
  in_last_ = stride_;
}

void RunRecord::add_event(const Json& line) {
  const std::string kind = text_at(line, "event");
  if (kind == "started") begin(line);
  if (kind == "halted") state_ = "halted";
  if (kind == "ended") state_ = text_at(line, "how") == "stopped" ? "stopped" : "done";
  if (kind == "went back") step_ = std::min(step_, whole_at(line, "back_to", step_));
  if (auto members = texts_at(line, "members"); !members.empty()) {
    if (members != members_) straggler_.reset();
    members_ = std::move(members);
  }
  const auto counted = std::ranges::find(kCounted, kind);
  if (counted != kCounted.end()) ++counts_[place_in(counted)];
  if (events_.size() == kMostEvents) events_.erase(events_.begin() + kMostEvents / 2);
  events_.push_back(line);
}

// A run that is resumed forgets the steps that it does again, as its file does.
void RunRecord::begin(const Json& line) {
  start_ = line;
  state_ = "running";
  const std::int64_t done = whole_at(line, "step", 1) - 1;
  while (!points_.empty() && points_.back().step > done) points_.pop_back();
  in_last_ = stride_;
  std::erase_if(events_, [&](const Json& event) {
    if (whole_at(event, "step", 0) <= done) return false;
    const auto counted = std::ranges::find(kCounted, text_at(event, "event"));
    if (counted != kCounted.end()) --counts_[place_in(counted)];
    return true;
  });
  step_ = std::min(step_, done);
  furthest_ = std::min(furthest_, done);
  last_ = points_.empty() ? std::nullopt : std::optional(points_.back());
  recent_.clear();
  straggler_.reset();
}

std::optional<std::int64_t> RunRecord::steps() const {
  if (!start_.is_object() || !start_.contains("steps")) return std::nullopt;
  return whole_at(start_, "steps", 0);
}

std::optional<double> RunRecord::seconds_left() const {
  if (!steps() || state_ != "running" || seconds_per_step_ == 0) return std::nullopt;
  return seconds_per_step_ * static_cast<double>(std::max<std::int64_t>(0, *steps() - step_));
}

std::vector<RankPhases> RunRecord::ranks() const {
  if (recent_.empty()) return {};
  std::vector<RankPhases> ranks = recent_.back();
  for (std::size_t rank = 0; rank < ranks.size(); ++rank) {
    for (std::size_t i = 0; i < kPhases; ++i) {
      double sum = 0;
      for (const auto& step : recent_) sum += step[rank].mean.all()[i];
      ranks[rank].mean.all()[i] = sum / static_cast<double>(recent_.size());
    }
  }
  return ranks;
}

std::int64_t RunRecord::count(std::string_view event) const {
  const auto counted = std::ranges::find(kCounted, event);
  return counted == kCounted.end() ? 0 : counts_[place_in(counted)];
}

namespace {

// JSON has no NaN.
Json number_or_null(double value) { return std::isfinite(value) ? Json(value) : Json(nullptr); }

template <typename Value>
Json value_or_null(const std::optional<Value>& value) {
  return value ? Json(*value) : Json(nullptr);
}

Json phases_json(const PhaseTimes& times) {
  Json phases = Json::object();
  for (std::size_t i = 0; i < kPhases; ++i) {
    phases[std::string(to_string(static_cast<Phase>(i)))] = times.all()[i];
  }
  return phases;
}

}  // namespace

Json run_json(const RunRecord& record) {
  Json json = {{"state", record.state()},
               {"step", record.step()},
               {"steps", value_or_null(record.steps())},
               {"epoch", record.epoch()},
               {"tokens", record.tokens()},
               {"seconds_left", value_or_null(record.seconds_left())},
               {"val_loss", value_or_null(record.validation_loss())},
               {"val_accuracy", value_or_null(record.validation_accuracy())},
               {"val_bits_per_byte", value_or_null(record.validation_bits())}};
  const auto& last = record.last();
  json["loss"] = last ? number_or_null(last->loss) : Json(nullptr);
  json["tokens_per_s"] = last ? number_or_null(last->tokens_per_second) : Json(nullptr);
  json["stride"] = record.stride();
  json["straggler"] = nullptr;
  if (record.straggler()) {
    json["straggler"] = {{"rank", record.straggler()->rank},
                         {"slower", record.straggler()->slower}};
  }
  json["ranks"] = Json::array();
  const std::vector<RankPhases> ranks = record.ranks();
  for (std::size_t rank = 0; rank < std::max(ranks.size(), record.members().size()); ++rank) {
    Json entry = {{"rank", rank}};
    if (rank < record.members().size()) entry["name"] = record.members()[rank];
    if (rank < ranks.size()) {
      entry["lanes"] = ranks[rank].lanes;
      entry["phases"] = phases_json(ranks[rank].mean);
    }
    json["ranks"].push_back(std::move(entry));
  }
  json["start"] = record.start();
  json["events"] = record.events();
  return json;
}

Json steps_json(const RunRecord& record, std::int64_t after) {
  Json step = Json::array();
  Json loss = Json::array();
  Json norm = Json::array();
  Json rate = Json::array();
  Json speed = Json::array();
  Json seconds = Json::array();
  Json validation = Json::array();  // pairs: there are few
  const auto first = std::ranges::upper_bound(record.points(), after, {}, &RunPoint::step);
  for (auto point = first; point != record.points().end(); ++point) {
    step.push_back(point->step);
    loss.push_back(number_or_null(point->loss));
    norm.push_back(number_or_null(point->gradient_norm));
    rate.push_back(number_or_null(point->learning_rate));
    speed.push_back(number_or_null(point->tokens_per_second));
    seconds.push_back(number_or_null(point->seconds));
    if (point->validation_loss) validation.push_back({point->step, *point->validation_loss});
  }
  return {{"stride", record.stride()},     {"step", std::move(step)},
          {"loss", std::move(loss)},       {"grad_norm", std::move(norm)},
          {"lr", std::move(rate)},         {"tokens_per_s", std::move(speed)},
          {"seconds", std::move(seconds)}, {"val_loss", std::move(validation)}};
}

namespace {

// The value of a label, with what would end it escaped.
std::string label(std::string_view text) {
  std::string escaped;
  for (const char c : text) {
    if (c == '\\' || c == '"') escaped += '\\';
    escaped += c == '\n' ? ' ' : c;
  }
  return escaped;
}

// The lines of one metric: what it is, and its samples.
class Metric {
 public:
  Metric(std::string& text, std::string_view name, std::string_view kind, std::string_view help)
      : text_(text), name_(name) {
    text_ += fmt::format("# HELP {} {}\n# TYPE {} {}\n", name, help, name, kind);
  }
  void add(const std::string& labels, double value) {
    text_ += fmt::format("{}{{{}}} {}\n", name_, labels, value);
  }

 private:
  std::string& text_;
  const std::string_view name_;
};

}  // namespace

std::string prometheus_text(const RunRecord& record, const std::string& run) {
  std::string text;
  const std::string own = fmt::format("run=\"{}\"", label(run));
  const auto one = [&](std::string_view name, std::string_view kind, std::string_view help,
                       std::optional<double> value) {
    if (value && std::isfinite(*value)) Metric(text, name, kind, help).add(own, *value);
  };
  const auto of_last = [&](double RunPoint::*member) -> std::optional<double> {
    return record.last() ? std::optional((*record.last()).*member) : std::nullopt;
  };
  // A counter must not fall when the run goes back.
  one("lockstep_steps_total", "counter", "Steps that are done.",
      static_cast<double>(record.furthest()));
  one("lockstep_tokens_total", "counter", "Tokens that were trained on.",
      static_cast<double>(record.tokens()));
  if (record.steps()) {
    one("lockstep_steps_planned", "gauge", "Steps that the run is to make.",
        static_cast<double>(*record.steps()));
  }
  one("lockstep_running", "gauge", "1 while the run trains.", record.state() == "running" ? 1 : 0);
  one("lockstep_epochs", "gauge", "Passes over the data that are done.", record.epoch());
  one("lockstep_loss_nats", "gauge", "Mean loss per token.", of_last(&RunPoint::loss));
  one("lockstep_validation_loss_nats", "gauge", "Mean loss per token of the validation.",
      record.validation_loss());
  one("lockstep_validation_accuracy_ratio", "gauge",
      "Share of the validation's tokens that the model held for the likeliest.",
      record.validation_accuracy());
  one("lockstep_gradient_norm", "gauge", "Norm of the gradient before it is clipped.",
      of_last(&RunPoint::gradient_norm));
  one("lockstep_learning_rate", "gauge", "Learning rate of the step.",
      of_last(&RunPoint::learning_rate));
  one("lockstep_tokens_per_second", "gauge", "Tokens that are trained on in a second.",
      of_last(&RunPoint::tokens_per_second));
  one("lockstep_step_duration_seconds", "gauge", "Time of the step.", of_last(&RunPoint::seconds));
  one("lockstep_remaining_seconds", "gauge", "Time until the last step.", record.seconds_left());
  const std::vector<RankPhases> ranks = record.ranks();
  one("lockstep_workers", "gauge", "Workers in the last step.", static_cast<double>(ranks.size()));
  Metric events(text, "lockstep_events_total", "counter", "Events of the run, by kind.");
  for (const std::string_view kind : RunRecord::kCounted) {
    events.add(fmt::format("{},kind=\"{}\"", own, kind), static_cast<double>(record.count(kind)));
  }
  if (ranks.empty()) return text;
  Metric phases(text, "lockstep_phase_duration_seconds", "gauge",
                "Time of a phase of the step by rank, a mean over the last steps.");
  for (std::size_t rank = 0; rank < ranks.size(); ++rank) {
    for (std::size_t i = 0; i < index_of(Phase::kHidden); ++i) {
      phases.add(
          fmt::format("{},rank=\"{}\",phase=\"{}\"", own, rank, to_string(static_cast<Phase>(i))),
          ranks[rank].mean.all()[i]);
    }
  }
  // Not among the phases: it takes no time of the step's own, and phases can be added up.
  Metric hidden(
      text, "lockstep_hidden_communication_seconds", "gauge",
      "Communication of the step that the backward pass hid, a mean over the last steps.");
  for (std::size_t rank = 0; rank < ranks.size(); ++rank) {
    hidden.add(fmt::format("{},rank=\"{}\"", own, rank), ranks[rank].mean[Phase::kHidden]);
  }
  Metric lanes(text, "lockstep_lanes", "gauge", "Lanes of the step by rank.");
  for (std::size_t rank = 0; rank < ranks.size(); ++rank) {
    lanes.add(fmt::format("{},rank=\"{}\"", own, rank), ranks[rank].lanes);
  }
  return text;
}

}  // namespace lockstep
