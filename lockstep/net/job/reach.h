#pragma once

#include <optional>

#include "lockstep/base/error.h"
#include "lockstep/wire/join_messages.h"

namespace lockstep {

// Members whose listeners can all be called by each other, as far as their cards tell: members on
// several hosts cannot use each other's loopback. No call costs more the more members there are.
class Reach {
 public:
  // Why this member does not go together with those that were added. The error's rank is that of
  // the card that advertises loopback.
  std::optional<Error> conflict(const Card& card) const;
  // A member without a conflict.
  void add(const Card& card);

 private:
  std::optional<Card> first_;
  std::optional<Card> elsewhere_;  // on another host than the first
  std::optional<Card> loopback_;   // listens there
};

// The first conflict of a whole roster.
std::optional<Error> check_reachable(const Roster& roster);

}  // namespace lockstep
