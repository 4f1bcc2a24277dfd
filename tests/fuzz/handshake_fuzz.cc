// Feeds arbitrary streams to both sides of the handshake. The first byte chooses the side; nothing
// that a stranger without the token sends may complete it.
#include <cstdint>
#include <cstdlib>

#include "lockstep/base/error.h"
#include "lockstep/net/job/handshake.h"

using namespace lockstep;

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (size == 0) return 0;
  const auto role = data[0] % 2 == 0 ? Handshake::Role::kServer : Handshake::Role::kClient;
  const auto bytes = std::as_bytes(std::span(data, size)).subspan(1);

  static const Identity identity{"job", 1, {}, 0, "a token that the fuzzer does not know"};
  Handshake handshake(role, identity, Purpose::kMesh);
  MessageBuffer buffer;
  // Cut where the first byte says, so that headers and bodies arrive in pieces.
  const std::size_t cut = std::min<std::size_t>(bytes.size(), data[0]);
  try {
    for (const auto part : {bytes.first(cut), bytes.subspan(cut)}) {
      buffer.append(part);
      while (const auto message = buffer.next(kMaxHandshakeBody, "peer")) {
        if (message->kind == MessageKind::kHello) {
          const auto hello = decode_hello(message->body);
          if (hello && encode(*hello) != message->body) std::abort();
        }
        static_cast<void>(handshake.receive(*message));
        if (handshake.done()) std::abort();
      }
    }
  } catch (const Error&) {  // not our protocol
  }
  return 0;
}
