#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "lockstep/comm/scratch.h"
#include "lockstep/comm/transport/helper_thread.h"
#include "lockstep/comm/transport/transport.h"

namespace lockstep {

// How many of at most `most` rails a reduction of a vector of `bytes` among `world_size` ranks is
// worth.
int rails_for(std::size_t bytes, int world_size, int most);

// Several sets of connections among the ranks of a group, each moved by a thread of its own: what
// one thread can copy into and out of sockets limits a connection, not the link. The first rail is
// the group's own transport and the caller's thread; the others are made when first needed, and
// their threads add with the floating-point mode of the caller that needed them.
class Rails {
 public:
  // `transport` is the group's, with the number `group`; `scratch` is for the first rail. Both must
  // outlive the rails.
  Rails(Transport& transport, Scratch& scratch, int count, std::uint32_t group);

  int count() const { return count_; }

  using Body = std::function<void(Transport& transport, Scratch& scratch, int rail)>;
  // Calls body for the rails [0, rails), at most count(), all at once; on all ranks alike. Returns
  // when all have ended. The group fails with the first error of any of them.
  void run(int rails, const Body& body);

 private:
  struct Rail {
    std::unique_ptr<Transport> transport;
    Scratch scratch;
    HelperThread thread{"a rail's thread"};
  };

  void add_rail();

  Transport& transport_;
  Scratch& scratch_;
  const int count_;
  const std::uint32_t group_;
  std::vector<std::unique_ptr<Rail>> others_;  // from the second on
};

}  // namespace lockstep
