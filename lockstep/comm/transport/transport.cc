#include "lockstep/comm/transport/transport.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <numeric>

#include "lockstep/comm/call.h"

namespace lockstep {
namespace {

MeshFrame stamp_for(Collective collective) {
  MeshFrame stamp;
  stamp.kind = static_cast<std::uint8_t>(collective);
  return stamp;
}

// A message of one contiguous row.
class WholeMessage {
 public:
  WholeMessage(int peer, Direction direction, const std::byte* data, std::size_t size)
      : row_(const_cast<std::byte*>(data)) {
    transfer_.peer = peer;
    transfer_.direction = direction;
    transfer_.layout.rows = {&row_, 1};
    transfer_.layout.row_bytes = size;
    transfer_.limit = size;
  }
  WholeMessage(const WholeMessage&) = delete;
  WholeMessage& operator=(const WholeMessage&) = delete;

  const Transfer& transfer() const { return transfer_; }

 private:
  std::byte* row_;
  Transfer transfer_;
};

}  // namespace

std::span<std::byte> Layout::at(std::size_t offset) const {
  if (segment_bytes == 0) {
    const std::size_t row = offset / row_bytes;
    const std::size_t within = offset - row * row_bytes;
    return {rows[row] + within, row_bytes - within};
  }
  const std::size_t group = rows.size() * segment_bytes;
  const std::size_t segment = offset / group;
  const std::size_t begin = segment * segment_bytes;  // of the segment in its row
  const std::size_t length = std::min(segment_bytes, row_bytes - begin);
  const std::size_t in_group = offset - segment * group;
  const std::size_t row = in_group / length;
  const std::size_t within = in_group - row * length;
  const std::size_t place =
      window_segments == 0 ? begin : (segment % window_segments) * segment_bytes;
  return {rows[row] + place + within, length - within};
}

std::vector<int> Transport::hosts() const {
  std::vector<int> alone(static_cast<std::size_t>(world_size()));
  std::iota(alone.begin(), alone.end(), 0);
  return alone;
}

void Transport::check_peer(int peer, const char* operation) const {
  if (peer < 0 || peer >= world_size()) {
    throw Error(ErrorCode::kInvalidRank,
                fmt::format("{}: rank {} is not in [0, {})", operation, peer, world_size()), peer);
  }
  if (peer == rank()) {
    throw Error(ErrorCode::kSelfSend,
                fmt::format("{}: rank {} cannot exchange messages with itself", operation, peer),
                peer);
  }
}

void Transport::send(int to, std::span<const std::byte> data, Deadline deadline) {
  check_peer(to, "send");
  const WholeMessage message(to, Direction::kSend, data.data(), data.size());
  std::array transfers{message.transfer()};
  run(transfers, stamp_for(Collective::kPointToPoint), nullptr, deadline);
}

void Transport::recv(int from, std::span<std::byte> data, Deadline deadline) {
  check_peer(from, "recv");
  const WholeMessage message(from, Direction::kRecv, data.data(), data.size());
  std::array transfers{message.transfer()};
  run(transfers, stamp_for(Collective::kPointToPoint), nullptr, deadline);
}

bool Transport::recv_if_begun(int from, std::span<std::byte> data, Deadline begin,
                              Deadline deadline) {
  check_peer(from, "recv");
  const WholeMessage message(from, Direction::kRecv, data.data(), data.size());
  Transfer transfer = message.transfer();
  return run_if_begun(transfer, stamp_for(Collective::kPointToPoint), begin, deadline);
}

void Transport::exchange(int to, std::span<const std::byte> out, int from, std::span<std::byte> in,
                         Deadline deadline) {
  check_peer(to, "exchange");
  check_peer(from, "exchange");
  const WholeMessage sent(to, Direction::kSend, out.data(), out.size());
  const WholeMessage received(from, Direction::kRecv, in.data(), in.size());
  std::array transfers{sent.transfer(), received.transfer()};
  run(transfers, stamp_for(Collective::kPointToPoint), nullptr, deadline);
}

// Dissemination: after round k everybody has heard, directly or not, of 2^(k+1) ranks.
void Transport::barrier(Deadline deadline) {
  const int n = world_size();
  for (int distance = 1; distance < n; distance *= 2) {
    const WholeMessage sent((rank() + distance) % n, Direction::kSend, nullptr, 0);
    const WholeMessage received((rank() + n - distance) % n, Direction::kRecv, nullptr, 0);
    std::array transfers{sent.transfer(), received.transfer()};
    run(transfers, stamp_for(Collective::kBarrier), nullptr, deadline);
  }
}

}  // namespace lockstep
