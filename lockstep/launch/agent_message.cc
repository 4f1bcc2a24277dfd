#include "lockstep/launch/agent_message.h"

#include <charconv>
#include <system_error>

namespace lockstep {
namespace {

constexpr char kMark = '\x01';
constexpr char kBetween = '\x02';
constexpr char kEscape = '\x03';
// How a byte is written that means something else here.
constexpr std::string_view kSpecial = "\x01\x02\x03\n";
constexpr std::string_view kInstead = "abcn";

}  // namespace

std::string encode(const AgentMessage& message) {
  std::string line(1, kMark);
  for (std::size_t i = 0; i < message.size(); ++i) {
    if (i > 0) line += kBetween;
    for (const char byte : message[i]) {
      const std::size_t special = kSpecial.find(byte);
      if (special == std::string_view::npos) {
        line += byte;
      } else {
        line += {kEscape, kInstead[special]};
      }
    }
  }
  return line + '\n';
}

std::optional<AgentMessage> decode_agent_message(std::string_view line) {
  if (!line.starts_with(kMark)) return std::nullopt;
  AgentMessage message(1);
  for (std::size_t i = 1; i < line.size(); ++i) {
    if (line[i] == kBetween) {
      message.emplace_back();
    } else if (line[i] != kEscape) {
      message.back() += line[i];
    } else {
      const std::size_t special = ++i < line.size() ? kInstead.find(line[i]) : kInstead.size();
      if (special >= kSpecial.size()) return std::nullopt;
      message.back() += kSpecial[special];
    }
  }
  return message;
}

std::optional<int> number_at(const AgentMessage& message, std::size_t word) {
  if (word >= message.size()) return std::nullopt;
  const std::string& text = message[word];
  int number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc() || end != text.data() + text.size()) return std::nullopt;
  return number;
}

}  // namespace lockstep
