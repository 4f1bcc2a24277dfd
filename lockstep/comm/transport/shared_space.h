#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <optional>

#include "lockstep/base/deadline.h"
#include "lockstep/comm/buffer.h"
#include "lockstep/wire/mesh_frame.h"

namespace lockstep {

// What a rank shows to the others of its group, in memory that all of them map. Only its owner
// writes it, `sleepers` aside. All zero is a fresh board.
struct Board {
  static constexpr std::size_t kEntryBytes = 16 * 1024;
  static constexpr std::size_t kStageBytes = 256 * 1024;

  // What the owner brings to a collective: all of it when it is small, addresses when it is large.
  // Two, used in turn: nobody can be two collectives ahead of anybody.
  struct alignas(64) Entry {
    std::atomic<std::uint64_t> sequence;
    std::uint64_t digest;  // of the stamp; equal on all ranks
    std::byte data[kEntryBytes - 16];
  };
  Entry entries[2];
  MeshFrame stamps[2];  // read only to explain a difference of digests

  // Running counts over all collectives. A *round* moves one stage's worth of data.
  alignas(64) std::atomic<std::uint64_t> staged;    // rounds whose stage_in is filled
  alignas(64) std::atomic<std::uint64_t> finished;  // rounds whose result is there
  std::uint64_t first_non_finite[2];                // of this rank's part; by parity of collective

  alignas(64) std::atomic<std::uint32_t> sleepers;  // others asleep on `bell`
  std::atomic<std::uint32_t> bell;                  // a futex

  // Whether the owner is in a collective, and so may touch the memory that others have shown.
  alignas(64) std::atomic<std::uint32_t> inside;

  alignas(64) std::byte stage_in[2][kStageBytes];
  alignas(64) std::byte stage_out[2 * kStageBytes];
};

// The memory that the ranks of a group on one host share.
class SharedSpace {
 public:
  virtual ~SharedSpace() = default;

  // Opens what is not open yet; called before boards of others are used.
  virtual void connect(Deadline deadline) = 0;
  virtual Board& board(int rank) = 0;
  // A number by which the other ranks find [data, data + bytes), or nothing if they cannot see it.
  virtual std::optional<std::uint64_t> publish(const std::byte* data, std::size_t bytes) const = 0;
  // The memory that `rank` has published so, of at least that many bytes; null where there is none.
  virtual std::byte* locate(int rank, std::uint64_t published, std::size_t bytes) const = 0;
  virtual Buffer allocate(std::size_t bytes) = 0;
  // Whether memory that a rank has freed may soon be somebody's else, while others still know its
  // address: the ranks are threads. Then nobody leaves a collective that has failed before all
  // others are out of it. Processes map the memory of their peers, and may be stopped: they leave.
  virtual bool shares_heap() const { return false; }
};

}  // namespace lockstep
