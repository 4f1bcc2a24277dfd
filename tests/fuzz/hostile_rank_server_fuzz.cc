// A rank whose gradient server, with the other ranks behind it, sends the input and closes. The
// rank ends with an Error, or with the sums and bytes that it was waiting for.
#include <sys/socket.h>

#include <array>
#include <memory>
#include <vector>

#include "lockstep/base/error.h"
#include "lockstep/net/socket/unix_socket.h"
#include "lockstep/server/rank_client.h"
#include "tests/fuzz/script.h"

using namespace lockstep;

namespace {

constexpr std::size_t kMostWords = 60'000;  // fits the system's buffers
constexpr int kRanks = 3;
constexpr std::size_t kMostElements = 200;

JoinedJob make_job() {
  JoinedJob job;
  job.identity = {"lockstep", 0, {}, 0, ""};
  job.roster.resize(kRanks);
  for (int rank = 0; rank < kRanks; ++rank) job.roster[static_cast<std::size_t>(rank)].rank = rank;
  job.timeout = std::chrono::seconds(5);
  job.control = std::make_shared<ControlPlane>();
  return job;
}

struct Collective {
  bool adds = false;
  std::size_t count = 0;  // elements of the sum, or bytes of every other rank
  std::size_t tail = 0;
};

MeshFrame stamp_of(std::uint64_t sequence) {
  MeshFrame stamp;
  stamp.sequence = sequence;
  return stamp;
}

void append(std::vector<std::byte>& words, std::span<const std::byte> more) {
  words.insert(words.end(), more.begin(), more.end());
}

// What an honest server would say in this collective.
std::vector<std::byte> honest_words(const Collective& call, std::uint64_t sequence,
                                    std::uint64_t step) {
  std::vector<std::byte> words;
  if (call.adds) {
    BulkHead head;
    head.tag = WireTag::kRawSum;
    head.step = step;
    head.lanes = kRanks;
    head.call = call_digest(stamp_of(sequence));
    head.count = call.count;
    head.tail_count = static_cast<std::uint32_t>(call.tail);
    append(words, encode_head(head));
    const std::vector<float> sum(call.count, 1.0F);
    append(words, std::as_bytes(std::span(sum)));
    append(words, encode_foot(head, {0, 0, 0, std::vector<double>(call.tail, 2.0)}));
    return words;
  }
  for (std::uint32_t from = 1; from < kRanks; ++from) {
    BulkHead head;
    head.tag = WireTag::kBytes;
    head.from = from;
    head.stamp = stamp_of(sequence);
    head.count = head.stamp.payload = call.count;
    append(words, encode_head(head));
    append(words, std::vector<std::byte>(call.count));
    append(words, encode_foot(head, {}));
  }
  return words;
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  fuzz::Script script(data, std::min<std::size_t>(size, 4000));
  static const JoinedJob job = make_job();
  std::vector<Collective> calls;
  std::vector<std::byte> words;
  std::uint64_t step = 0;
  while (!script.ended() && calls.size() < 8 && words.size() < kMostWords) {
    const std::uint8_t how = script.byte();
    const Collective call{how % 2 == 0, script.byte() % kMostElements, how / 2 % 4u};
    calls.push_back(call);
    auto honest = honest_words(call, calls.size(), step);
    if (call.adds) ++step;
    for (int changes = how / 8 % 4; changes > 0 && !honest.empty(); --changes) {
      honest[script.number(2) % honest.size()] = static_cast<std::byte>(script.byte());
    }
    switch (how / 32) {
      case 0: append(words, script.bytes(script.byte())); break;
      case 1: break;  // nothing: what comes next is early, or of the wrong call
      case 2: words.insert(words.begin(), honest.begin(), honest.end()); break;
      default: append(words, honest); break;
    }
  }
  auto [near, far] = unix_socket_pair();
  far.send_if_heard(words);
  ::shutdown(far.fd(), SHUT_WR);
  try {
    RankClient client(std::move(near), job);
    std::vector<float> sum(kMostElements, 1.0F);
    std::array<std::array<std::byte, kMostElements>, kRanks> in{};
    for (std::size_t i = 0; i < calls.size(); ++i) {
      const Collective& call = calls[i];
      client.enter(stamp_of(i + 1), Deadline::after(std::chrono::seconds(2)));
      if (call.adds) {
        const LanePartial own{
            {0, 1}, std::span(sum).first(call.count), std::vector<double>(call.tail, 1.0)};
        client.add_up(kRanks, {&own, 1}, call.tail, std::span(sum).first(call.count));
      } else {
        const BytesOut out{kEveryOther, std::as_bytes(std::span(sum)).first(10)};
        const std::array<BytesIn, 2> places{BytesIn{1, std::span(in[1]).first(call.count)},
                                            BytesIn{2, std::span(in[2]).first(call.count)}};
        client.move_bytes({&out, 1}, places);
      }
    }
  } catch (const Error&) {
  }
  return 0;
}
