#pragma once

#include <gtest/gtest.h>

#include <initializer_list>
#include <ostream>
#include <span>
#include <string>
#include <vector>

#include "tests/support/groups.h"

namespace lockstep::test {

// What a test over media and world sizes is instantiated with; its name ends in "Tcp_4_ranks".
struct Place {
  GroupMedium medium = GroupMedium::kLocal;
  int world_size = 1;

  Group& group() const { return kept_group(medium, world_size); }
  friend std::ostream& operator<<(std::ostream& out, const Place& place) {
    return out << to_string(place.medium) << '_' << place.world_size << "_ranks";
  }
};

inline std::vector<Place> places(std::initializer_list<GroupMedium> media,
                                 std::span<const int> world_sizes) {
  std::vector<Place> all;
  for (const GroupMedium medium : media) {
    for (const int n : world_sizes) all.push_back({medium, n});
  }
  return all;
}

inline std::string place_name(const testing::TestParamInfo<Place>& place) {
  return testing::PrintToString(place.param);
}

}  // namespace lockstep::test
