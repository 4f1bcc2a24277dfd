#include "lockstep/launch/rank_lines.h"

#include "lockstep/base/text.h"

namespace lockstep {
namespace {

constexpr std::string_view kClearToEnd = "\x1b[K";  // of the line, as a bar does

}  // namespace

std::string RankLines::finish_line(std::string_view line) {
  std::string shown;
  if (foreign_) {
    if (line.ends_with('\r')) line.remove_suffix(1);  // ssh ends its own lines so
    shown = visible(line);
    line = shown;
  }
  std::string text = shown_ > 0 ? std::string(line.substr(shown_)) : prefix_ + std::string(line);
  // What follows a bar is a message of its own.
  if (const std::size_t clear = line.rfind(kClearToEnd); clear != std::string_view::npos) {
    line.remove_prefix(clear + kClearToEnd.size());
  }
  shown_ = 0;
  if (!line.empty()) last_line_ = line;
  return text + '\n';
}

std::string RankLines::take(std::string_view bytes) {
  std::string text;
  open_ += bytes;
  for (std::size_t end = open_.find('\n'); end != std::string::npos; end = open_.find('\n')) {
    text += finish_line(std::string_view(open_).substr(0, end));
    open_.erase(0, end + 1);
  }
  const std::size_t again = open_.rfind('\r');
  if (foreign_ || again == std::string::npos) return text;
  text += open_.substr(shown_);
  open_.erase(0, again);  // all that this line will ever show
  shown_ = open_.size();
  return text;
}

std::string RankLines::end() {
  if (open_.empty()) return {};
  const std::string line = std::move(open_);
  open_.clear();
  return finish_line(line);
}

}  // namespace lockstep
