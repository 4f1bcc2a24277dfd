#include "lockstep/server/rank_client.h"

#include <fmt/format.h>
#include <poll.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "lockstep/base/check.h"
#include "lockstep/base/index.h"
#include "lockstep/comm/call_check.h"
#include "lockstep/server/settings.h"

namespace lockstep {
namespace {

constexpr std::size_t kRankWindow = 256 * 1024;

Socket connect_as_rank(const HostPort& coordinator, const JoinedJob& job) {
  Socket socket = connect_to_rendezvous(coordinator, job.identity, Deadline::after(job.timeout),
                                        Purpose::kServer);
  tune_tcp(socket, job.timeout);
  socket.set_peer(fmt::format("the coordinator ({})", socket.peer()), -1);
  return socket;
}

}  // namespace

RankClient::RankClient(const HostPort& coordinator, const JoinedJob& job)
    : RankClient(connect_as_rank(coordinator, job), job) {}

RankClient::RankClient(Socket coordinator, const JoinedJob& job)
    : rank_(job.rank()),
      latch_(job.control->latch()),
      frames_(std::move(coordinator), kRankWindow, UINT32_MAX) {
  for (const Card& card : job.roster) peers_.push_back({.name = name_of(card)});
}

RankClient::~RankClient() { frames_.socket().close_gently(); }

void RankClient::drive(const std::string& what, const std::function<bool()>& done) {
  while (true) {
    frames_.flush_while_open(kTurnBytes);
    take_all_bytes();
    if (frames_.ended()) frames_.stop_sending();
    if (done()) return;
    if (const auto& end = frames_.ended()) {
      throw Error(ErrorCode::kPeerLost,
                  fmt::format("{}; we wait for {}",
                              end->code() == ErrorCode::kChannelClosed
                                  ? fmt::format("{} closed the connection", frames_.socket().peer())
                                  : std::string(end->message()),
                              what));
    }
    wait(what);
  }
}

void RankClient::wait(const std::string& what) {
  // The elements of an open sum go straight to where they belong.
  const bool reading = !frames_.bulk_is_open() || frames_.elements_left() == 0;
  // Nobody takes what comes while we send; holding it back could stop the server for good.
  if (reading && frames_.full()) frames_.set_window(2 * frames_.window());
  const bool buffered = reading && frames_.buffered();
  const short events = frames_.wants_to_send() ? POLLIN | POLLOUT : POLLIN;
  pollfd entries[2] = {{frames_.socket().fd(), events, 0}, {latch_.fd(), POLLIN, 0}};
  if (::poll(entries, 2, buffered ? 0 : deadline_.poll_timeout()) < 0 && errno != EINTR)
    throw_io("polling", errno);
  latch_.check();
  const bool ready = buffered || (entries[0].revents & (POLLIN | POLLHUP | POLLERR)) != 0;
  if (reading && ready) frames_.fill(kTurnBytes);
  if (deadline_.expired()) {
    throw Error(ErrorCode::kTimeout, fmt::format("{} has not brought {} by the deadline",
                                                 frames_.socket().peer(), what));
  }
}

void RankClient::enter(const MeshFrame& stamp, Deadline deadline) {
  deadline_ = deadline;
  call_ = stamp;
  digest_ = call_digest(stamp);
  for (int rank = 0; rank < static_cast<int>(peers_.size()); ++rank) {
    Peer& peer = peers_[index_of(rank)];
    peer.sent = peer.received = 0;
    if (!peer.early.empty()) check_stamp(rank, peer.early.front().stamp);
  }
}

std::vector<double> RankClient::add_up(std::uint32_t lanes, std::span<const LanePartial> partials,
                                       std::size_t tail_count, std::span<float> sum) {
  BulkHead head;
  head.tag = WireTag::kPartialSum;
  head.step = next_step_++;
  head.lanes = lanes;
  head.call = digest_;
  const std::size_t pieces = std::max<std::size_t>(1, (sum.size() + kLanePiece - 1) / kLanePiece);
  // The fields of a piece that both directions share; the last one has the tail.
  const auto select = [&](std::size_t piece) {
    const std::size_t begin = piece * kLanePiece;
    head.offset = begin;
    head.count = std::min(kLanePiece, sum.size() - begin);
    head.tail_count = piece + 1 == pieces ? static_cast<std::uint32_t>(tail_count) : 0;
    return begin;
  };
  for (std::size_t piece = 0; piece < pieces; ++piece) {
    const std::size_t begin = select(piece);
    for (const LanePartial& partial : partials) {
      LOCKSTEP_CHECK(partial.data.size() == sum.size() && partial.tail.size() == tail_count);
      head.lane_begin = static_cast<std::uint32_t>(partial.node.begin);
      head.lane_end = static_cast<std::uint32_t>(partial.node.end);
      BulkFoot foot;
      if (head.tail_count > 0) foot.tail = partial.tail;
      frames_.queue({encode_head(head),
                     std::as_bytes(partial.data.subspan(begin, head.count)),
                     encode_foot(head, foot),
                     {}});
    }
  }
  head.tag = WireTag::kRawSum;
  head.lane_begin = head.lane_end = 0;
  std::size_t piece = 0;
  std::size_t begin = select(piece);
  std::size_t done = 0;  // bytes of the piece
  std::vector<double> tail;
  drive(fmt::format("sum {}", head.step), [&] {
    while (piece < pieces) {
      auto foot = take_sum(head, sum.subspan(begin, head.count), done);
      if (!foot) return false;
      tail = std::move(foot->tail);
      done = 0;
      if (++piece < pieces) begin = select(piece);
      take_all_bytes();
    }
    return !frames_.wants_to_send();
  });
  return tail;
}

bool RankClient::open_sum(const BulkHead& expected) {
  const auto start = frames_.start();
  if (!start) return false;
  const auto refuse = [&](ErrorCode code, const std::string& what) {
    throw Error(code, fmt::format("{} sent {}; we wait for sum {}", frames_.socket().peer(), what,
                                  expected.step));
  };
  if (start->tag != WireTag::kRawSum) {
    refuse(ErrorCode::kUnexpectedMessage, fmt::format("a {}", to_string(start->tag)));
  }
  if (!frames_.open_bulk()) return false;
  const BulkHead& head = frames_.head();
  if (head.call != expected.call) {
    refuse(ErrorCode::kCollectiveMismatch, "a sum of another collective");
  }
  if (head.step != expected.step) {
    refuse(ErrorCode::kStepMismatch, fmt::format("sum {}", head.step));
  }
  if (head.count != expected.count || head.offset != expected.offset ||
      head.tail_count != expected.tail_count) {
    refuse(
        ErrorCode::kSizeMismatch,
        fmt::format("{} elements from {} on with a tail of {} numbers, not {} from {} on with {}",
                    head.count, head.offset, head.tail_count, expected.count, expected.offset,
                    expected.tail_count));
  }
  return true;
}

std::optional<BulkFoot> RankClient::take_sum(const BulkHead& expected, std::span<float> into,
                                             std::size_t& done) {
  if (bytes_are_next()) return std::nullopt;
  if (!frames_.bulk_is_open() && !open_sum(expected)) return std::nullopt;
  const auto bytes = std::as_writable_bytes(into);
  while (frames_.elements_left() > 0) {
    if (frames_.read_elements(bytes, done) == 0 && frames_.elements_left() > 0) return std::nullopt;
  }
  return frames_.take_foot();
}

void RankClient::take_all_bytes() {
  while (bytes_are_next() && take_bytes()) {
  }
}

void RankClient::check_stamp(int from, const MeshFrame& stamp) const {
  if (stamp.sequence > call_.sequence) return;
  MeshFrame expected = call_;
  expected.part = stamp.part;
  expected.payload = stamp.payload;
  if (stamp == expected) return;
  throw frame_mismatch(stamp, peers_[index_of(from)].name, from, expected,
                       peers_[index_of(rank_)].name);
}

bool RankClient::bytes_are_next() const {
  if (frames_.bulk_is_open()) return frames_.head().tag == WireTag::kBytes;
  const auto start = frames_.start();
  return start && start->tag == WireTag::kBytes;
}

bool RankClient::take_bytes() {
  if (!frames_.bulk_is_open()) {
    if (!frames_.open_bulk()) return false;
    open_bytes();
  }
  while (frames_.elements_left() > 0) {
    if (frames_.read_elements(open_.place, open_.done) == 0 && frames_.elements_left() > 0) {
      return false;
    }
  }
  frames_.take_foot();
  if (open_.early) {
    peers_[index_of(open_.from)].early.push_back(std::move(open_.kept));
    take_early(open_.from);  // it may be waited for by now
  } else {
    count_placed(open_.from);
  }
  return true;
}

void RankClient::open_bytes() {
  const BulkHead& head = frames_.head();
  if (head.from >= peers_.size() || head.from == static_cast<std::uint32_t>(rank_)) {
    throw Error(ErrorCode::kUnexpectedMessage,
                fmt::format("{} sent Bytes of nobody", frames_.socket().peer()));
  }
  if (head.count > kBytesPiece) {
    throw Error(ErrorCode::kMessageTooLarge,
                fmt::format("{} sent {} bytes at once; {} are allowed", frames_.socket().peer(),
                            head.count, kBytesPiece));
  }
  const int from = static_cast<int>(head.from);
  check_stamp(from, head.stamp);
  const bool early = head.stamp.sequence > call_.sequence || peers_[index_of(from)].awaited.empty();
  open_ = {.from = from, .early = early};
  if (early) {
    count_early(from, head);
    open_.kept = {head.stamp, std::vector<std::byte>(static_cast<std::size_t>(head.count))};
    open_.place = open_.kept.bytes;
  } else {
    open_.place = place_of(from, head.stamp);
  }
}

void RankClient::count_early(int from, const BulkHead& head) {
  // A rank has few partial sums of a call, and sends them all before others are as far.
  constexpr std::uint64_t kMostPartials = 32, kLargestElement = 8;
  Peer& peer = peers_[index_of(from)];
  peer.early_bytes += head.count + kMeshFrameBytes;
  std::uint64_t most = kMostEarly;
  if (head.stamp.sequence == call_.sequence) most += call_.count * kLargestElement * kMostPartials;
  if (peer.early_bytes <= most) return;
  throw Error(ErrorCode::kMessageTooLarge,
              fmt::format("{} sent {} bytes that {} does not wait for yet; {} are allowed",
                          peer.name, peer.early_bytes, peers_[index_of(rank_)].name, most),
              from);
}

std::span<std::byte> RankClient::place_of(int from, const MeshFrame& stamp) const {
  const Peer& peer = peers_[index_of(from)];
  const Awaited& awaited = peer.awaited.front();
  MeshFrame expected = call_;
  expected.part = peer.received;
  expected.payload = std::min(kBytesPiece, awaited.bytes.size() - awaited.done);
  if (stamp != expected) {
    throw frame_mismatch(stamp, peer.name, from, expected, peers_[index_of(rank_)].name);
  }
  return awaited.bytes.subspan(awaited.done, static_cast<std::size_t>(stamp.payload));
}

void RankClient::count_placed(int from) {
  Peer& peer = peers_[index_of(from)];
  Awaited& awaited = peer.awaited.front();
  awaited.done += std::min(kBytesPiece, awaited.bytes.size() - awaited.done);
  ++peer.received;
  if (awaited.done == awaited.bytes.size()) peer.awaited.pop_front();
}

void RankClient::take_early(int from) {
  Peer& peer = peers_[index_of(from)];
  while (!peer.early.empty() && !peer.awaited.empty() &&
         peer.early.front().stamp.sequence <= call_.sequence) {
    const Early& early = peer.early.front();
    std::ranges::copy(early.bytes, place_of(from, early.stamp).begin());
    peer.early_bytes -= early.bytes.size() + kMeshFrameBytes;
    peer.early.pop_front();
    count_placed(from);
  }
}

void RankClient::move_bytes(std::span<const BytesOut> out, std::span<const BytesIn> in) {
  for (const BytesOut& each : out) {
    std::size_t begin = 0;
    do {  // no bytes at all are a message, too
      BulkHead head;
      head.tag = WireTag::kBytes;
      head.to = each.to;
      head.from = static_cast<std::uint32_t>(rank_);
      head.stamp = call_;
      head.count = head.stamp.payload = std::min(kBytesPiece, each.bytes.size() - begin);
      for (std::size_t rank = 0; rank < peers_.size(); ++rank) {
        if (each.to == kEveryOther || each.to == rank) head.stamp.part = peers_[rank].sent++;
      }
      frames_.queue({encode_head(head), each.bytes.subspan(begin, head.count), {}, {}});
      begin += head.count;
    } while (begin < each.bytes.size());
  }
  for (const BytesIn& each : in) peers_[index_of(each.from)].awaited.push_back({each.bytes});
  const auto first_missing = [this] {
    return std::ranges::find_if(peers_, [](const Peer& peer) { return !peer.awaited.empty(); });
  };
  for (const BytesIn& each : in) take_early(each.from);
  const auto missing = first_missing();
  const std::string what = missing == peers_.end()
                               ? fmt::format("{} to take bytes", frames_.socket().peer())
                               : fmt::format("the bytes of {}", missing->name);
  drive(what, [&] {
    const auto next = first_missing();
    waits_->set(next == peers_.end() ? -1 : static_cast<int>(next - peers_.begin()));
    return next == peers_.end() && !frames_.wants_to_send();
  });
}

}  // namespace lockstep
