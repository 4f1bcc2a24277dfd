#include "lockstep/comm/transport/mesh_door.h"

#include <fmt/format.h>
#include <poll.h>

#include <algorithm>

#include "lockstep/base/index.h"
#include "lockstep/net/job/link.h"
#include "lockstep/net/job/roster.h"
#include "lockstep/net/socket/unix_socket.h"

namespace lockstep {
namespace {

using namespace std::chrono_literals;

constexpr auto kHandshakeTime = 5s;
constexpr std::size_t kMostVisitors = 1024;
constexpr int kAtOnce = 64;  // then those who were let in are heard
constexpr std::chrono::nanoseconds kAcceptPause = 100ms;
// How soon a waiting thread notices that the job has failed.
constexpr auto kAbortCheck = 20ms;

}  // namespace

struct MeshDoor::Visitor {
  Link link;
  Purpose purpose;
  Handshake handshake;
  Deadline deadline;
};

MeshDoor::MeshDoor(JoinedJob& job) : job_(job) {
  thread_.start(
      "the mesh's door", [this] { serve(); },
      [this](const Error& error) { job_.control->fail_quietly(error); });
}

MeshDoor::~MeshDoor() {
  stop_.set();
  thread_.join();
}

MeshDoor::Arrival MeshDoor::wait_for(int peer, std::uint32_t group, Deadline deadline) {
  std::unique_lock lock(mutex_);
  for (;;) {
    const auto found = arrivals_.find({group, peer});
    if (found != arrivals_.end()) {
      Arrival arrival = std::move(found->second);
      arrivals_.erase(found);
      return arrival;
    }
    job_.control->latch().check();
    if (deadline.expired()) {
      throw Error(ErrorCode::kTimeout,
                  fmt::format("{} did not connect in time", name_of(job_.roster[index_of(peer)])),
                  peer);
    }
    arrived_.wait_until(lock, earlier(deadline, Deadline::after(kAbortCheck)).time());
  }
}

void MeshDoor::serve() {
  std::vector<Visitor> visitors;
  bool out_of_descriptors = false;
  for (;;) {
    std::vector<pollfd> fds{{stop_.fd(), POLLIN, 0}};
    fds.push_back({out_of_descriptors ? -1 : job_.mesh_listener.fd(), POLLIN, 0});
    fds.push_back({out_of_descriptors ? -1 : job_.unix_listener.fd(), POLLIN, 0});
    Deadline next = Deadline::after(out_of_descriptors ? kAcceptPause : 1h);
    for (const Visitor& v : visitors) {
      const short events = static_cast<short>(POLLIN | (v.link.wants_to_send() ? POLLOUT : 0));
      fds.push_back({v.link.socket().fd(), events, 0});
      next = earlier(next, v.deadline);
    }
    ::poll(fds.data(), fds.size(), next.poll_timeout());
    if (fds[0].revents != 0) return;
    std::erase_if(visitors, [&](Visitor& v) { return !attend(v); });
    out_of_descriptors = false;
    try {
      if (fds[1].revents != 0) admit(job_.mesh_listener, Purpose::kMesh, visitors);
      if (fds[2].revents != 0) admit(job_.unix_listener, Purpose::kShared, visitors);
    } catch (const Error&) {
      // Most likely too many strangers. The one who has waited longest makes room.
      if (!visitors.empty()) visitors.erase(visitors.begin());
      out_of_descriptors = true;
    }
  }
}

void MeshDoor::admit(const Socket& listener, Purpose purpose, std::vector<Visitor>& visitors) {
  for (int i = 0; i < kAtOnce; ++i) {
    std::optional<Socket> socket = try_accept(listener);
    if (!socket) return;
    // A rank says its word at once; who has been silent longest makes room for it.
    if (visitors.size() == kMostVisitors) visitors.erase(visitors.begin());
    visitors.push_back({Link(std::move(*socket), kMaxHandshakeBody), purpose,
                        Handshake(Handshake::Role::kServer, job_.identity, purpose),
                        Deadline::after(kHandshakeTime)});
  }
}

bool MeshDoor::attend(Visitor& visitor) {
  try {
    visitor.link.pump();
    while (std::optional<Message> message = visitor.link.next()) {
      Handshake::Step step = visitor.handshake.receive(*message);
      if (!step.reply.empty()) {
        visitor.link.queue(std::make_shared<const std::vector<std::byte>>(std::move(step.reply)));
      }
      visitor.link.flush();
      if (step.failure) throw *step.failure;
      if (visitor.handshake.done()) {
        deliver(visitor);
        return false;
      }
    }
    visitor.link.flush();
    if (visitor.link.failure()) throw *visitor.link.failure();
    if (visitor.deadline.expired())
      throw Error(ErrorCode::kTimeout, "it did not finish its handshake");
    return true;
  } catch (const Error&) {  // not one of ours, or it will come again
    visitor.link.socket().close_gently();
    return false;
  }
}

void MeshDoor::deliver(Visitor& visitor) {
  const PeerIdentity& peer = visitor.handshake.peer();
  require_member(job_.roster, peer);
  if (visitor.purpose == Purpose::kShared) require_trusted_peer(visitor.link.socket());
  {
    const std::lock_guard lock(mutex_);
    arrivals_[{peer.group, peer.rank}] = {std::move(visitor.link.socket()), visitor.purpose};
  }
  arrived_.notify_all();
}

}  // namespace lockstep
