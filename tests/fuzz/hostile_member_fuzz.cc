// A centre with two honest members and a third that does as the input says: any message at any
// time, silence, leaving and coming back. Nobody crashes; honest members hear of generations that
// they are in, or why there is none, and the centre never sends without end.
#include <algorithm>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "lockstep/base/utf8.h"
#include "lockstep/net/job/centre.h"
#include "lockstep/net/job/member.h"
#include "tests/fuzz/script.h"

using namespace lockstep;
using fuzz::require;

namespace {

using Time = Centre::Time;
constexpr std::chrono::milliseconds kTimeout{1000};
constexpr int kMembers = 3;

Card card_of(int rank) {
  Card card;
  card.rank = rank;
  card.world_size = kMembers;
  card.version = "1";
  card.id[0] = static_cast<std::byte>(rank + 1);
  card.pid = 100 + rank;
  card.host = {"node", "boot", 7};
  card.mesh_address = "10.0.0.1:500" + std::to_string(rank);
  card.unix_name = "name";
  card.fingerprint = "platform";
  return card;
}

class Job {
 public:
  explicit Job(bool survives)
      : centre_({.card = {-1, "the coordinator", "node", 1},
                 .world_size = kMembers,
                 .version = "1",
                 .timeout = kTimeout,
                 .make_id = [this] { return MemberId{static_cast<std::byte>(++ids_)}; }},
                now_) {
    for (int rank = 0; rank + 1 < kMembers; ++rank) {
      MemberOptions options{.card = card_of(rank),
                            .patience = 5 * kTimeout,
                            .timeout = kTimeout,
                            .survives = survives};
      honest_.push_back(std::make_unique<Member>(
          options, [] { return std::vector<Progress>(); }, now_));
      centre_.opened(link_of(rank), PeerIdentity{card_of(rank).id, rank, 0, 0}, now_);
    }
    open_hostile(kMembers - 1);
  }

  void open_hostile(int rank) {
    hostile_ = next_link_++;
    PeerIdentity peer{card_of(kMembers - 1).id, rank, 0, 0};
    centre_.opened(*hostile_, peer, now_);
  }
  void close_hostile() {
    if (hostile_) centre_.closed(*hostile_, now_);
    hostile_.reset();
  }
  void say(MessageKind kind, std::vector<std::byte> body) {
    if (hostile_) centre_.received(*hostile_, {kind, std::move(body)}, now_);
  }
  Join join(Standing standing) const {
    Join join{.card = card_of(kMembers - 1), .patience = kTimeout, .standing = standing};
    if (heard_) {
      join.last = heard_->generation;
      if (heard_->roster.size() == kMembers) join.card = heard_->roster.back();
    }
    return join;
  }
  std::uint32_t tag() const { return heard_ ? tag_of(heard_->generation) : 0; }

  void pass(Centre::Clock::duration time) {
    now_ += time;
    settle();
    for (auto& member : honest_) member->tick(now_);
    centre_.tick(now_);
    settle();
  }
  // All that has been said is heard, and honest members do what honest members do.
  void settle() {
    for (int turn = 0; turn < 100; ++turn) {
      bool quiet = true;
      for (std::size_t i = 0; i < honest_.size(); ++i) {
        Member& member = *honest_[i];
        for (const SharedBytes& bytes : member.take_sendings()) {
          quiet = false;
          centre_.received(link_of(static_cast<int>(i)), parse(bytes), now_);
        }
        if (const auto roster = member.take_roster()) {
          require(std::ranges::count(roster->roster, card_of(static_cast<int>(i)).id, &Card::id) ==
                  1);
          for (const Card& card : roster->roster) require(is_utf8(name_of(card)));
          require(member.rank() >= 0 && member.rank() < static_cast<int>(roster->roster.size()));
          member.ready();
        }
        if (member.ended() && !member.failure() && !member.waiting() && member.connected()) {
          member.join_again(Standing::kBroken, 3, now_);
          quiet = false;
        }
      }
      for (const Centre::Sending& sending : centre_.take_sendings()) {
        quiet = false;
        deliver(sending);
      }
      centre_.take_events();
      centre_.take_lines();
      if (quiet) return;
    }
    std::abort();  // they talk without end
  }

 private:
  static std::uint64_t link_of(int rank) { return static_cast<std::uint64_t>(rank) + 1; }
  static Message parse(const SharedBytes& bytes) {
    MessageBuffer buffer;
    buffer.append(*bytes);
    auto message = buffer.next(kMaxRosterBody, "an honest peer");
    require(message && buffer.rest().empty());
    return std::move(*message);
  }
  void deliver(const Centre::Sending& sending) {
    const auto rank = static_cast<std::size_t>(sending.link) - 1;
    if (rank < honest_.size()) {
      if (sending.bytes) honest_[rank]->received(parse(sending.bytes), now_);
      if (sending.last) honest_[rank]->lost(Error(ErrorCode::kChannelClosed, "closed"));
    } else if (sending.bytes && hostile_ == sending.link) {
      const Message message = parse(sending.bytes);
      if (message.kind == MessageKind::kRoster) heard_ = decode_roster(message.body);
    }
    if (sending.last && hostile_ == sending.link) hostile_.reset();
  }

  Time now_ = Time() + std::chrono::hours(1);
  std::uint64_t ids_ = 0;
  Centre centre_;
  std::vector<std::unique_ptr<Member>> honest_;
  std::uint64_t next_link_ = kMembers;
  std::optional<std::uint64_t> hostile_;
  std::optional<RosterMessage> heard_;
};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  fuzz::Script script(data, std::min<std::size_t>(size, 2000));
  Job job(script.byte() % 2 == 1);
  job.settle();
  while (!script.ended()) {
    const std::uint8_t choice = script.byte();
    if (choice >= 250) {  // a join with any byte at any place
      auto body = encode(job.join(Standing::kNew));
      body[script.number(2) % body.size()] = static_cast<std::byte>(script.byte());
      job.say(MessageKind::kJoin, std::move(body));
      job.settle();
      continue;
    }
    switch (choice % 10) {
      case 0: job.say(static_cast<MessageKind>(script.byte()), script.bytes(script.byte())); break;
      case 1: job.say(MessageKind::kJoin, encode(job.join(Standing::kNew))); break;
      case 2: {
        Join join = job.join(static_cast<Standing>(script.byte() % 5));
        join.survives = script.byte() % 2 == 1;
        join.step = static_cast<std::int64_t>(script.number(2));
        join.card.rank = static_cast<int>(script.byte() % 5) - 1;
        job.say(MessageKind::kJoin, encode(join));
        break;
      }
      case 3: {
        const int suspect = static_cast<int>(script.byte() % 5) - 1;
        const Error error(static_cast<ErrorCode>(script.byte() % 21), "an accusation", suspect);
        job.say(MessageKind::kReport, encode(Report{error, {}, job.tag()}));
        break;
      }
      case 4: {
        const Progress at{0, script.byte(), script.byte() % 2 == 1, "all_reduce",
                          static_cast<int>(script.byte() % 5) - 1};
        job.say(MessageKind::kHeartbeat, encode(Pulse{job.tag(), {at}}));
        break;
      }
      case 5: job.say(MessageKind::kGoodbye, encode(Pulse{job.tag(), {}})); break;
      case 6: job.say(MessageKind::kReady, encode_tag(job.tag())); break;
      case 7: job.close_hostile(); break;
      case 8: job.open_hostile(static_cast<int>(script.byte() % 5) - 1); break;
      default: job.pass(std::chrono::milliseconds(10 * std::uint32_t{script.byte()})); break;
    }
    job.settle();
  }
  job.pass(20 * kTimeout);
  return 0;
}
