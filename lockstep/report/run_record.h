#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "lockstep/files/json.h"
#include "lockstep/train/step_report.h"

namespace lockstep {

// A step of a run, or the mean over several that follow each other.
struct RunPoint {
  std::int64_t step = 0;  // the last of them
  double loss = 0;
  double gradient_norm = 0;
  double learning_rate = 0;
  double tokens_per_second = 0;
  double seconds = 0;
  std::int64_t tokens = 0;                // of the run up to here
  std::optional<double> validation_loss;  // the last
};

// A rank in the last steps.
struct RankPhases {
  PhaseTimes mean;  // seconds
  std::uint32_t lanes = 0;
};

// What the lines of metrics.jsonl tell of a run: what pages, reports and metrics show. Keeps what
// is shown, and no more: memory does not grow with the length of a run. Pure; one thread at a time.
class RunRecord {
 public:
  // When there are more, pairs of them become one.
  static constexpr std::size_t kMostPoints = 8192;
  static constexpr std::size_t kMostEvents = 1000;
  // The steps whose phases are averaged.
  static constexpr std::size_t kRecentSteps = 50;
  // The events that are counted.
  static constexpr std::array<std::string_view, 7> kCounted = {
      "lost", "expelled", "joined", "left", "went back", "saved", "halted"};

  // A line of metrics.jsonl (docs/metrics.md). What is none is ignored. Of a step that comes twice,
  // because the run went back, the first is a point; what the run does now is what the last says.
  void add(std::string_view line);

  // How many steps a point stands for.
  std::int64_t stride() const { return stride_; }
  // Oldest first. The last one may stand for fewer steps than the others, and changes.
  const std::vector<RunPoint>& points() const { return points_; }
  // All lines of events, oldest first; of very many, the first and the last ones.
  const std::vector<Json>& events() const { return events_; }
  // The line of the last start, or null.
  const Json& start() const { return start_; }
  // "running", "done", "stopped", "halted"; "unknown" where there was no line of a start.
  std::string_view state() const { return state_; }

  std::int64_t step() const { return step_; }  // that the run has done; falls if it goes back
  std::int64_t furthest() const { return furthest_; }  // that it has ever done
  // The last line of a step.
  const std::optional<RunPoint>& last() const { return last_; }
  std::optional<std::int64_t> steps() const;  // that the run is to make
  std::int64_t tokens() const { return points_.empty() ? 0 : points_.back().tokens; }
  double epoch() const { return epoch_; }
  std::optional<double> seconds_left() const;
  std::optional<double> validation_loss() const { return validation_loss_; }
  std::optional<double> validation_bits() const { return validation_bits_; }  // per byte
  std::optional<double> validation_accuracy() const { return validation_accuracy_; }
  // As it was found last, while ranks are the same.
  const std::optional<Straggler>& straggler() const { return straggler_; }
  // By rank, means over the last steps that were made by as many ranks.
  std::vector<RankPhases> ranks() const;
  // By rank: the names of the members, where they were told.
  const std::vector<std::string>& members() const { return members_; }
  // Of events of this kind, one of kCounted; never falls but for a new start.
  std::int64_t count(std::string_view event) const;

 private:
  void add_step(const Json& line);
  void add_event(const Json& line);
  void add_phases(const Json& line);
  void begin(const Json& line);
  void add_point(const RunPoint& point);
  void halve();

  std::vector<RunPoint> points_;
  std::int64_t stride_ = 1;
  std::int64_t in_last_ = 0;  // steps that the last point stands for
  std::vector<Json> events_;
  std::array<std::int64_t, kCounted.size()> counts_{};
  Json start_;
  std::string_view state_ = "unknown";
  std::int64_t step_ = 0;
  std::int64_t furthest_ = 0;
  std::optional<RunPoint> last_;
  double epoch_ = 0;
  double seconds_per_step_ = 0;  // a moving average
  std::optional<double> validation_loss_;
  std::optional<double> validation_bits_;
  std::optional<double> validation_accuracy_;
  std::optional<Straggler> straggler_;
  std::deque<std::vector<RankPhases>> recent_;
  std::vector<std::string> members_;
};

// The same as JSON, as docs/page.md specifies: all but the points, and the points after step
// `after`.
Json run_json(const RunRecord& record);
Json steps_json(const RunRecord& record, std::int64_t after = 0);
// The same for Prometheus.
std::string prometheus_text(const RunRecord& record, const std::string& run);

}  // namespace lockstep
