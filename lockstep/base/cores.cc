#include "lockstep/base/cores.h"

#include <sched.h>

#include <charconv>
#include <set>

namespace lockstep {
namespace {

constexpr int kMostCores = 1 << 16;

// Reads a number off the front of `text`; -1 if there is none.
int take_number(std::string_view& text) {
  int number = -1;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc{} || number < 0 || number >= kMostCores) return -1;
  text.remove_prefix(static_cast<std::size_t>(end - text.data()));
  return number;
}

}  // namespace

std::vector<int> own_cores() {
  cpu_set_t set;
  std::vector<int> cores;
  if (::sched_getaffinity(0, sizeof set, &set) != 0) return {0};
  for (int core = 0; core < CPU_SETSIZE; ++core) {
    if (CPU_ISSET(core, &set)) cores.push_back(core);
  }
  return cores;
}

int available_cores() { return static_cast<int>(own_cores().size()); }

std::string core_list(std::span<const int> cores) {
  std::string text;
  for (std::size_t i = 0; i < cores.size();) {
    std::size_t last = i;
    while (last + 1 < cores.size() && cores[last + 1] == cores[last] + 1) ++last;
    if (!text.empty()) text += ',';
    text += std::to_string(cores[i]);
    if (last > i) text += '-' + std::to_string(cores[last]);
    i = last + 1;
  }
  return text;
}

int count_cores(std::span<const std::string> lists) {
  std::set<int> cores;
  for (std::string_view text : lists) {
    while (!text.empty()) {
      const int first = take_number(text);
      int last = first;
      if (text.starts_with('-')) {
        text.remove_prefix(1);
        last = take_number(text);
      }
      if (first < 0 || last < first) break;
      for (int core = first; core <= last; ++core) cores.insert(core);
      if (text.starts_with(',')) text.remove_prefix(1);
    }
  }
  return static_cast<int>(cores.size());
}

std::vector<int> share_of_cores(std::span<const int> cores, int index, int ranks) {
  const auto n = static_cast<std::size_t>(ranks);
  const auto r = static_cast<std::size_t>(index);
  const std::size_t begin = r * cores.size() / n;
  std::size_t end = (r + 1) * cores.size() / n;
  if (cores.size() < n) {
    if (n % cores.size() != 0) return {cores.begin(), cores.end()};
    end = begin + 1;
  }
  const std::span<const int> share = cores.subspan(begin, end - begin);
  return {share.begin(), share.end()};
}

}  // namespace lockstep
