// Both ends of a star of ranks over sockets: a gradient server with its control plane, an honest
// rank, and a rank that has joined, sends the input over its connection for data, and goes. The
// server and the honest rank end with a result or with an Error.
#include <sys/socket.h>

#include <array>
#include <future>
#include <thread>
#include <vector>

#include "lockstep/base/error.h"
#include "lockstep/server/rank_client.h"
#include "lockstep/server/server_run.h"
#include "tests/fuzz/script.h"

using namespace lockstep;

namespace {

constexpr std::size_t kMostWords = 100'000;
constexpr std::size_t kElements = 50;
// A rank that is gone is waited for a tenth of it.
constexpr std::chrono::milliseconds kTimeout{100};
// Without one, whose the other end is would be looked up for every connection.
constexpr const char* kToken = "0123456789abcdef";

JoinedJob join(const ServerRun& server, int rank) {
  JobOptions place;
  place.rank = rank;
  place.world_size = 2;
  place.master_port = server.address().port();
  place.hosted = true;
  place.listens = false;
  place.timeout = kTimeout;
  place.token = kToken;
  return join_job(place);
}

void append(std::vector<std::byte>& words, std::span<const std::byte> more) {
  words.insert(words.end(), more.begin(), more.end());
}

MeshFrame stamp_of(std::uint64_t sequence) {
  MeshFrame stamp;
  stamp.sequence = sequence;
  return stamp;
}

std::vector<std::byte> honest_sum(std::uint64_t sequence, std::uint64_t step) {
  BulkHead head;
  head.tag = WireTag::kPartialSum;
  head.step = step;
  head.lanes = 2;
  head.lane_begin = 1;
  head.lane_end = 2;
  head.call = call_digest(stamp_of(sequence));
  head.count = kElements;
  head.tail_count = 1;
  std::vector<std::byte> words;
  append(words, encode_head(head));
  const std::array<float, kElements> values{};
  append(words, std::as_bytes(std::span(values)));
  append(words, encode_foot(head, {0, 0, 0, {1.0}}));
  return words;
}

std::vector<std::byte> honest_bytes(std::uint64_t sequence) {
  BulkHead head;
  head.tag = WireTag::kBytes;
  head.from = 1;
  head.stamp = stamp_of(sequence);
  head.count = head.stamp.payload = kElements;
  std::vector<std::byte> words;
  append(words, encode_head(head));
  append(words, std::vector<std::byte>(kElements));
  append(words, encode_foot(head, {}));
  return words;
}

// Sums in odd collectives, bytes in even ones.
void work(const ServerRun& server, const JoinedJob& job, std::uint64_t calls) {
  RankClient client(HostPort{server.address().host(), server.address().port()}, job);
  std::array<float, kElements> sum{};
  std::array<std::byte, kElements> in{};
  for (std::uint64_t call = 1; call <= calls; ++call) {
    client.enter(stamp_of(call), Deadline::after(kTimeout));
    if (call % 2 == 1) {
      const LanePartial own{{0, 1}, sum, {1.0}};
      client.add_up(2, {&own, 1}, 1, sum);
    } else {
      const BytesOut out{kEveryOther, in};
      const BytesIn place{1, in};
      client.move_bytes({&out, 1}, {&place, 1});
    }
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  fuzz::Script script(data, std::min<std::size_t>(size, 4000));
  std::vector<std::byte> words;
  std::uint64_t calls = 0;
  std::uint64_t sums = 0;
  while (!script.ended() && calls < 6 && words.size() < kMostWords) {
    const std::uint8_t how = script.byte();
    ++calls;
    auto honest = calls % 2 == 1 ? honest_sum(calls, sums++) : honest_bytes(calls);
    for (int changes = how % 4; changes > 0; --changes) {
      honest[script.number(2) % honest.size()] = static_cast<std::byte>(script.byte());
    }
    switch (how / 32) {
      case 0: append(words, script.bytes(script.byte())); break;
      case 1: break;
      case 2: words.insert(words.begin(), honest.begin(), honest.end()); break;
      default: append(words, honest); break;
    }
  }
  HostOptions options;
  options.world_size = 2;
  options.timeout = kTimeout;
  options.token = kToken;
  ServerRun server(listen_tcp(SocketAddress::loopback_v4()), options);
  std::promise<void> done;  // the honest rank
  std::thread hostile([&] {
    try {
      const JoinedJob job = join(server, 1);
      Socket socket = connect_tcp(server.address(), Deadline::after(kTimeout));
      client_handshake(socket, job.identity, Purpose::kServer, 0, Deadline::after(kTimeout));
      socket.send_if_heard(words);
      ::shutdown(socket.fd(), SHUT_WR);
      done.get_future().wait();  // what it is sent fits the system's buffers
    } catch (const Error&) {
    }
  });
  try {
    const JoinedJob job = join(server, 0);
    work(server, job, calls);
  } catch (const Error&) {
  }
  done.set_value();
  hostile.join();
  server.finish(Deadline::after(kTimeout));
  return 0;
}
