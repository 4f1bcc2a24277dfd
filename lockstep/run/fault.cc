#include "lockstep/run/fault.h"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <iterator>
#include <map>
#include <new>
#include <sstream>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "lockstep/base/error.h"

namespace lockstep {
namespace {

void flip_a_bit(Replica& replica) {
  replica.complete_parameters([](std::span<float> parameters) {
    float& victim = parameters[parameters.size() / 2];
    // Not the last bit: rounding could heal it.
    victim = std::bit_cast<float>(std::bit_cast<std::uint32_t>(victim) ^ (1U << 20));
  });
}

using Fault = std::function<void(std::string_view, std::int64_t)>;

// Null: it is not for this rank.
Fault read_fault(const std::string& text, int rank, Replica* replica) {
  std::map<std::string, std::string> words;
  std::istringstream stream(text);
  for (std::string word; stream >> word;) {
    words[word.substr(0, word.find('='))] = word.substr(word.find('=') + 1);
  }
  const std::string action = words["do"];
  constexpr std::string_view kActions[] = {"kill",   "stop", "crash",  "flip",
                                           "memory", "fail", "device", "slow"};
  if (std::ranges::find(kActions, action) == std::end(kActions)) {
    throw Error(
        ErrorCode::kInvalidArgument,
        fmt::format(
            "LOCKSTEP_FAULT={}: do=kill, stop, crash, flip, memory, fail, device or slow is "
            "missing",
            text));
  }
  const std::string own = rank < 0 ? "newcomer" : std::to_string(rank);
  if (words["rank"] != "any" && words["rank"] != own) return {};
  if (action == "slow") {
    return [place = words["at"], step = std::atoll(words["step"].c_str()),
            wait = std::chrono::milliseconds(std::atoll(words["ms"].c_str()))](std::string_view at,
                                                                               std::int64_t now) {
      if (at == place && now >= step) std::this_thread::sleep_for(wait);
    };
  }
  return [replica, action, place = words["at"], step = words["step"]](std::string_view at,
                                                                      std::int64_t now) {
    if (at != place || (step != "any" && std::to_string(now) != step)) return;
    if (action == "flip" && replica != nullptr) return flip_a_bit(*replica);
    if (action == "fail") throw Error(ErrorCode::kIo, "this failure was asked for");
    if (action == "device") throw Error(ErrorCode::kDevice, "this failure was asked for");
    if (action == "memory") throw std::bad_alloc();
    if (action == "crash") std::raise(SIGSEGV);
    std::raise(action == "kill" ? SIGKILL : SIGSTOP);
  };
}

}  // namespace

std::function<void(std::string_view, std::int64_t)> planned_fault(int rank, Replica* replica) {
  const char* text = std::getenv("LOCKSTEP_FAULT");
  if (text == nullptr) return {};
  std::vector<Fault> faults;
  std::istringstream stream(text);
  for (std::string each; std::getline(stream, each, ';');) {
    if (Fault fault = read_fault(each, rank, replica)) faults.push_back(std::move(fault));
  }
  if (faults.empty()) return {};
  return [faults = std::move(faults)](std::string_view at, std::int64_t now) {
    for (const Fault& fault : faults) fault(at, now);
  };
}

}  // namespace lockstep
