#pragma once

#include <span>
#include <string>
#include <vector>

namespace lockstep {

// The cores this process may run on, and how many they are.
std::vector<int> own_cores();
int available_cores();

// The same as a text such as "0-3,8".
std::string core_list(std::span<const int> cores);
// How many cores are in at least one of the lists; nothing is counted from a malformed one on.
int count_cores(std::span<const std::string> lists);

// The share of `cores` for rank `index` of `ranks`: cores of its own, or one that it shares with as
// many ranks as every other core has; all of them where the ranks cannot be dealt out evenly.
std::vector<int> share_of_cores(std::span<const int> cores, int index, int ranks);

}  // namespace lockstep
