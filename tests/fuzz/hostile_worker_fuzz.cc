// Both ends of a star over sockets: a gradient server, an honest worker that has sent all it will,
// and a worker that sends the input and closes. The first byte chooses the average, who joins, what
// a round collects and whether there are one or two. The server ends with a result or an Error.
#include <sys/socket.h>

#include <array>
#include <vector>

#include "lockstep/base/error.h"
#include "lockstep/net/socket/unix_socket.h"
#include "lockstep/server/gradient_server.h"
#include "tests/fuzz/script.h"

using namespace lockstep;

namespace {

constexpr std::size_t kMostInput = 60'000;  // fits the system's buffers

void say(const Socket& socket, std::span<const std::byte> bytes) {
  socket.send_if_heard(bytes);
  ::shutdown(socket.fd(), SHUT_WR);
}

std::vector<std::byte> honest_words(RoundKind kind, std::uint64_t steps) {
  std::vector<std::byte> all = encode(JoinRequest{"honest", 0, "cpu"});
  const auto add = [&](const std::vector<std::byte>& bytes) {
    all.insert(all.end(), bytes.begin(), bytes.end());
  };
  const std::array<float, 3> gradient{1, 2, 3};
  for (std::uint64_t step = 0; step < steps; ++step) {
    BulkHead head;
    head.step = step;
    head.count = gradient.size();
    if (kind == RoundKind::kVector) {
      add(encode(Totals{step, 1.0F, 1, 2}));
      head.tag = WireTag::kGradientPayload;
    } else {
      head.tag = WireTag::kBlockGradientPayload;
      head.num_blocks = 1;
      head.component_sizes = {1, 2};
    }
    add(encode_head(head));
    const auto elements = std::as_bytes(std::span(gradient));
    all.insert(all.end(), elements.begin(), elements.end());
    add(encode_foot(head, {1.0F, 1, 2, {}}));
  }
  return all;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (size > kMostInput) return 0;
  fuzz::Script script(data, size);
  const std::uint8_t how = script.byte();
  const RoundKind kind = how / 4 % 2 == 0 ? RoundKind::kVector : RoundKind::kBlock;
  const std::uint64_t steps = how / 8 % 2 == 0 ? 1 : 2;
  ServerOptions options;
  if (kind == RoundKind::kBlock) options.settings.mode = Mode::kBlocks;
  options.workers = 2;
  // Who closes before it has joined is forgotten, and another waited for, ten times so long.
  options.settings.timeout = std::chrono::milliseconds(2);
  options.settings.total_samples = 4;
  options.settings.largest_frame = 1 << 16;
  options.settings.average = how % 2 == 0 ? Average::kWeighted : Average::kMean;
  LocalStar star = make_local_star(options);
  say(star.ends[0], honest_words(kind, steps));
  std::vector<std::byte> words;
  if (how % 4 < 2) words = encode(JoinRequest{"hostile", 0, "cpu"});
  const auto rest = script.bytes(size);
  words.insert(words.end(), rest.begin(), rest.end());
  say(star.ends[1], words);
  try {
    star.server->wait_for_workers();
    for (std::uint64_t step = 0; step < steps; ++step) {
      star.server->send_shards(step);
      star.server->broadcast(star.server->reduce({.kind = kind, .step = step}));
    }
  } catch (const Error&) {
  }
  // Nobody is there to read what is said last.
  for (Socket& end : star.ends) end = Socket();
  return 0;
}
