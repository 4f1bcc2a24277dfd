#include "lockstep/launch/host_list.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>

#include "lockstep/base/error.h"
#include "lockstep/net/job/roster.h"

namespace lockstep {
namespace {

constexpr std::string_view kBlanks = " \t\r";

int workers_in(std::string_view text, std::string_view entry) {
  int workers = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), workers);
  if (error != std::errc() || end != text.data() + text.size() || workers < 1 ||
      workers > kMaxWorldSize) {
    throw Error(
        ErrorCode::kInvalidArgument,
        fmt::format("{}: '{}' is no number of workers from 1 to {}", entry, text, kMaxWorldSize));
  }
  return workers;
}

// "b", "b:4", "[fe80::1]", "[fe80::1]:4"
LaunchHost parse_host(std::string_view entry) {
  const std::size_t bracket = entry.rfind(']');
  const std::size_t colon = entry.find(':', bracket == std::string_view::npos ? 0 : bracket);
  const std::string_view name = entry.substr(0, colon);
  // A name that begins with a dash would be an option of the remote shell.
  if (name.empty() || name.starts_with('-') || name.ends_with('@') ||
      name.find_first_of(" \t'\"") != std::string_view::npos) {
    throw Error(ErrorCode::kInvalidArgument, fmt::format("'{}' is no host", entry));
  }
  if (colon == std::string_view::npos) return {std::string(name), 1};
  return {std::string(name), workers_in(entry.substr(colon + 1), entry)};
}

void add_host(const LaunchHost& host, std::vector<LaunchHost>& hosts) {
  const auto same = std::ranges::find(hosts, host.name, &LaunchHost::name);
  if (same == hosts.end()) {
    hosts.push_back(host);
  } else {
    same->workers += host.workers;
  }
}

// Up to the separator; what is left begins behind it.
std::string_view take_until(std::string_view& text, char separator) {
  const std::size_t end = std::min(text.find(separator), text.size());
  const std::string_view taken = text.substr(0, end);
  text.remove_prefix(std::min(end + 1, text.size()));
  return taken;
}

// The next word of a line; empty at its end.
std::string_view take_word(std::string_view& line) {
  line.remove_prefix(std::min(line.find_first_not_of(kBlanks), line.size()));
  const std::size_t end = std::min(line.find_first_of(kBlanks), line.size());
  const std::string_view word = line.substr(0, end);
  line.remove_prefix(end);
  return word;
}

}  // namespace

std::vector<LaunchHost> parse_hosts(std::string_view list) {
  std::vector<LaunchHost> hosts;
  do {
    add_host(parse_host(take_until(list, ',')), hosts);
  } while (!list.empty());
  return hosts;
}

std::vector<LaunchHost> parse_host_file(std::string_view text, const std::string& path) {
  std::vector<LaunchHost> hosts;
  for (int number = 1; !text.empty(); ++number) {
    std::string_view line = take_until(text, '\n');
    line = line.substr(0, line.find('#'));
    const std::string_view first = take_word(line);
    if (first.empty()) continue;
    try {
      LaunchHost host = parse_host(first);
      for (std::string_view word = take_word(line); !word.empty(); word = take_word(line)) {
        const std::string_view name = word.substr(0, word.find('='));
        if (name == "slots") {
          host.workers = workers_in(word.substr(std::min(name.size() + 1, word.size())), word);
        } else if (name != "max_slots" && name != "max-slots") {
          throw Error(ErrorCode::kInvalidArgument, fmt::format("'{}' is not slots=N", word));
        }
      }
      add_host(host, hosts);
    } catch (const Error& error) {
      throw Error(ErrorCode::kInvalidArgument,
                  fmt::format("{}, line {}: {}", path, number, error.message()));
    }
  }
  if (hosts.empty()) throw Error(ErrorCode::kInvalidArgument, path + " names no host");
  return hosts;
}

std::string name_on_network(const LaunchHost& host) {
  std::string name = host.name.substr(host.name.rfind('@') + 1);
  if (name.starts_with('[') && name.ends_with(']')) name = name.substr(1, name.size() - 2);
  return name;
}

}  // namespace lockstep
