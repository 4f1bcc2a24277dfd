#include "lockstep/comm/collectives/rails.h"

#include <algorithm>
#include <numeric>

#include "lockstep/base/check.h"
#include "lockstep/base/index.h"
#include "lockstep/comm/group_number.h"

namespace lockstep {
namespace {

// Bytes of the vector that are worth waking a thread for, and those of one chunk that are worth a
// message of their own.
constexpr std::size_t kRailBytes = 512 * 1024;
constexpr std::size_t kMessageBytes = 64 * 1024;

// Connections of a rank on all rails together: processes may often open only 1024 files.
constexpr std::size_t kMostConnections = 256;

// Sets the numbers of rails apart from those of other groups that are split off.
constexpr std::uint32_t kRailGroup = 0x2000'0000;

// How often the caller looks whom the others wait for.
constexpr std::chrono::milliseconds kLookAtOthers{100};

}  // namespace

int rails_for(std::size_t bytes, int world_size, int most) {
  const std::size_t ranks = index_of(world_size);
  const std::size_t worth =
      std::min({bytes / kRailBytes, bytes / ranks / kMessageBytes, kMostConnections / ranks});
  return static_cast<int>(std::clamp<std::size_t>(worth, 1, index_of(most)));
}

Rails::Rails(Transport& transport, Scratch& scratch, int count, std::uint32_t group)
    : transport_(transport), scratch_(scratch), count_(count), group_(group) {}

void Rails::add_rail() {
  std::vector<int> everybody(index_of(transport_.world_size()));
  std::iota(everybody.begin(), everybody.end(), 0);
  const auto number = kRailGroup + static_cast<std::uint32_t>(others_.size());
  auto rail = std::make_unique<Rail>();
  rail->transport = transport_.split(everybody, group_number(group_, number, 0));
  others_.push_back(std::move(rail));
}

void Rails::run(int rails, const Body& body) {
  LOCKSTEP_CHECK(rails >= 1 && rails <= count_);
  const std::size_t helped = index_of(rails - 1);
  std::size_t started = 0;
  try {
    while (others_.size() < helped) add_rail();
    for (; started < helped; ++started) {
      Rail& rail = *others_[started];
      rail.thread.start([this, &body, &rail, number = static_cast<int>(started) + 1] {
        try {
          body(*rail.transport, rail.scratch, number);
        } catch (...) {  // nobody waits for this rail longer than it takes to tell
          transport_.supervisor().fail_quietly(caught_error("a collective"));
          throw;
        }
      });
    }
    body(transport_, scratch_, 0);
  } catch (...) {
    // The others end with the job; until then they use the caller's memory.
    transport_.supervisor().fail_quietly(caught_error("a collective"));
    for (std::size_t i = 0; i < started; ++i) others_[i]->thread.wait();
    throw;
  }
  std::optional<Error> failed;
  for (std::size_t i = 0; i < helped; ++i) {
    Rail& rail = *others_[i];
    while (!rail.thread.ends_within(kLookAtOthers)) {
      transport_.note_wait(rail.transport->waits_for());
    }
    if (const std::optional<Error> error = rail.thread.wait(); error && !failed) failed = error;
  }
  transport_.note_wait(-1);
  if (failed) transport_.supervisor().fail(*failed);
}

}  // namespace lockstep
