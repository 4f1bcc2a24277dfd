#include "lockstep/train/halt.h"

#include <fmt/format.h>

#include <utility>

#include "lockstep/base/text.h"
#include "lockstep/comm/kernels/kernels.h"
#include "lockstep/files/json.h"

namespace lockstep {
namespace {

std::string describe_lane(const HaltReport::Lane& lane) {
  std::vector<std::string> samples;
  for (const std::uint64_t sample : lane.samples) samples.push_back(std::to_string(sample));
  return fmt::format("lane {} (samples {})", lane.lane, list_of(samples));
}

}  // namespace

std::vector<HaltReport::Lane> HaltReport::lanes() const {
  std::vector<Lane> all = {{lane, samples}};
  all.insert(all.end(), more.begin(), more.end());
  return all;
}

std::string to_string(const HaltReport& report) {
  const std::string where =
      fmt::format("{}, element {}, is {}", report.tensor, report.element, report.value);
  std::string text = fmt::format("step {}: ", report.step);
  if (report.what == "weight") {
    text += fmt::format("weight {} on rank {} ({})", where, report.rank, report.host);
  } else if (report.what == "sum") {
    text += fmt::format("all lanes are finite, but their sum is not: the gradient of {}", where);
  } else if (report.what == "crash") {
    std::vector<std::string> lanes;
    for (const HaltReport::Lane& lane : report.lanes()) lanes.push_back(describe_lane(lane));
    text += fmt::format(
        "workers crashed again and again, and every one of them had {}; the last one: {}",
        list_of(lanes), report.value);
  } else {
    text += fmt::format("{} on rank {} ({}): ", describe_lane({report.lane, report.samples}),
                        report.rank, report.host);
    text += report.what == "loss" ? fmt::format("the loss is {}", report.value)
                                  : fmt::format("the gradient of {}", where);
  }
  return text + "; no weights were changed";
}

std::string to_json(const HaltReport& report) {
  Json json = {
      {"step", report.step},       {"what", report.what},       {"lane", report.lane},
      {"samples", report.samples}, {"rank", report.rank},       {"host", report.host},
      {"tensor", report.tensor},   {"element", report.element}, {"value", report.value},
  };
  if (!report.more.empty()) json["more"] = Json::array();
  for (const HaltReport::Lane& lane : report.more) {
    json["more"].push_back({{"lane", lane.lane}, {"samples", lane.samples}});
  }
  return to_text(json);
}

namespace {

std::optional<HaltReport::Lane> read_halt_lane(const Json& json) {
  JsonReader reader(json);
  HaltReport::Lane lane;
  lane.lane = static_cast<std::uint32_t>(reader.whole("lane", UINT32_MAX));
  auto samples = wholes<std::uint64_t>(reader.list("samples"));
  if (reader.problem() || !samples) return std::nullopt;
  lane.samples = std::move(*samples);
  return lane;
}

}  // namespace

std::optional<HaltReport> parse_halt_report(std::string_view text) {
  const Json json = parse_json(text);
  JsonReader reader(json);
  HaltReport report;
  report.step = static_cast<std::int64_t>(reader.whole("step", INT64_MAX));
  report.what = reader.text("what");
  const auto lane = read_halt_lane(json);
  const Json* rank = reader.value("rank");
  const auto named = rank != nullptr ? whole<int>(*rank, -1) : std::nullopt;
  report.host = reader.text("host");
  report.tensor = reader.text("tensor");
  report.element = reader.whole("element");
  report.value = reader.text("value");
  if (reader.problem() || !lane || !named) return std::nullopt;
  report.rank = *named;
  report.lane = lane->lane;
  report.samples = lane->samples;
  if (!json.contains("more")) return report;
  for (const Json& entry : reader.list("more")) {
    auto more = read_halt_lane(entry);
    if (!more) return std::nullopt;
    report.more.push_back(std::move(*more));
  }
  if (reader.problem()) return std::nullopt;
  return report;
}

bool find_non_finite_tensor(const ParameterLayout& layout, std::span<const float> values,
                            HaltReport& report) {
  for (const TensorSpec& tensor : layout.tensors()) {
    const float* begin = values.data() + tensor.range.begin;
    const std::size_t place = find_non_finite(DataType::kF32, begin, tensor.range.size());
    if (place == tensor.range.size()) continue;
    report.tensor = tensor.name;
    report.element = place;
    report.value = fmt::format("{}", begin[place]);
    return true;
  }
  return false;
}

}  // namespace lockstep
