#pragma once

#include <array>
#include <memory>

#include "lockstep/base/descriptor.h"
#include "lockstep/comm/mpi/group.h"
#include "lockstep/comm/transport/stream.h"

namespace lockstep {

// A byte stream over MPI messages, which we call *chunks* here. Few bytes are sent from a copy of
// our own (*staged*), so that write_some() can return at once; many straight from the caller's
// memory, which then counts as written when MPI is done with it. The reader asks MPI for the size
// of the next chunk: it receives straight into the caller's memory what fits there, and stages the
// rest. So neither end needs to know how the other cuts.
class MpiStream final : public Stream {
 public:
  // The group must outlive it. Throws Error{kIo} where there are no descriptors left.
  MpiStream(const MpiGroup& group, int peer);
  ~MpiStream() override;

  std::size_t write_some(std::span<const std::byte> head, std::span<const std::byte> body) override;
  std::size_t read_some(std::span<std::byte> head, std::span<std::byte> body) override;
  // MPI has no descriptor to wait for: a timer says when to look again.
  bool prepare_wait(Direction direction, std::vector<pollfd>& fds) override;
  void finish_wait(Direction) override {}

 private:
  struct Stage {
    std::unique_ptr<std::byte[]> bytes;
    MPI_Request request = MPI_REQUEST_NULL;
  };
  // A chunk under way from or into the caller's memory, or into incoming_.
  struct Flow {
    MPI_Request request = MPI_REQUEST_NULL;
    std::size_t bytes = 0;
    Deadline::Clock::time_point started;

    bool active() const { return request != MPI_REQUEST_NULL; }
  };
  struct Timer {
    Descriptor fd;
    std::chrono::nanoseconds nap{0};
    Deadline::Clock::time_point rings;

    void reset() {
      nap = {};
      rings = {};
    }
  };

  std::size_t write_staged(std::span<const std::byte> head, std::span<const std::byte> body);
  std::size_t write_direct(std::span<const std::byte> body);
  bool receive_next(std::span<std::byte> head, std::span<std::byte> body);
  bool chunk_is_there() const;
  std::size_t take_incoming(std::span<std::byte> head, std::span<std::byte> body);

  const MpiGroup& group_;
  const int peer_;

  // The writer's.
  std::array<Stage, 4> stages_;  // used in turn
  std::size_t next_stage_ = 0;
  Flow sending_;
  // The reader's.
  Flow receiving_;
  bool straight_ = false;  // receiving_ goes to the caller's memory
  std::unique_ptr<std::byte[]> incoming_;
  std::size_t incoming_capacity_ = 0;
  std::size_t incoming_size_ = 0;
  std::size_t incoming_taken_ = 0;
  // One for each direction.
  std::array<Timer, 2> timers_;
};

}  // namespace lockstep
