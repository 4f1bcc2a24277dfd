#include "lockstep/train/killing_lanes.h"

#include <algorithm>
#include <iterator>

namespace lockstep {

void KillingLanes::lost(std::int64_t step, std::uint64_t generation,
                        std::span<const std::uint32_t> lanes, const std::string& how) {
  if (step != step_) losses_.clear();
  step_ = step;
  how_ = how;
  if (losses_.empty() || losses_.back().generation != generation) {
    losses_.push_back({generation, {}});
  }
  std::vector<std::uint32_t>& all = losses_.back().lanes;
  all.insert(all.end(), lanes.begin(), lanes.end());
  std::ranges::sort(all);
  all.erase(std::unique(all.begin(), all.end()), all.end());
  if (losses_.size() > kTimes) losses_.erase(losses_.begin());
}

void KillingLanes::done(std::int64_t step) {
  if (step >= step_) losses_.clear();
}

std::optional<KillingLanes::Finding> KillingLanes::finding(std::size_t times) const {
  if (losses_.size() < times) return std::nullopt;
  std::vector<std::uint32_t> common = losses_.front().lanes;
  for (const Loss& loss : losses_) {
    std::vector<std::uint32_t> both;
    std::ranges::set_intersection(common, loss.lanes, std::back_inserter(both));
    common = std::move(both);
  }
  if (common.empty()) return std::nullopt;
  return Finding{step_, std::move(common), how_};
}

HaltReport halt_report(const KillingLanes::Finding& finding, const LanePlan& plan) {
  HaltReport report;
  report.step = finding.step;
  report.what = "crash";
  report.value = finding.how;
  for (const std::uint32_t lane : finding.lanes) {
    std::vector<std::uint64_t> samples(plan.micro_batch);
    plan.sample_ids(static_cast<std::uint64_t>(finding.step - 1), lane, samples);
    if (report.samples.empty()) {
      report.lane = lane;
      report.samples = std::move(samples);
    } else {
      report.more.push_back({lane, std::move(samples)});
    }
  }
  return report;
}

}  // namespace lockstep
