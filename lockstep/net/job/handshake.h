#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "lockstep/net/socket/socket.h"
#include "lockstep/wire/handshake_messages.h"
#include "lockstep/wire/message.h"

namespace lockstep {

// Every connection opens with one handshake (docs/mesh_protocol.md). Client and server send a hello
// each: who they are, what they want, a fresh nonce. Then each proves that it holds the job's token
// with a keyed hash over both hellos and its own role; the token itself never travels. Between
// hosts what follows are encrypted records, with keys of this connection alone: from the token and
// from X25519 keys that are in the hellos.

MemberId random_member_id();
// 32 random bytes as text: a token that nobody has to type.
std::string random_secret();

// What becomes of the bytes of connections to other hosts. All members of a job choose alike.
enum class WireChoice : std::uint8_t {
  kSealed,        // encrypted
  kPlain,         // only checked: the network is trusted
  kSealedAlways,  // encrypted over loopback, too: for tests
};

constexpr WireChoice wire_choice(bool plain) {
  return plain ? WireChoice::kPlain : WireChoice::kSealed;
}

// Who this process is on all its connections. An empty token is a key like any other: both sides
// must have it.
struct Identity {
  std::string job;
  std::uint32_t generation = 0;  // the tag of the one that its connections are for; 0: none
  MemberId id{};
  int rank = -1;  // -1: no rank, such as a launcher
  std::string token;
  WireChoice wire = WireChoice::kSealed;
};

// Who the process at the other end is, proved by the handshake.
struct PeerIdentity {
  MemberId id{};
  int rank = -1;
  std::uint32_t group = 0;
  std::uint32_t generation = 0;

  bool operator==(const PeerIdentity&) const = default;
};

// What a connection needs: none if it stays on this host.
Protection protection_for(const Socket& socket, const Identity& identity);

// What the token is to the rest of the handshake.
using TokenKey = std::array<std::byte, 32>;
TokenKey token_key(const std::string& token);

// Keys of the records between two members: of each direction, from what the handshake has agreed
// on. `shared` is the X25519 secret, the hellos are bodies as they were sent.
struct SessionKeys {
  RecordKey from_client;
  RecordKey from_server;
};
SessionKeys session_keys(const TokenKey& token, std::span<const std::byte, 32> shared,
                         std::span<const std::byte> client_hello,
                         std::span<const std::byte> server_hello);

// The handshake as a state machine without I/O, for event loops. Feed it every message received.
class Handshake {
 public:
  enum class Role : std::uint8_t { kClient = 1, kServer = 2 };

  // `group` and the identity's generation are what the client asks for; a server takes them from
  // the peer. `protection` is what this side needs.
  Handshake(Role role, const Identity& identity, Purpose purpose, std::uint32_t group = 0,
            Protection protection = Protection::kNone);
  ~Handshake();
  Handshake(Handshake&&) = default;
  Handshake& operator=(Handshake&&) = default;

  // What a client sends to begin; empty for a server.
  std::vector<std::byte> opening() const;

  // `reply` is to be sent in any case: when a peer is refused it holds the reason. `failure` ends
  // the connection.
  struct Step {
    std::vector<std::byte> reply;
    std::optional<Error> failure;
  };
  Step receive(const Message& message);

  bool done() const { return state_ == State::kDone; }
  const PeerIdentity& peer() const;  // once done
  Purpose purpose() const { return own_.purpose; }
  Protection protection() const { return protection_; }  // once done
  // Once done, and all replies are sent: has the socket use what both sides have agreed on.
  void protect(Socket& socket) const;

 private:
  enum class State : std::uint8_t { kExpectHello, kExpectProof, kDone, kFailed };

  Step receive_hello(const Message& message);
  Step receive_proof(const Message& message);
  Step refuse(ErrorCode code, std::string reason);
  Step fail(ErrorCode code, std::string reason);
  std::optional<Error> compare_hellos();
  bool make_keys();
  std::array<std::byte, 32> proof(Role role) const;

  // Constant after construction.
  Role role_;
  Hello own_;
  TokenKey key_;
  std::array<std::byte, 32> secret_;  // of own_.key

  State state_ = State::kExpectHello;
  Hello peer_hello_;
  PeerIdentity peer_;
  Protection protection_{};
  std::optional<RecordKeys> record_keys_;
};

// The handshake on a connected socket; waits until the deadline. Reads nothing beyond the
// handshake, and leaves the socket protected as it needs to be. Error{kAuthentication}: wrong or
// missing token, another job or purpose. Error{kVersionMismatch}: another protocol version.
PeerIdentity client_handshake(Socket& socket, const Identity& identity, Purpose purpose,
                              std::uint32_t group, Deadline deadline,
                              const FailureLatch* latch = nullptr);
PeerIdentity server_handshake(Socket& socket, const Identity& identity, Purpose purpose,
                              Deadline deadline, const FailureLatch* latch = nullptr);

}  // namespace lockstep
