// A worker whose coordinator sends the input and closes. The worker ends with an Error, or with the
// average that it was waiting for.
#include <sys/socket.h>

#include <array>
#include <vector>

#include "lockstep/base/error.h"
#include "lockstep/net/socket/unix_socket.h"
#include "lockstep/server/worker_client.h"
#include "tests/fuzz/script.h"

using namespace lockstep;

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (size > 60'000) return 0;
  fuzz::Script script(data, size);
  const std::uint8_t how = script.byte();
  auto [near, far] = unix_socket_pair();
  std::vector<std::byte> words;
  const auto add = [&](const std::vector<std::byte>& bytes) {
    words.insert(words.end(), bytes.begin(), bytes.end());
  };
  if (how % 4 > 0) add(encode(JoinAccepted{0, 2}));
  if (how % 4 > 1) add(encode(to_welcome(ServerSettings{.total_samples = 4})));
  if (how % 4 > 2) add(encode(ShardAssignment{0, 0, 2}));
  add(script.bytes(size));
  far.send_if_heard(words);
  ::shutdown(far.fd(), SHUT_WR);
  try {
    WorkerOptions options;
    options.timeout = std::chrono::seconds(5);
    options.original = how / 4 % 2 == 1;
    WorkerClient client(std::move(near), options);
    std::array<float, 3> gradient{1, 2, 3};
    if (client.next_shard()) {
      client.send_gradient(0, gradient, 1, 1, 2);
      client.receive_averaged(0, gradient);
      if (how / 8 % 2 == 0) client.receive_averaged_block(0, 1, gradient);
    }
    if (how / 8 % 2 == 1 && client.next_shard()) {
      client.send_gradient(1, gradient, 1, 1, 2);
      client.receive_averaged(1, gradient);
    }
  } catch (const Error&) {
  }
  return 0;
}
