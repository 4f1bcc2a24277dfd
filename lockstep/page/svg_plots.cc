#include "lockstep/page/svg_plots.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <limits>
#include <string_view>

#include "lockstep/base/index.h"
#include "lockstep/files/json.h"
#include "lockstep/page/assets.h"
#include "lockstep/report/progress.h"

namespace lockstep {
namespace {

constexpr double kWidth = 720;
constexpr double kHeight = 360;
constexpr double kLeft = 70;
constexpr double kRight = kWidth - 20;
constexpr double kTop = 40;
constexpr double kLegendRow = 16;
constexpr double kRowHeight = 34;
constexpr double kBarHeight = 20;
constexpr double kBarsWide = kRight - kLeft - 100;  // beside it is room for the time
constexpr double kMostTicks = 6;

constexpr std::array<std::string_view, 6> kColours = {"#0b62b8", "#b3470a", "#1a7f4b",
                                                      "#8b3fae", "#806000", "#0d7c86"};
constexpr std::array<std::string_view, 6> kDashes = {"", "7 3", "2 3", "10 3 2 3", "5 2", "1 2"};

struct Curve {
  std::string label;
  std::size_t look = 0;  // the number of the run
  bool marked = false;
  std::vector<std::pair<double, double>> points = {};
};

std::string escaped(std::string_view text) {
  std::string safe;
  for (const char c : text) {
    if (c == '<') {
      safe += "&lt;";
    } else if (c == '&') {
      safe += "&amp;";
    } else {
      safe += c;
    }
  }
  return safe;
}

std::string svg_text(double x, double y, std::string_view anchor, std::string_view text) {
  return fmt::format("<text x=\"{:.1f}\" y=\"{:.1f}\" text-anchor=\"{}\">{}</text>\n", x, y, anchor,
                     escaped(text));
}

std::string svg_begin(double height, std::string_view title) {
  return fmt::format(
             "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {0} {1}\" width=\"{0}\" "
             "height=\"{1}\" font-family=\"sans-serif\" font-size=\"12\" role=\"img\">\n"
             "<title>{2}</title>\n<rect width=\"{0}\" height=\"{1}\" fill=\"#fff\"/>\n",
             kWidth, height, escaped(title)) +
         svg_text(kLeft, 22, "start", title);
}

// Round numbers that cover low to high.
std::vector<double> round_ticks(double low, double high) {
  const double span = high > low ? high - low : 1;
  double step = std::pow(10, std::floor(std::log10(span / kMostTicks)));
  for (const double times : {2.0, 2.5, 2.0}) {  // 1, 2, 5, 10
    if (span / step > kMostTicks) step *= times;
  }
  std::vector<double> ticks;
  for (double value = std::ceil(low / step) * step; value <= high + step * 1e-9; value += step) {
    ticks.push_back(std::abs(value) < step * 1e-9 ? 0 : value);
  }
  return ticks;
}

std::string tick_label(double value) {
  const bool large = std::abs(value) >= 1e4;
  return large ? short_number(value) : fmt::format("{:.4g}", value);
}

// "loss" of every point of a run, as steps_json() has it; "val_loss" is pairs.
std::vector<std::pair<double, double>> points_of(const Json& steps, const std::string& key) {
  std::vector<std::pair<double, double>> points;
  const Json& values = steps.at(key);
  for (std::size_t i = 0; i < values.size(); ++i) {
    const bool pair = values[i].is_array();
    const Json& step = pair ? values[i][0] : steps.at("step")[i];
    const Json& value = pair ? values[i][1] : values[i];
    if (value.is_number()) points.emplace_back(step.get<double>(), value.get<double>());
  }
  return points;
}

struct Scale {
  double low = std::numeric_limits<double>::infinity();
  double high = -low;
  void cover(double value) {
    low = std::min(low, value);
    high = std::max(high, value);
  }
  double share(double value) const { return (value - low) / (high - low); }
};

std::string svg_curves(const std::string& title, const std::vector<Curve>& curves, bool from_zero) {
  Scale x;
  Scale y;
  for (const Curve& curve : curves) {
    for (const auto& [step, value] : curve.points) {
      x.cover(step);
      y.cover(value);
    }
  }
  if (x.low > x.high) x = y = {0, 1};
  if (from_zero) y.cover(0);
  if (x.low == x.high) x.high += 1;
  if (y.low == y.high) y.high += std::abs(y.high) > 0 ? std::abs(y.high) : 1;
  // Names stand above the curves, two in a row, and hide none.
  const auto named = static_cast<double>(
      std::ranges::count_if(curves, [](const Curve& curve) { return !curve.points.empty(); }));
  const double top = kTop + (named > 1 ? std::ceil(named / 2) * kLegendRow : 0);
  const double height = kHeight + top - kTop;
  const double bottom = height - 44;
  const auto at_x = [&](double step) { return kLeft + x.share(step) * (kRight - kLeft); };
  const auto at_y = [&](double value) { return bottom - y.share(value) * (bottom - top); };
  std::string svg = svg_begin(height, title);
  for (const double value : round_ticks(y.low, y.high)) {
    svg +=
        fmt::format("<path d=\"M{} {:.1f}H{}\" stroke=\"#d5dae0\"/>\n", kLeft, at_y(value), kRight);
    svg += svg_text(kLeft - 8, at_y(value) + 4, "end", tick_label(value));
  }
  for (const double step : round_ticks(x.low, x.high)) {
    svg += svg_text(at_x(step), bottom + 18, "middle", tick_label(step));
  }
  svg += svg_text((kLeft + kRight) / 2, height - 8, "middle", "step");
  int place = 0;
  for (const Curve& curve : curves) {
    if (curve.points.empty()) continue;
    const std::string_view colour = kColours[curve.look % kColours.size()];
    const std::string_view dashes = kDashes[curve.look % kDashes.size()];
    std::string path;
    for (const auto& [step, value] : curve.points) {
      path += fmt::format("{}{:.1f} {:.1f}", path.empty() ? "M" : "L", at_x(step), at_y(value));
      if (!curve.marked) continue;
      svg += fmt::format("<circle cx=\"{:.1f}\" cy=\"{:.1f}\" r=\"3\" fill=\"{}\"/>\n", at_x(step),
                         at_y(value), colour);
    }
    const auto line = [&](const std::string& d) {
      return fmt::format(
          "<path d=\"{}\" fill=\"none\" stroke=\"{}\" stroke-width=\"1.6\" "
          "stroke-dasharray=\"{}\"/>\n",
          d, colour, dashes);
    };
    svg += line(path);
    if (named < 2) continue;
    const double begin = kLeft + (place % 2 == 0 ? 0 : (kRight - kLeft) / 2);
    const double row = kTop + kLegendRow * (place / 2) - 2;
    svg += svg_text(begin + 44, row + 4, "start", curve.label);
    svg += line(fmt::format("M{} {:.1f}h36", begin, row));
    if (curve.marked) {
      svg += fmt::format("<circle cx=\"{}\" cy=\"{:.1f}\" r=\"3\" fill=\"{}\"/>\n", begin + 18, row,
                         colour);
    }
    ++place;
  }
  return svg + "</svg>\n";
}

// How each phase is hatched; an empty one is plain.
constexpr std::array<std::string_view, kPhases> kHatching = {
    "M0 4h8", "", "M0 8L8 0", "M0 0L8 8", "M4 0v8", "M0 4h8M4 0v8", "M0 0L8 8M0 8L8 0", ""};

// Communication that the backward pass hides takes no time of its own: a line below a bar.
std::string svg_hidden(double x, double y, double wide) {
  return fmt::format(
      "<path d=\"M{:.2f} {:.1f}h{:.2f}\" stroke=\"#1b1f24\" stroke-width=\"2\" "
      "stroke-dasharray=\"3 2\"/>\n",
      x, y, wide);
}

std::string svg_bars(const ReportedRun& run) {
  const std::vector<RankPhases> ranks = run.record->ranks();
  const auto& straggler = run.record->straggler();
  double longest = 1e-9;
  std::vector<double> totals;
  for (const RankPhases& rank : ranks) {
    double total = 0;
    for (std::size_t i = 0; i < index_of(Phase::kHidden); ++i) total += rank.mean.all()[i];
    totals.push_back(total);
    longest = std::max(longest, total);
  }
  const double top = kTop + 24;
  std::string svg = svg_begin(top + kRowHeight * static_cast<double>(ranks.size()) + 10,
                              fmt::format("{}: where the time of a step goes", run.name));
  svg += "<defs>\n";
  double x = kLeft;
  std::string key;
  for (std::size_t i = 0; i < index_of(Phase::kHidden); ++i) {
    const std::string_view colour = kColours[i % kColours.size()];
    svg += fmt::format(
        "<pattern id=\"p{0}\" width=\"8\" height=\"8\" patternUnits=\"userSpaceOnUse\"><rect "
        "width=\"8\" height=\"8\" fill=\"{1}\"/><path d=\"{2}\" stroke=\"#fff\"/></pattern>\n",
        i, colour, kHatching[i]);
    key +=
        fmt::format("<rect x=\"{:.0f}\" y=\"{}\" width=\"14\" height=\"12\" fill=\"url(#p{})\"/>\n",
                    x, kTop - 4, i);
    key += svg_text(x + 18, kTop + 6, "start", to_string(static_cast<Phase>(i)));
    x += 86;
  }
  const bool hides = std::ranges::any_of(
      ranks, [](const RankPhases& rank) { return rank.mean[Phase::kHidden] > 0; });
  if (hides) {
    key += svg_hidden(x - 18, kTop + 2, 14) + svg_text(x, kTop + 6, "start", "hidden");
  }
  svg += "</defs>\n" + key;
  for (std::size_t rank = 0; rank < ranks.size(); ++rank) {
    const double y = top + kRowHeight * static_cast<double>(rank);
    svg += svg_text(kLeft - 8, y + 14, "end", fmt::format("rank {}", rank));
    double begin = kLeft;
    for (std::size_t i = 0; i < index_of(Phase::kHidden); ++i) {
      const double wide = ranks[rank].mean.all()[i] / longest * kBarsWide;
      svg += fmt::format(
          "<rect x=\"{:.2f}\" y=\"{:.0f}\" width=\"{:.2f}\" height=\"{}\" fill=\"url(#p{})\"/>\n",
          begin, y, wide, kBarHeight, i);
      begin += wide;
    }
    const bool slow = straggler && straggler->rank == static_cast<int>(rank);
    svg += svg_text(begin + 6, y + 14, "start",
                    fmt::format("{:.3g} ms{}", totals[rank] * 1e3, slow ? " \u25c0 slow" : ""));
    const double hidden = std::min(1.0, ranks[rank].mean[Phase::kHidden] / longest);
    if (hidden > 0) svg += svg_hidden(kLeft, y + kBarHeight + 5, hidden * kBarsWide);
  }
  return svg + "</svg>\n";
}

}  // namespace

std::vector<std::pair<std::string, std::string>> svg_plots(const std::vector<ReportedRun>& runs) {
  std::vector<Json> steps;
  for (const ReportedRun& run : runs) steps.push_back(steps_json(*run.record));
  std::vector<std::pair<std::string, std::string>> plots;
  const Json all = parse_json(assets::kPlotsJson);
  for (const Json& plot : all["plots"]) {
    std::vector<Curve> curves;
    for (std::size_t i = 0; i < runs.size(); ++i) {
      for (const Json& series : plot["series"]) {
        Curve curve{.label = series["label"].get<std::string>(),
                    .look = i,
                    .marked = series.value("marked", false)};
        if (runs.size() > 1) curve.label = runs[i].name + " " + curve.label;
        curve.points = points_of(steps[i], series["key"].get<std::string>());
        curves.push_back(std::move(curve));
      }
    }
    const std::string unit = plot["unit"].get<std::string>();
    plots.emplace_back(
        plot["id"].get<std::string>(),
        svg_curves(plot["title"].get<std::string>() + (unit.empty() ? "" : ", " + unit), curves,
                   plot.value("from_zero", false)));
  }
  for (std::size_t i = 0; i < runs.size(); ++i) {
    plots.emplace_back(runs.size() == 1 ? "phases" : fmt::format("phases-{}", i + 1),
                       svg_bars(runs[i]));
  }
  return plots;
}

}  // namespace lockstep
