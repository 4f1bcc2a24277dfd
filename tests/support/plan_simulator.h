#pragma once

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <random>
#include <utility>
#include <vector>

#include "lockstep/comm/collectives/plan.h"

namespace lockstep {

// The value of the canonical tree over leaves [begin, end).
template <typename Value, typename Combine>
Value tree_value(const std::vector<Value>& leaves, std::size_t begin, std::size_t end,
                 Combine&& combine) {
  if (end - begin == 1) return leaves[begin];
  std::size_t cut = 1;
  while (2 * cut < end - begin) cut *= 2;
  const Value left = tree_value(leaves, begin, begin + cut, combine);
  return combine(left, tree_value(leaves, begin + cut, end, combine));
}

// Runs the plans of all ranks in memory, delivering messages in random order. A rank starts a
// round when its last one is over: all received and, with `rendezvous`, all sent messages taken.
template <typename Value, typename Combine>
class Simulator {
 public:
  Simulator(std::vector<Plan> plans, std::vector<std::vector<Value>> buffers, Combine combine,
            bool rendezvous, unsigned seed)
      : combine_(combine), rendezvous_(rendezvous), random_(seed), ranks_(plans.size()) {
    for (std::size_t r = 0; r < plans.size(); ++r) {
      ranks_[r].plan = std::move(plans[r]);
      ranks_[r].buffer = std::move(buffers[r]);
    }
  }

  // Stops at the first thing that is wrong with the plans.
  void run() {
    for (std::size_t r = 0; r < ranks_.size(); ++r) start_round(r);
    std::vector<std::pair<std::size_t, std::size_t>> deliverable;
    while (!::testing::Test::HasFatalFailure()) {
      deliverable.clear();
      for (std::size_t r = 0; r < ranks_.size(); ++r) {
        for (std::size_t i = 0; i < ranks_[r].pending.size(); ++i) {
          if (!channel(ranks_[r].pending[i].peer, r).empty()) deliverable.emplace_back(r, i);
        }
      }
      if (deliverable.empty()) break;
      std::uniform_int_distribution<std::size_t> pick(0, deliverable.size() - 1);
      const auto [r, i] = deliverable[pick(random_)];
      deliver(r, i);
    }
    for (std::size_t r = 0; r < ranks_.size(); ++r) {
      ASSERT_EQ(ranks_[r].round, ranks_[r].plan.rounds.size()) << "rank " << r << " is stuck";
    }
    for (const auto& [ends, queue] : channels_) {
      ASSERT_TRUE(queue.empty()) << ends.first << " -> " << ends.second << " was never received";
    }
  }

  const std::vector<Value>& buffer(std::size_t rank) const { return ranks_[rank].buffer; }

 private:
  struct Rank {
    Plan plan;
    std::vector<Value> buffer;
    std::size_t round = 0;
    std::vector<Recv> pending;
    std::size_t not_taken = 0;
    std::map<std::size_t, std::vector<Value>> tree;  // received for Merge::kTree, by rank
    Range tree_piece;
  };

  std::deque<std::vector<Value>>& channel(std::size_t from, std::size_t to) {
    return channels_[{from, to}];
  }

  std::vector<Value> copy(const Rank& rank, Range piece) const {
    const auto begin = rank.buffer.begin() + static_cast<std::ptrdiff_t>(piece.begin);
    return {begin, begin + static_cast<std::ptrdiff_t>(piece.size())};
  }

  void check_round(std::size_t r, const Round& round) {
    std::vector<int> sends(ranks_.size());
    std::vector<int> recvs(ranks_.size());
    std::vector<int> touched(ranks_[r].buffer.size());
    ASSERT_FALSE(round.sends.empty() && round.recvs.empty());
    for (const Send& send : round.sends) {
      ASSERT_NE(send.peer, static_cast<int>(r));
      ASSERT_EQ(++sends.at(send.peer), 1);
      ASSERT_LE(send.range.begin + send.range.size(), ranks_[r].buffer.size());
    }
    for (const Recv& recv : round.recvs) {
      ASSERT_NE(recv.peer, static_cast<int>(r));
      ASSERT_EQ(++recvs.at(recv.peer), 1);
      ASSERT_LE(recv.range.begin + recv.range.size(), ranks_[r].buffer.size());
      if (recv.merge == Merge::kTree) {
        ASSERT_EQ(round.recvs.size(), ranks_.size() - 1);
        ASSERT_EQ(recv.range, round.recvs[0].range);
        ASSERT_EQ(round.recvs[0].merge, Merge::kTree);
      } else {
        for (std::size_t i = 0; i < recv.range.size(); ++i) {
          ASSERT_EQ(++touched[recv.range.begin + i], 1) << "two receives write one element";
        }
      }
    }
  }

  void start_round(std::size_t r) {
    Rank& rank = ranks_[r];
    if (rank.round == rank.plan.rounds.size()) return;
    const Round& round = rank.plan.rounds[rank.round];
    ASSERT_NO_FATAL_FAILURE(check_round(r, round));
    for (const Send& send : round.sends) channel(r, send.peer).push_back(copy(rank, send.range));
    rank.pending = round.recvs;
    rank.not_taken = rendezvous_ ? round.sends.size() : 0;
    finish_round_if_over(r);
  }

  void deliver(std::size_t r, std::size_t index) {
    Rank& rank = ranks_[r];
    const Recv recv = rank.pending[index];
    rank.pending.erase(rank.pending.begin() + static_cast<std::ptrdiff_t>(index));
    const std::vector<Value> message = channel(recv.peer, r).front();
    channel(recv.peer, r).pop_front();
    ASSERT_EQ(message.size(), recv.range.size()) << recv.peer << " -> " << r;
    for (std::size_t i = 0; i < message.size() && recv.merge != Merge::kTree; ++i) {
      Value& own = rank.buffer[recv.range.begin + i];
      if (recv.merge == Merge::kCopy) own = message[i];
      if (recv.merge == Merge::kLeft) own = combine_(message[i], own);
      if (recv.merge == Merge::kRight) own = combine_(own, message[i]);
    }
    if (recv.merge == Merge::kTree) {
      rank.tree[recv.peer] = message;
      rank.tree_piece = recv.range;
    }
    finish_round_if_over(r);
    if (rendezvous_) {
      --ranks_[recv.peer].not_taken;
      finish_round_if_over(recv.peer);
    }
  }

  void finish_round_if_over(std::size_t r) {
    Rank& rank = ranks_[r];
    if (!rank.pending.empty() || rank.not_taken > 0) return;
    if (!rank.tree.empty()) {
      rank.tree[r] = copy(rank, rank.tree_piece);
      for (std::size_t i = 0; i < rank.tree_piece.size(); ++i) {
        std::vector<Value> leaves;
        for (const auto& [from, values] : rank.tree) leaves.push_back(values[i]);
        rank.buffer[rank.tree_piece.begin + i] = tree_value(leaves, 0, leaves.size(), combine_);
      }
      rank.tree.clear();
    }
    ++rank.round;
    start_round(r);
  }

  Combine combine_;
  bool rendezvous_;
  std::mt19937 random_;
  std::vector<Rank> ranks_;
  std::map<std::pair<std::size_t, std::size_t>, std::deque<std::vector<Value>>> channels_;
};

// Symbolic values: every (rank, element) is a leaf of its own, and equal expressions are equal
// numbers.
class Symbols {
 public:
  using Value = std::uint64_t;

  static Value leaf(std::size_t rank, std::size_t element) { return element * 64 + rank + 1; }
  Value combine(Value left, Value right) {
    const auto [place, fresh] = nodes_.try_emplace({left, right}, kFirstNode + nodes_.size());
    if (fresh) operands_.emplace_back(left, right);
    return place->second;
  }
  // The leaves of an expression in order.
  void leaves(Value value, std::vector<Value>& out) const {
    if (value < kFirstNode) {
      out.push_back(value);
      return;
    }
    leaves(operands_[value - kFirstNode].first, out);
    leaves(operands_[value - kFirstNode].second, out);
  }
  Value canonical(std::size_t world_size, std::size_t element) {
    std::vector<Value> ranks;
    for (std::size_t r = 0; r < world_size; ++r) ranks.push_back(leaf(r, element));
    return tree_value(ranks, 0, world_size, [this](Value a, Value b) { return combine(a, b); });
  }

 private:
  static constexpr Value kFirstNode = std::uint64_t{1} << 32;
  std::map<std::pair<Value, Value>, Value> nodes_;
  std::vector<std::pair<Value, Value>> operands_;
};

}  // namespace lockstep
