#include "lockstep/net/job/handshake.h"

#include <fmt/format.h>
#include <sodium.h>
#include <sys/socket.h>

#include <memory>
#include <utility>

#include "lockstep/base/check.h"
#include "lockstep/base/utf8.h"
#include "lockstep/net/socket/interface.h"
#include "lockstep/net/socket/peer_user.h"
#include "lockstep/wire/bytes.h"
#include "lockstep/wire/wire_error.h"

namespace lockstep {
namespace {

constexpr std::size_t kProofBytes = 32;
static_assert(crypto_auth_hmacsha256_BYTES == kProofBytes);
static_assert(crypto_hash_sha256_BYTES == kProofBytes);

void require_sodium() {
  static const bool ready = ::sodium_init() >= 0;
  if (!ready) throw Error(ErrorCode::kIo, "libsodium cannot be initialised");
}

unsigned char* raw(std::byte* bytes) { return reinterpret_cast<unsigned char*>(bytes); }
const unsigned char* raw(const std::byte* bytes) {
  return reinterpret_cast<const unsigned char*>(bytes);
}

std::array<std::byte, 32> keyed_hash(std::span<const std::byte> text,
                                     std::span<const std::byte, 32> key) {
  std::array<std::byte, 32> mac;
  ::crypto_auth_hmacsha256(raw(mac.data()), raw(text.data()), text.size(), raw(key.data()));
  return mac;
}

template <std::size_t Size>
void wipe(std::array<std::byte, Size>& secret) {
  ::sodium_memzero(secret.data(), secret.size());
}

std::string_view words_for(Protection protection) {
  return protection == Protection::kChecked ? "a plain wire (--plain-wire)" : "an encrypted one";
}

std::string in_quotes(std::string_view text) { return fmt::format("'{}'", text); }

}  // namespace

MemberId random_member_id() {
  require_sodium();
  MemberId id;
  ::randombytes_buf(id.data(), id.size());
  return id;
}

std::string random_secret() {
  return to_string(random_member_id()) + to_string(random_member_id());
}

TokenKey token_key(const std::string& token) {
  constexpr std::string_view kContext = "lockstep token 1\n";
  const std::string text = std::string(kContext) + token;
  TokenKey key;
  ::crypto_hash_sha256(raw(key.data()), reinterpret_cast<const unsigned char*>(text.data()),
                       text.size());
  return key;
}

Protection protection_for(const Socket& socket, const Identity& identity) {
  const bool plain = identity.wire == WireChoice::kPlain;
  const Protection between_hosts = plain ? Protection::kChecked : Protection::kSealed;
  try {
    const SocketAddress peer = socket.peer_address();
    if (peer.family() == AF_UNIX) return Protection::kNone;  // it carries descriptors
    if (identity.wire == WireChoice::kSealedAlways) return between_hosts;
    if (peer.is_loopback()) return Protection::kNone;
    // From one of its addresses to the same address a host goes through no wire.
    if (peer.with_port(0) == socket.local_address().with_port(0)) return Protection::kNone;
  } catch (const Error&) {  // the peer has gone, as the next call will find
  }
  return between_hosts;
}

SessionKeys session_keys(const TokenKey& token, std::span<const std::byte, 32> shared,
                         std::span<const std::byte> client_hello,
                         std::span<const std::byte> server_hello) {
  constexpr std::string_view kContext = "lockstep records 1\n";
  ByteWriter text;
  text.bytes(std::as_bytes(std::span(kContext)));
  text.bytes(shared);
  text.bytes(client_hello);
  text.bytes(server_hello);
  std::array<std::byte, 32> session = keyed_hash(text.written(), token);
  const auto direction = [&](Handshake::Role sender) {
    const auto role = static_cast<std::byte>(sender);
    return keyed_hash({&role, 1}, session);
  };
  const SessionKeys keys{direction(Handshake::Role::kClient), direction(Handshake::Role::kServer)};
  wipe(session);
  return keys;
}

Handshake::Handshake(Role role, const Identity& identity, Purpose purpose, std::uint32_t group,
                     Protection protection)
    : role_(role) {
  require_sodium();
  if (identity.job.size() > kMaxJobName) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("the job's name is {} bytes long; {} are allowed", identity.job.size(),
                            kMaxJobName));
  }
  if (!is_utf8(identity.job)) {
    throw Error(ErrorCode::kInvalidArgument, "the job's name is not UTF-8");
  }
  key_ = token_key(identity.token);
  own_ = {.purpose = purpose,
          .job = identity.job,
          .generation = identity.generation,
          .group = group,
          .id = identity.id,
          .rank = identity.rank,
          .has_token = !identity.token.empty(),
          .protection = protection,
          .nonce = {},
          .key = {}};
  ::randombytes_buf(own_.nonce.data(), own_.nonce.size());
  ::crypto_box_keypair(raw(own_.key.data()), raw(secret_.data()));
}

Handshake::~Handshake() {
  wipe(key_);
  wipe(secret_);
  if (!record_keys_) return;
  wipe(record_keys_->sending);
  wipe(record_keys_->receiving);
}

std::vector<std::byte> Handshake::opening() const {
  if (role_ == Role::kServer) return {};
  return frame(MessageKind::kHello, encode(own_));
}

Handshake::Step Handshake::receive(const Message& message) {
  if (message.kind == MessageKind::kRefusal) {
    const auto refusal = decode_wire_error(message.body);
    if (!refusal) return fail(ErrorCode::kUnexpectedMessage, "the peer sent a malformed refusal");
    return fail(refusal->code, fmt::format("refused by the peer: {}", refusal->message));
  }
  if (state_ == State::kExpectHello && message.kind == MessageKind::kHello) {
    return receive_hello(message);
  }
  if (state_ == State::kExpectProof && message.kind == MessageKind::kProof) {
    return receive_proof(message);
  }
  return fail(ErrorCode::kUnexpectedMessage,
              fmt::format("a {} does not belong here in a handshake", to_string(message.kind)));
}

Handshake::Step Handshake::receive_hello(const Message& message) {
  const auto hello = decode_hello(message.body);
  if (!hello) return refuse(ErrorCode::kUnexpectedMessage, "malformed hello");
  peer_hello_ = *hello;
  state_ = State::kExpectProof;
  // The client proves itself first: a stranger learns nothing that was made with the key.
  if (role_ == Role::kServer) return {frame(MessageKind::kHello, encode(own_)), {}};
  return {frame(MessageKind::kProof, proof(Role::kClient)), {}};
}

Handshake::Step Handshake::receive_proof(const Message& message) {
  const auto expected = proof(role_ == Role::kServer ? Role::kClient : Role::kServer);
  if (message.body.size() != expected.size() ||
      ::sodium_memcmp(message.body.data(), expected.data(), expected.size()) != 0) {
    if (own_.has_token == peer_hello_.has_token) {
      return refuse(ErrorCode::kAuthentication, "wrong token: the two sides have different ones");
    }
    const bool server_has = (role_ == Role::kServer ? own_ : peer_hello_).has_token;
    return refuse(ErrorCode::kAuthentication,
                  fmt::format("token missing: the {} side has none, the {} side does",
                              server_has ? "connecting" : "listening",
                              server_has ? "listening" : "connecting"));
  }
  // Only now, to a peer that holds the token, do we say what else is wrong.
  if (auto error = compare_hellos()) return refuse(error->code(), std::string(error->message()));
  state_ = State::kDone;
  const bool server = role_ == Role::kServer;
  const Hello& client = server ? peer_hello_ : own_;
  peer_ = {peer_hello_.id, peer_hello_.rank, client.group, client.generation};
  if (!server) return {};
  return {frame(MessageKind::kProof, proof(Role::kServer)), {}};
}

std::optional<Error> Handshake::compare_hellos() {
  const bool server = role_ == Role::kServer;
  const Hello& client = server ? peer_hello_ : own_;
  const Hello& listener = server ? own_ : peer_hello_;
  const auto differ = [](std::string_view what, const auto& theirs, const auto& ours) {
    return Error(ErrorCode::kAuthentication,
                 fmt::format("another {}: the connecting side has {}, the listening side {}", what,
                             theirs, ours));
  };
  if (client.job != listener.job)
    return differ("job", in_quotes(client.job), in_quotes(listener.job));
  if (client.purpose != listener.purpose) {
    return differ("purpose", to_string(client.purpose), to_string(listener.purpose));
  }
  const auto protection = agreed(client.protection, listener.protection);
  if (!protection) {
    return Error(ErrorCode::kAuthentication,
                 fmt::format("the connecting side asks for {}, the listening side for {}: all "
                             "processes of a job need the same",
                             words_for(client.protection), words_for(listener.protection)));
  }
  protection_ = *protection;
  if (protection_ == Protection::kSealed && !make_keys()) {
    return Error(ErrorCode::kAuthentication, "its X25519 key is none");
  }
  return std::nullopt;
}

bool Handshake::make_keys() {
  std::array<std::byte, 32> shared;
  if (::crypto_scalarmult(raw(shared.data()), raw(secret_.data()), raw(peer_hello_.key.data())) !=
      0) {
    return false;
  }
  const bool server = role_ == Role::kServer;
  const SessionKeys keys = session_keys(key_, shared, encode(server ? peer_hello_ : own_),
                                        encode(server ? own_ : peer_hello_));
  wipe(shared);
  record_keys_ = server ? RecordKeys{keys.from_server, keys.from_client}
                        : RecordKeys{keys.from_client, keys.from_server};
  return true;
}

void Handshake::protect(Socket& socket) const {
  LOCKSTEP_CHECK(done());
  if (protection_ != Protection::kNone) socket.protect(std::make_unique<Records>(record_keys_));
}

Handshake::Step Handshake::refuse(ErrorCode code, std::string reason) {
  Step step = fail(code, reason);
  step.reply = frame(MessageKind::kRefusal, encode_wire_error(Error(code, std::move(reason))));
  return step;
}

Handshake::Step Handshake::fail(ErrorCode code, std::string reason) {
  state_ = State::kFailed;
  return {{}, Error(code, std::move(reason), peer_hello_.rank)};
}

std::array<std::byte, 32> Handshake::proof(Role role) const {
  const bool server = role_ == Role::kServer;
  ByteWriter transcript;
  transcript.u8(static_cast<std::uint8_t>(role));
  transcript.u16(kProtocolVersion);
  transcript.bytes(encode(server ? peer_hello_ : own_));
  transcript.bytes(encode(server ? own_ : peer_hello_));
  return keyed_hash(transcript.written(), key_);
}

const PeerIdentity& Handshake::peer() const {
  LOCKSTEP_CHECK(done());
  return peer_;
}

namespace {

// Reads exactly one message, so that what follows the handshake stays in the socket.
Message receive_message(const Socket& socket, Deadline deadline, const FailureLatch* latch) {
  std::array<std::byte, kMessageHeaderBytes> bytes;
  socket.recv_all(bytes, deadline, latch);
  const MessageHeader header = parse_header(bytes, kMaxHandshakeBody, socket.peer());
  Message message{header.kind, std::vector<std::byte>(header.length)};
  socket.recv_all(message.body, deadline, latch);
  return message;
}

// Without a token, or with one that can be guessed, who answers is known by its user alone.
PeerIdentity run(Handshake handshake, Socket& socket, const std::string& token, Deadline deadline,
                 const FailureLatch* latch) {
  const bool by_user = token.size() < kLeastToken && socket.peer_address().is_loopback();
  socket.send_all(handshake.opening(), deadline, latch);
  while (!handshake.done()) {
    Handshake::Step step;
    try {
      step = handshake.receive(receive_message(socket, deadline, latch));
      // Once, while it waits for our answer. Who refuses, or has had the last word, may have gone.
      const bool waits = !step.failure && !handshake.done();
      if (by_user && waits) require_trusted_peer(socket);
    } catch (const Error& error) {
      // Tell a peer of another version why it is turned away.
      if (error.code() == ErrorCode::kVersionMismatch) {
        socket.send_if_heard(frame(MessageKind::kRefusal, encode_wire_error(error)));
      }
      throw;
    }
    if (step.failure) {
      socket.send_if_heard(step.reply);
      throw Error(step.failure->code(),
                  fmt::format("handshake with {}: {}", socket.peer(), step.failure->message()),
                  step.failure->rank());
    }
    socket.send_all(step.reply, deadline, latch);
  }
  handshake.protect(socket);
  return handshake.peer();
}

}  // namespace

PeerIdentity client_handshake(Socket& socket, const Identity& identity, Purpose purpose,
                              std::uint32_t group, Deadline deadline, const FailureLatch* latch) {
  return run(Handshake(Handshake::Role::kClient, identity, purpose, group,
                       protection_for(socket, identity)),
             socket, identity.token, deadline, latch);
}

PeerIdentity server_handshake(Socket& socket, const Identity& identity, Purpose purpose,
                              Deadline deadline, const FailureLatch* latch) {
  return run(
      Handshake(Handshake::Role::kServer, identity, purpose, 0, protection_for(socket, identity)),
      socket, identity.token, deadline, latch);
}

}  // namespace lockstep
