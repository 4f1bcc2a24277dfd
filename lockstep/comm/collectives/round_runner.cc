#include "lockstep/comm/collectives/round_runner.h"

#include <algorithm>

#include "lockstep/base/check.h"
#include "lockstep/base/index.h"
#include "lockstep/comm/kernels/kernels.h"

namespace lockstep {
namespace {

constexpr std::size_t kWindow = 2;

// Merges received segments into their range.
class Merger final : public TransferObserver {
 public:
  struct Target {
    std::byte* to = nullptr;
    Merge merge = Merge::kCopy;
    std::size_t merged = 0;  // bytes
  };

  Merger(DataType type, ReduceOp op, std::size_t segment_bytes)
      : type_(type), op_(op), segment_bytes_(segment_bytes) {}

  std::vector<Transfer> transfers;
  std::vector<Target> targets;  // of the transfers

  void advanced(Transfer& transfer) override {
    Target& target = targets[index_of(&transfer - transfers.data())];
    if (target.merge == Merge::kCopy) return;
    const std::size_t size = transfer.layout.bytes();
    for (;;) {
      const std::size_t end = std::min(size, target.merged + segment_bytes_);
      if (end == target.merged || transfer.done < end) return;
      const std::byte* received = transfer.layout.at(target.merged).data();
      std::byte* own = target.to + target.merged;
      const std::size_t count = (end - target.merged) / size_of(type_);
      if (target.merge == Merge::kLeft) {
        combine(op_, type_, own, received, own, count);
      } else {
        combine(op_, type_, own, own, received, count);
      }
      target.merged = end;
      transfer.limit = std::min(size, end + kWindow * segment_bytes_);
    }
  }

  bool watches_sends() const override { return false; }

 private:
  const DataType type_;
  const ReduceOp op_;
  const std::size_t segment_bytes_;
};

}  // namespace

void RoundRunner::run(const Round& round, const std::byte* from, std::byte* to, DataType type,
                      ReduceOp op, const MeshFrame& stamp, Deadline deadline) const {
  const std::size_t element = size_of(type);
  Merger merger(type, op, segment_bytes_);
  std::vector<std::byte*> rows(round.sends.size() + round.recvs.size());
  std::size_t used = 0;
  const auto add = [&](int peer, Direction direction, std::byte* row, std::size_t bytes) {
    rows[used] = row;
    Transfer transfer;
    transfer.peer = peer;
    transfer.direction = direction;
    transfer.layout.rows = {&rows[used++], 1};
    transfer.layout.row_bytes = bytes;
    transfer.limit = bytes;
    merger.transfers.push_back(transfer);
    merger.targets.push_back({});
  };
  for (const Send& send : round.sends) {
    add(send.peer, Direction::kSend, const_cast<std::byte*>(from) + send.range.begin * element,
        send.range.size() * element);
  }
  const std::size_t window_bytes = kWindow * segment_bytes_;
  const auto merging = static_cast<std::size_t>(
      std::count_if(round.recvs.begin(), round.recvs.end(),
                    [](const Recv& recv) { return recv.merge != Merge::kCopy; }));
  std::byte* window = merging > 0 ? scratch_.get(merging * window_bytes) : nullptr;
  for (const Recv& recv : round.recvs) {
    LOCKSTEP_CHECK(recv.merge != Merge::kTree);
    std::byte* place = to + recv.range.begin * element;
    const std::size_t bytes = recv.range.size() * element;
    if (recv.merge == Merge::kCopy) {
      add(recv.peer, Direction::kRecv, place, bytes);
      continue;
    }
    add(recv.peer, Direction::kRecv, window, bytes);
    window += window_bytes;
    Transfer& transfer = merger.transfers.back();
    transfer.layout.segment_bytes = segment_bytes_;
    transfer.layout.window_segments = kWindow;
    transfer.limit = std::min(bytes, window_bytes);
    merger.targets.back() = {place, recv.merge, 0};
  }
  transport_.run(merger.transfers, stamp, merging > 0 ? &merger : nullptr, deadline);
}

void RoundRunner::run(const Plan& plan, BufferView data, ReduceOp op, const MeshFrame& stamp,
                      Deadline deadline) const {
  for (const Round& round : plan.rounds) {
    run(round, data.data(), data.data(), data.type(), op, stamp, deadline);
  }
}

}  // namespace lockstep
