#include "lockstep/flight/flight_timeline.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <map>
#include <set>
#include <string_view>

#include "lockstep/files/json.h"

namespace lockstep {
namespace {

// The picture, in its own units.
constexpr double kLeft = 150;
constexpr double kWidth = 1000;
constexpr double kRow = 22;
constexpr double kRankHeight = 2 * kRow + 14;
constexpr double kTop = 30;
constexpr double kNarrowest = 0.6;
constexpr int kAxisSteps = 8;
constexpr double kLegendRow = 20;
constexpr std::int64_t kShortestWindow = 50'000'000;  // nanoseconds
constexpr std::int64_t kStepsShown = 4;

// Phases differ by colour and by hatching, for those who do not see the one.
struct Style {
  std::string_view name;
  std::string_view colour;
  std::string_view hatching;  // a path in a square of 8; empty: plain
};
constexpr Style kPhaseStyles[] = {
    {"data", "#8c6d31", "M0 4h8"},
    {"forward and backward", "#3b6fb6", ""},
    {"finishing lanes", "#7fa6d6", "M0 8L8 0"},
    {"communication", "#8a8a8a", "M0 0L8 8"},
    {"optimizer", "#5a9367", "M4 0v8"},
    {"validation", "#8a63a6", "M0 2h8M0 6h8"},
    {"verify", "#a68a63", "M0 4h8M4 0v8"},
    {"save", "#b8577c", "M0 0L8 8M0 8L8 0"},
    {"regroup", "#d08a2e", "M2 0v8M6 0v8"},
    {"levelling", "#d0b02e", "M2 2h2v2h-2z"},
    {"", "#777777", "M0 4L4 0L8 4L4 8z"},  // any other
};
constexpr std::string_view kCollectiveColour = "#2a9d8f";

std::string fill_of(std::string_view phase) {
  const auto* found = std::ranges::find(kPhaseStyles, phase, &Style::name);
  if (found == std::end(kPhaseStyles)) --found;
  return fmt::format("url(#phase{})", found - std::begin(kPhaseStyles));
}

std::string escaped(std::string_view text) {
  std::string result;
  for (const char c : text) {
    switch (c) {
      case '<': result += "&lt;"; break;
      case '>': result += "&gt;"; break;
      case '&': result += "&amp;"; break;
      case '"': result += "&quot;"; break;
      default: result += c;
    }
  }
  return result;
}

std::int64_t end_of(const std::vector<FlightFile>& files) {
  return std::ranges::max_element(files, {}, &FlightFile::taken)->taken;
}

// Bars of a window that ends with the last file.
class Drawing {
 public:
  Drawing(const std::vector<FlightFile>& files, std::int64_t window)
      : end_(end_of(files)), begin_(end_ - window) {}

  double x(std::int64_t time) const {
    const double share = static_cast<double>(time - begin_) / static_cast<double>(end_ - begin_);
    return kLeft + kWidth * std::clamp(share, 0.0, 1.0);
  }

  void bar(std::int64_t from, std::int64_t to, double y, std::string_view fill,
           const std::string& title) {
    if (to < begin_) return;
    const double left = x(from);
    const double width = std::max(kNarrowest, x(to) - left);
    text_ += fmt::format(
        "<rect x=\"{:.2f}\" y=\"{:.0f}\" width=\"{:.2f}\" height=\"{:.0f}\" fill=\"{}\"><title>{}"
        "</title></rect>\n",
        left, y, width, kRow - 4, fill, escaped(title));
  }

  void axis(double height) {
    for (int i = 0; i <= kAxisSteps; ++i) {
      const std::int64_t time = begin_ + (end_ - begin_) * i / kAxisSteps;
      text_ += fmt::format(
          "<line x1=\"{0:.1f}\" x2=\"{0:.1f}\" y1=\"{1}\" y2=\"{2}\" stroke=\"#9995\"/>"
          "<text x=\"{0:.1f}\" y=\"{3}\" text-anchor=\"middle\">{4}</text>\n",
          x(time), kTop - 6, height, kTop - 12,
          i == kAxisSteps ? "end" : "-" + short_time(end_ - time));
    }
  }
  void label(double x, double y, std::string_view text, std::string_view anchor = "end") {
    text_ += fmt::format("<text x=\"{}\" y=\"{}\" text-anchor=\"{}\">{}</text>\n", x, y, anchor,
                         escaped(text));
  }
  void key(double x, double y, std::string_view fill, std::string_view text) {
    text_ += fmt::format("<rect x=\"{}\" y=\"{}\" width=\"12\" height=\"12\" fill=\"{}\"/>\n", x,
                         y - 10, fill);
    label(x + 16, y, text, "start");
  }
  const std::string& text() const { return text_; }

 private:
  const std::int64_t end_;
  const std::int64_t begin_;
  std::string text_;
};

std::string title_of(const FlightSnapshot::Phase& phase, std::int64_t until) {
  return fmt::format("{}{}, step {}: {}{}", phase.name,
                     phase.lane >= 0 ? fmt::format(" of lane {}", phase.lane) : "", phase.step,
                     short_time(until - phase.begin), phase.end == 0 ? ", under way" : "");
}

std::string title_of(const FlightFile::Collective& call, std::int64_t until) {
  std::string text = fmt::format("collective {}: {}, {} bytes: {}", call.sequence, call.call,
                                 call.bytes, short_time(until - call.begin));
  if (call.waited_for >= 0) {
    text += fmt::format(", waited {} for rank {}", short_time(call.waited), call.waited_for);
  }
  if (call.failed) text += ", failed";
  if (call.end == 0) text += ", under way";
  return text;
}

// Open things are hatched, for those who do not see red.
constexpr std::string_view kOpenPattern =
    R"svg(<pattern id="open" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)"><rect width="6" height="6" fill="#d1495b"/><rect width="2" height="6" fill="#fff8"/></pattern>)svg";

std::string definitions() {
  std::string text = fmt::format("<defs>\n{}\n", kOpenPattern);
  for (const Style& style : kPhaseStyles) {
    text += fmt::format(
        "<pattern id=\"phase{}\" width=\"8\" height=\"8\" patternUnits=\"userSpaceOnUse\"><rect "
        "width=\"8\" height=\"8\" fill=\"{}\"/><path d=\"{}\" stroke=\"#fffb\" fill=\"none\"/>"
        "</pattern>\n",
        &style - kPhaseStyles, style.colour, style.hatching);
  }
  return text + "</defs>";
}

}  // namespace

std::int64_t fitting_window(const std::vector<FlightFile>& files) {
  const std::int64_t end = end_of(files);
  std::int64_t window = kShortestWindow;
  for (const FlightFile& file : files) {
    std::map<std::int64_t, std::int64_t> begun;  // step: when
    for (const auto& each : file.phases) begun.try_emplace(each.step, each.begin);
    auto step = begun.rbegin();
    for (std::int64_t i = 0; i < kStepsShown && step != begun.rend(); ++i, ++step) {
      window = std::max(window, end - step->second);
    }
  }
  return window;
}

std::string flight_svg(const std::vector<FlightFile>& files, std::int64_t window) {
  Drawing drawing(files, std::max<std::int64_t>(window, 1));
  const double bottom = kTop + kRankHeight * static_cast<double>(files.size());
  drawing.axis(bottom);
  std::set<std::string_view> used;
  double y = kTop;
  for (const FlightFile& file : files) {
    drawing.label(kLeft - 8, y + kRow - 8, file.name() + ", phases");
    drawing.label(kLeft - 8, y + 2 * kRow - 8, "collectives");
    for (const auto& each : file.phases) {
      const std::int64_t until = each.end == 0 ? file.taken : each.end;
      used.insert(each.name);
      drawing.bar(each.begin, until, y, fill_of(each.name), title_of(each, until));
    }
    for (const auto& each : file.collectives) {
      const std::int64_t until = each.end == 0 ? file.taken : each.end;
      drawing.bar(each.begin, until, y + kRow, each.open() ? "url(#open)" : kCollectiveColour,
                  title_of(each, until));
    }
    y += kRankHeight;
  }
  double x = kLeft;
  double row = bottom + kLegendRow;
  const auto key = [&](std::string_view fill, std::string_view text) {
    const double wide = 30 + 7.0 * static_cast<double>(text.size());
    if (x > kLeft && x + wide > kLeft + kWidth) {
      x = kLeft;
      row += kLegendRow;
    }
    drawing.key(x, row, fill, text);
    x += wide;
  };
  key(kCollectiveColour, "collective");
  key("url(#open)", "collective that has not ended or has failed");
  for (const std::string_view name : used) key(fill_of(name), name);
  return fmt::format(
      "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {0} {1}\" width=\"{0}\" "
      "height=\"{1}\" font-family=\"sans-serif\" font-size=\"11\" fill=\"#888\" role=\"img\" "
      "aria-label=\"What every rank did last\">\n{2}\n{3}</svg>\n",
      kLeft + kWidth + 60, row + kLegendRow, definitions(), drawing.text());
}

std::string flight_html(const std::vector<FlightFile>& files, const FlightStory& story,
                        std::int64_t window) {
  std::string sentences;
  for (const std::string& text : story.sentences) {
    sentences += fmt::format("<li>{}</li>\n", escaped(text));
  }
  return fmt::format(
      R"(<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>What the ranks did last</title>
<style>
:root {{ color-scheme: light dark; }}
body {{ font: 15px/1.5 system-ui, sans-serif; margin: 1.5rem; max-width: 82rem; }}
figure {{ overflow-x: auto; margin: 1rem 0; }}
svg {{ min-width: 60rem; width: 100%; height: auto; }}
</style></head><body>
<h1>What the ranks did last</h1>
<ul>
{}</ul>
<figure>
{}</figure>
<p>Point at a bar to see what it is. trace.json beside this page has all of it; Perfetto (ui.perfetto.dev) and chrome://tracing open it.</p>
</body></html>
)",
      sentences, flight_svg(files, window));
}

std::string flight_trace(const std::vector<FlightFile>& files) {
  Json events = Json::array();
  const auto microseconds = [](std::int64_t time) { return static_cast<double>(time) / 1e3; };
  // Numbers near zero are easier to read than times since the host started.
  std::int64_t zero = end_of(files);
  for (const FlightFile& file : files) {
    for (const auto& each : file.phases) zero = std::min(zero, each.begin);
    for (const auto& each : file.collectives) zero = std::min(zero, each.begin);
  }
  const auto name = [&](const char* what, const FlightFile& file, std::size_t thread,
                        const std::string& text) {
    events.push_back({{"name", what},
                      {"ph", "M"},
                      {"pid", file.rank},
                      {"tid", thread},
                      {"args", {{"name", text}}}});
  };
  for (const FlightFile& file : files) {
    name("process_name", file, 0, fmt::format("{} ({}, pid {})", file.name(), file.host, file.pid));
    name("thread_name", file, 0, "phases");
    const auto add = [&](const std::string& what, const char* category, std::size_t thread,
                         std::int64_t begin, std::int64_t end, Json about) {
      about["under_way"] = end == 0;
      const std::int64_t until = end == 0 ? file.taken : end;
      events.push_back({{"name", what},
                        {"cat", category},
                        {"ph", "X"},
                        {"ts", microseconds(begin - zero)},
                        {"dur", microseconds(until - begin)},
                        {"pid", file.rank},
                        {"tid", thread},
                        {"args", std::move(about)}});
    };
    for (const auto& each : file.phases) {
      Json about = {{"step", each.step}, {"generation", each.generation}};
      if (each.lane >= 0) about["lane"] = each.lane;
      add(each.name, "phase", 0, each.begin, each.end, std::move(about));
    }
    std::map<std::uint32_t, std::size_t> threads;
    for (const auto& each : file.collectives) {
      const auto [found, added] = threads.try_emplace(each.group, threads.size() + 1);
      if (added) {
        name("thread_name", file, found->second,
             each.group == 0 ? "collectives" : fmt::format("collectives of {:08x}", each.group));
      }
      Json about = {{"call", each.call},    {"sequence", each.sequence},
                    {"step", each.step},    {"bucket", each.bucket},
                    {"bytes", each.bytes},  {"generation", each.generation},
                    {"failed", each.failed}};
      if (each.waited_for >= 0) {
        about["waited_for"] = each.waited_for;
        about["waited_us"] = microseconds(each.waited);
      }
      add(each.name, "collective", found->second, each.begin, each.end, std::move(about));
    }
  }
  return to_text({{"traceEvents", std::move(events)}, {"displayTimeUnit", "ms"}}) + "\n";
}

}  // namespace lockstep
