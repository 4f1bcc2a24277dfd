#pragma once

#include <gtest/gtest.h>

#include <array>
#include <future>
#include <optional>
#include <string>
#include <vector>

#include "lockstep/base/random.h"
#include "lockstep/net/job/handshake.h"
#include "lockstep/server/gradient_server.h"
#include "lockstep/server/worker_client.h"
#include "lockstep/wire/bytes.h"
#include "tests/support/ranks.h"

namespace lockstep::test {

inline ServerOptions server_options(int workers, Average average = Average::kMean) {
  ServerOptions options;
  options.workers = workers;
  options.settings.average = average;
  options.settings.total_samples = 100;
  options.settings.timeout = 20s;
  options.window = 64 * 1024;  // so that small tests reach the paths of large gradients
  return options;
}

// A server on loopback and what its workers need to find it.
struct Star {
  explicit Star(const ServerOptions& options, const std::string& token = {}, bool insecure = false)
      : door(open(token, insecure, options.settings.timeout, where)),
        server(&door->arrivals(), options) {}

  WorkerOptions worker(const std::string& node = "node") const {
    WorkerOptions options;
    options.coordinator = {where.host(), where.port()};
    options.node_id = node;
    options.timeout = 20s;
    return options;
  }

  // Runs the server and its workers, each on a thread; returns what they threw, the server last.
  template <typename Serve, typename Work>
  std::vector<std::optional<Error>> run(int workers, Serve&& serve, Work&& work) {
    return run_ranks(workers + 1, [&](int i) {
      if (i < workers) return work(i);
      try {
        server.wait_for_workers();
      } catch (...) {
        joined_.set_exception(std::current_exception());
        throw;
      }
      joined_.set_value();
      serve(server);
    });
  }

  // From then on a worker that leaves ends the job; before, another could take its place.
  void wait_until_all_are_there() const { all_are_there_.get(); }

  SocketAddress where;
  std::unique_ptr<ControlPlane> door;
  GradientServer server;

 private:
  static std::unique_ptr<ControlPlane> open(const std::string& token, bool insecure,
                                            Deadline::Clock::duration timeout,
                                            SocketAddress& where) {
    Socket listener = listen_tcp(SocketAddress::loopback_v4());
    where = listener.local_address();
    HostOptions options;
    options.token = token;
    options.timeout = timeout;
    return host_job(options,
                    {std::move(listener), {Purpose::kServer}, /*original=*/true, insecure});
  }

  std::promise<void> joined_;
  std::shared_future<void> all_are_there_ = joined_.get_future().share();
};

inline void expect_no_errors(const std::vector<std::optional<Error>>& errors) {
  for (const auto& error : errors) EXPECT_FALSE(error) << error->what();
}

inline void expect_same(const std::optional<Error>& error, const Error& other) {
  ASSERT_TRUE(error);
  EXPECT_STREQ(error->what(), other.what());
}

inline std::vector<float> gradient(int source, std::size_t count) {
  std::vector<float> values(count);
  for (std::size_t i = 0; i < count; ++i) {
    values[i] = random_f32(1, static_cast<std::uint64_t>(source), i) - 0.5F;
  }
  return values;
}

inline std::vector<float> average(std::vector<std::uint64_t> weights, std::size_t count,
                                  Average how = Average::kMean) {
  std::vector<std::vector<float>> inputs;
  std::vector<const std::byte*> pointers;
  for (std::size_t i = 0; i < weights.size(); ++i) {
    inputs.push_back(gradient(static_cast<int>(i), count));
  }
  for (auto& each : inputs) pointers.push_back(reinterpret_cast<std::byte*>(each.data()));
  std::vector<float> out(count);
  Averager averager(how, std::move(weights));
  EXPECT_FALSE(averager.run(pointers, out.data(), count));
  return out;
}

// A worker whose every byte is up to the test: the original protocol, or ours after the handshake.
struct WorkerByHand {
  WorkerByHand(const Star& star, bool ours, const std::string& token = "") {
    socket = connect_tcp(star.where, soon());
    if (ours) {
      client_handshake(socket, {"lockstep", 0, random_member_id(), -1, token}, Purpose::kServer, 0,
                       soon());
    }
    send(encode(JoinRequest{"by-hand", 0, "cpu"}));
    const auto answer = std::get<JoinAccepted>(receive());
    id = static_cast<int>(answer.worker_id);
    if (ours) {
      EXPECT_TRUE(std::holds_alternative<Welcome>(receive()));
    }
  }
  void send(std::span<const std::byte> bytes) { socket.send_all(bytes, soon()); }
  std::vector<std::byte> receive_body() {
    std::array<std::byte, 4> length;
    socket.recv_all(length, soon());
    std::vector<std::byte> body(ByteReader(length).u32_big_endian());
    socket.recv_all(body, soon());
    return body;
  }
  SmallMessage receive() {
    while (true) {
      auto message = decode_small(receive_body()).value();
      if (!std::holds_alternative<Alive>(message)) return message;
    }
  }
  // Everything until the coordinator closes.
  std::vector<SmallMessage> rest() {
    std::vector<SmallMessage> all;
    try {
      while (true) all.push_back(receive());
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kChannelClosed);
    }
    return all;
  }

  Socket socket;
  int id = -1;
};

inline BulkHead vector_head(std::uint64_t step, std::uint64_t count) {
  BulkHead head;
  head.tag = WireTag::kGradientPayload;
  head.step = step;
  head.count = count;
  return head;
}

inline constexpr std::size_t kCount = 100003;  // several windows
inline constexpr RoundKey kVector{RoundKind::kVector, 0, {}, 0};

}  // namespace lockstep::test
