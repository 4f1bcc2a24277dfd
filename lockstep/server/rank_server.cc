#include "lockstep/server/rank_server.h"

#include <fmt/format.h>

#include <algorithm>
#include <cerrno>
#include <new>
#include <utility>

#include "lockstep/base/check.h"
#include "lockstep/base/log.h"
#include "lockstep/base/text.h"
#include "lockstep/net/job/roster.h"
#include "lockstep/server/settings.h"

namespace lockstep {
namespace {

using namespace std::chrono_literals;

constexpr std::uint32_t kLargestRankFrame = std::uint32_t{8} << 20;
// Where the ranks' connections begin in what is polled.
constexpr std::size_t kFirstRank = 3;
// If a rank that is needed has gone, its control link tells within this time whether it died.
constexpr Deadline::Clock::duration kLongestGrace = 300ms;
// How often the server looks whether all have left without ever having sent anything, and at what
// they have told meanwhile.
constexpr auto kLongestTurn = 200ms;
// Between two generations.
constexpr auto kLookForTheNext = 20ms;

// Bytes that a rank has not taken yet; with more, no new piece is begun and nothing is passed on.
constexpr std::size_t kMostQueued = std::size_t{4} << 20;

// A finished piece as it goes back to all ranks. The frame may be queued any number of times.
FrameSocket::Outgoing raw_sum_frame(const LaneSums::Piece& piece) {
  const auto sum = std::make_shared<LaneValue>(piece.sum);
  return {encode_head(piece.head), std::as_bytes(std::span(sum->data)),
          encode_foot(piece.head, BulkFoot{0, 0, 0, sum->tail}), sum};
}

// One of ours hears why; the original protocol has no message for it.
void turn_away(Arrival& arrival, const std::string& reason) {
  const Socket& socket = arrival.link.socket();
  log(LogLevel::kWarning, "coordinator: turned {} away: {}", socket.peer(), reason);
  if (!arrival.original) {
    socket.send_if_heard(encode(Refusal{{ErrorCode::kInvalidRank, -1, reason}}));
  }
  arrival.link.socket().close_gently();
}

}  // namespace

RankServer::RankServer(ControlPlane& control, RankServerOptions options)
    : options_(std::move(options)), control_(control) {}

void RankServer::serve(const Observer& observer) {
  try {
    run(observer);
  } catch (const Error& error) {
    if (error.code() == ErrorCode::kAborted && !control_.latch().tripped()) {
      control_.abort(std::string(error.message()));
    }
    control_.fail(error);
  } catch (const std::bad_alloc&) {
    control_.fail(Error(ErrorCode::kIo, "the coordinator has too little memory"));
  }
}

void RankServer::run(const Observer& observer) {
  while (!control_.all_left()) {
    wait_for_events();
    follow_generation();
    admit_all();
    receive();
    process_all(observer);
    send();
    drop_ended();
    if (observer.turned) observer.turned();
    if (!all_came() || anybody_here()) continue;
    if (!roster_->survives) {
      return control_.wait_until_all_left(Deadline::after(options_.timeout));
    }
    // They have all left the generation: for good, or for the next one.
    control_.wait_until_all_left(Deadline::after(kLookForTheNext));
  }
  control_.latch().check();
}

void RankServer::lose(const Error& error) {
  if (!roster_->survives) throw Error(error);
  control_.report(error, tag_of(roster_->generation));
  for (auto& each : connections_) each.reset();
  missed_.reset();
  all_here_by_ = Deadline::at(Clock::time_point::max());
}

bool RankServer::anybody_here() const {
  return std::ranges::any_of(connections_, [](const auto& each) { return each.has_value(); });
}

void RankServer::wait_for_events() {
  entries_.clear();
  entries_.push_back({options_.stop_fd, POLLIN, 0});
  entries_.push_back({control_.latch().fd(), POLLIN, 0});
  entries_.push_back({control_.arrivals().fd(), POLLIN, 0});
  LOCKSTEP_CHECK(entries_.size() == kFirstRank);
  for (const auto& each : connections_) {
    const bool reading = each && !each->frames.full() && !each->frames.ended();
    const bool sending = each && each->frames.wants_to_send();
    const short events = static_cast<short>((reading ? POLLIN : 0) | (sending ? POLLOUT : 0));
    entries_.push_back({reading || sending ? each->frames.socket().fd() : -1, events, 0});
  }
  Deadline wake = earlier(all_here_by_, Deadline::after(kLongestTurn));
  const auto has_more = [](const auto& each) {
    return each && !each->frames.full() && each->frames.buffered();
  };
  if (std::ranges::any_of(connections_, has_more)) wake = Deadline::at({});
  if (missed_) wake = earlier(wake, missed_->until);
  const int ready = ::poll(entries_.data(), entries_.size(), wake.poll_timeout());
  if (ready < 0 && errno != EINTR) throw_io("polling the ranks", errno);
  if (ready < 0) {
    for (pollfd& entry : entries_) entry.revents = 0;
  }
  control_.latch().check();
  if (entries_[0].revents != 0) {
    throw Error(ErrorCode::kAborted, "told to stop");
  }
  if (missed_ && missed_->until.expired()) {
    lose(Error(ErrorCode::kPeerLost,
               fmt::format("{} has left the job; {} is in a collective that needs it",
                           names_[index_of(missed_->rank)], names_[index_of(missed_->needed_by)]),
               missed_->rank));
  }
  if (!all_came() && all_here_by_.expired()) {
    const auto missing = std::ranges::find(has_come_, false) - has_come_.begin();
    lose(Error(
        ErrorCode::kTimeout,
        fmt::format("{} has joined, but has not connected to the gradient server within {}",
                    names_[static_cast<std::size_t>(missing)], format_duration(options_.timeout)),
        static_cast<int>(missing)));
  }
}

void RankServer::admit_all() {
  while (auto arrival = control_.arrivals().next()) admit(std::move(*arrival));
}

// Ranks connect when they know the roster, and the control plane knows it before them.
void RankServer::follow_generation() {
  auto roster = control_.centre_roster();
  if (!roster || (roster_ && roster->generation == roster_->generation)) return;
  roster_ = std::move(roster);
  names_.clear();
  for (const Card& card : roster_->roster) names_.push_back(name_of(card));
  connections_.clear();
  connections_.resize(names_.size());
  has_come_.assign(names_.size(), false);
  came_ = 0;
  missed_.reset();
  lanes_.emplace(names_);
  opened_.reset();
  all_here_by_ = Deadline::after(options_.timeout);
}

void RankServer::admit(Arrival arrival) {
  const int rank = arrival.peer.rank;
  if (rank < 0) {
    return turn_away(arrival,
                     "this coordinator serves ranks of 'lockstep train' (mode lanes), not "
                     "'lockstep worker' or the original protocol");
  }
  follow_generation();
  if (!roster_ || arrival.peer.generation != tag_of(roster_->generation) ||
      !is_member(roster_->roster, arrival.peer) || has_come_[index_of(rank)]) {
    return turn_away(arrival, "no rank of the job that runs here");
  }
  arrival.link.socket().set_peer(names_[index_of(rank)], rank);
  connections_[index_of(rank)].emplace(Connection{FrameSocket(
      std::move(arrival.link.socket()), options_.window, kLargestRankFrame, arrival.link.rest())});
  has_come_[index_of(rank)] = true;
  ++came_;
}

void RankServer::receive() {
  for (std::size_t rank = 0; rank < connections_.size(); ++rank) {
    auto& each = connections_[rank];
    const std::size_t entry = kFirstRank + rank;  // none for one that has just come
    const bool ready = entry < entries_.size() && (entries_[entry].revents & ~POLLOUT) != 0;
    if (each && (ready || each->frames.buffered()) && !each->frames.full()) {
      each->frames.fill(kTurnBytes);
    }
  }
}

void RankServer::send() {
  for (auto& each : connections_) {
    try {
      if (each) each->frames.flush(kTurnBytes);
    } catch (const Error&) {
      each.reset();  // its control link tells whether it died or left
    }
  }
}

void RankServer::drop_ended() {
  for (auto& each : connections_) {
    if (!each || !each->frames.ended()) continue;
    // What came before the end may still have to wait for room at others.
    if (each->frames.awaits_more() || (each->frames.raw().empty() && !each->frames.bulk_is_open()))
      each.reset();
  }
}

void RankServer::process_all(const Observer& observer) {
  if (!all_came()) return;  // sums and bytes are for all
  if (observer.formed && all_here_by_.time() != Clock::time_point::max()) observer.formed(names_);
  all_here_by_ = Deadline::at(Clock::time_point::max());
  bool finished = true;
  while (std::exchange(finished, false)) {
    for (int rank = 0; rank < ranks(); ++rank) {
      while (connections_[index_of(rank)] && process(rank)) {
      }
      while (const auto piece = lanes_->take_finished()) {
        const FrameSocket::Outgoing frame = raw_sum_frame(*piece);
        for (auto& each : connections_) {
          if (each) each->frames.queue(frame);
        }
        const auto opened = std::exchange(opened_, std::nullopt);
        if (observer.added) observer.added(*piece, Clock::now() - *opened);
        finished = true;  // what others have sent ahead may have waited for it
      }
    }
  }
  lanes_->check_stuck();
}

void RankServer::miss_if_gone(int gone, int needed_by) {
  if (missed_ || connections_[index_of(gone)]) return;
  const auto grace = std::min<Clock::duration>(options_.timeout / 10, kLongestGrace);
  missed_ = Missed{Deadline::after(grace), gone, needed_by};
}

bool RankServer::has_room(const std::optional<Connection>& connection) const {
  return !connection || connection->frames.queued_bytes() <= kMostQueued;
}

bool RankServer::process(int rank) {
  Connection& each = connection(rank);
  if (each.frames.bulk_is_open()) {
    if (each.frames.head().tag == WireTag::kBytes) return pass_on(rank);
    return add(rank);
  }
  const auto start = each.frames.start();
  if (!start) return false;
  if (start->tag != WireTag::kBytes && start->tag != WireTag::kPartialSum) {
    throw Error(ErrorCode::kUnexpectedMessage,
                fmt::format("{} sent a {}; sums and bytes are expected", names_[index_of(rank)],
                            to_string(start->tag)),
                rank);
  }
  if (!each.frames.open_bulk()) return false;
  // A sum needs all ranks.
  for (int other = 0; other < ranks() && start->tag == WireTag::kPartialSum; ++other) {
    miss_if_gone(other, rank);
  }
  return true;
}

void RankServer::check_bytes(int rank, const BulkHead& head) const {
  const std::string& name = names_[index_of(rank)];
  const auto self = static_cast<std::uint32_t>(rank);
  if (head.from != self) {
    throw Error(ErrorCode::kInvalidRank,
                fmt::format("{} sent Bytes in the name of rank {}", name, head.from), rank);
  }
  if (head.to != kEveryOther && (head.to >= connections_.size() || head.to == self)) {
    throw Error(
        ErrorCode::kInvalidRank,
        fmt::format("{} sent Bytes for rank {} of {} ranks", name, head.to, connections_.size()),
        rank);
  }
  if (head.count > kBytesPiece) {
    throw Error(
        ErrorCode::kMessageTooLarge,
        fmt::format("{} sent {} bytes at once; {} are allowed", name, head.count, kBytesPiece),
        rank);
  }
}

bool RankServer::add(int rank) {
  Connection& each = connection(rank);
  FrameSocket& frames = each.frames;
  if (!each.adding) {
    const bool room =
        std::ranges::all_of(connections_, [this](const auto& other) { return has_room(other); });
    if (!room || !lanes_->offer(rank, frames.head())) return false;
    if (!opened_) opened_ = Clock::now();
    each.adding.emplace();
    each.adding->data.reserve(static_cast<std::size_t>(frames.head().count));
  }
  std::vector<float>& data = each.adding->data;
  if (const std::size_t count = frames.elements_here(); count > 0) {
    const std::size_t before = data.size();
    data.resize(before + count);
    std::copy_n(frames.elements(), count * sizeof(float),
                std::as_writable_bytes(std::span(data).subspan(before)).data());
    frames.consume_elements(count);
  }
  if (frames.elements_left() > 0) return false;
  const BulkHead head = frames.head();
  auto foot = frames.take_foot();
  if (!foot) return false;
  each.adding->tail = std::move(foot->tail);
  lanes_->add(rank, head, std::move(*std::exchange(each.adding, std::nullopt)));
  return true;
}

bool RankServer::pass_on(int rank) {
  Connection& each = connection(rank);
  FrameSocket& frames = each.frames;
  const BulkHead head = frames.head();
  if (!each.passing) {
    check_bytes(rank, head);
    bool room = true;
    for_each_receiver(
        head, [&](int receiver) { room = room && has_room(connections_[index_of(receiver)]); });
    if (!room) return false;
    each.passing = std::make_shared<std::vector<std::byte>>();
    each.passing->reserve(static_cast<std::size_t>(head.count));
  }
  const std::size_t count = frames.elements_here();
  each.passing->insert(each.passing->end(), frames.elements(), frames.elements() + count);
  frames.consume_elements(count);
  if (frames.elements_left() > 0) return false;
  frames.take_foot();
  const auto bytes = std::exchange(each.passing, nullptr);
  const FrameSocket::Outgoing whole{encode_head(head), *bytes, {}, bytes};
  for_each_receiver(head, [&](int receiver) {
    auto& there = connections_[index_of(receiver)];
    if (there) there->frames.queue(whole);
    miss_if_gone(receiver, rank);
  });
  return true;
}

}  // namespace lockstep
