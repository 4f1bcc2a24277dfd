#pragma once

#include <string>
#include <string_view>
#include <utility>

namespace lockstep {

// Turns what a rank writes to its standard error, however it is cut, into what is passed on: whole
// lines behind a prefix, and a progress bar (a line that begins again at every '\r') as it comes,
// without one.
class RankLines {
 public:
  explicit RankLines(std::string prefix = {}) : prefix_(std::move(prefix)) {}

  // For lines that end from now on.
  void set_prefix(std::string prefix) { prefix_ = std::move(prefix); }

  // Lines that end from now on are a stranger's: their control characters are shown, and none of
  // them is a bar.
  void set_foreign(bool foreign) { foreign_ = foreign; }

  // What can be passed on now.
  std::string take(std::string_view bytes);
  // The rest: a line that never ended.
  std::string end();
  // A bar stands on the screen; another rank's line goes on a fresh one.
  bool bar_is_open() const { return shown_ > 0; }
  // The last whole line with anything in it, without prefix.
  const std::string& last_line() const { return last_line_; }

 private:
  std::string finish_line(std::string_view line);

  std::string prefix_;
  bool foreign_ = false;
  std::string open_;       // a line that has not ended
  std::size_t shown_ = 0;  // bytes of it that were passed on: of a bar
  std::string last_line_;
};

}  // namespace lockstep
