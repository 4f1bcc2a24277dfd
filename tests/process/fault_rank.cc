// One rank of a job for the fault tests: repeats a collective, checks every result, and goes wrong
// where it is told to. Says on stdout what happens, one JSON object a line; times are those of the
// monotonic clock, in seconds.

#include <fmt/format.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <csignal>
#include <fstream>
#include <iostream>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>

#include "lockstep/base/hash/blake3.h"
#include "lockstep/base/random.h"
#include "lockstep/comm/collectives/plan_engine.h"
#include "lockstep/comm/transport/mesh.h"
#include "lockstep/launch/rank_environment.h"
#include "tests/support/collective_case.h"
#include "tests/support/fault_transport.h"

namespace lockstep::test {
namespace {

using Json = nlohmann::ordered_json;

struct Options {
  Case test_case;
  Medium medium = Medium::kTcp;
  WireCompression compression = WireCompression::kAuto;
  double timeout = 2;
  double call_time = 0;
  std::string token_file;
  std::string interface;
  std::uint64_t iterations = std::numeric_limits<std::uint64_t>::max();
  std::uint64_t hold_at = 0;
  std::uint64_t fault_at = 0;
  std::optional<FaultPoint> point;  // none: before the iteration
  std::string fault;
  std::string fake;
  std::uint64_t odd_at = 0;
  bool split = false;
};

double now() {
  return std::chrono::duration<double>(Deadline::Clock::now().time_since_epoch()).count();
}

void say(const char* event, Json fields = Json::object()) {
  Json line = {{"event", event}, {"at", now()}};
  line.update(fields);
  fmt::print("{}\n", line.dump());
  std::fflush(stdout);
}

[[noreturn]] void stay_forever() {
  for (;;) ::pause();
}

std::uint16_t port_of(const sockaddr_storage& address) {
  return SocketAddress(reinterpret_cast<const sockaddr*>(&address), sizeof(address)).port();
}

// The TCP connections of the mesh: all but those to the rendezvous.
std::vector<int> mesh_connections(std::uint16_t rendezvous_port) {
  std::vector<int> found;
  for (int fd = 3; fd < 1024; ++fd) {
    sockaddr_storage near{};
    sockaddr_storage far{};
    socklen_t near_size = sizeof(near);
    socklen_t far_size = sizeof(far);
    if (::getsockname(fd, reinterpret_cast<sockaddr*>(&near), &near_size) != 0 ||
        ::getpeername(fd, reinterpret_cast<sockaddr*>(&far), &far_size) != 0 ||
        (far.ss_family != AF_INET && far.ss_family != AF_INET6) ||
        port_of(near) == rendezvous_port || port_of(far) == rendezvous_port) {
      continue;
    }
    found.push_back(fd);
  }
  return found;
}

int count_rings() {
  std::ifstream maps("/proc/self/maps");
  int rings = 0;
  for (std::string line; std::getline(maps, line);) {
    if (line.find("memfd:lockstep-rings") != std::string::npos) ++rings;
  }
  return rings;
}

// Goes wrong; comes back only from "reset_and_go_on". "hang" lives on and does nothing.
void do_fault(const std::string& fault, std::uint16_t rendezvous_port) {
  say("fault");
  if (fault == "kill") ::raise(SIGKILL);
  if (fault == "stop") ::raise(SIGSTOP);
  for (const int fd : mesh_connections(rendezvous_port)) {
    if (fault == "half_frame") {
      ::shutdown(fd, SHUT_WR);
    } else if (fault.starts_with("reset")) {
      const sockaddr nowhere{AF_UNSPEC, {}};
      ::connect(fd, &nowhere, sizeof(nowhere));  // sends a reset
    }
  }
  if (fault != "reset_and_go_on") stay_forever();
}

// A member of the job whose connections carry no collective.
[[noreturn]] void be_fake(const JoinedJob& job, const std::string& how, Deadline deadline) {
  MeshFrame frame;
  frame.kind = static_cast<std::uint8_t>(Collective::kBroadcast);
  frame.sequence = 77;
  MeshFrameBytes bytes = encode(frame);
  std::span<const std::byte> sent = bytes;
  if (how == "garbage") bytes.fill(std::byte{0x5a});
  if (how == "half_header") sent = sent.first(kMeshFrameBytes / 2);
  std::vector<Socket> sockets;
  for (int peer = 0; peer < job.rank(); ++peer) {
    const auto index = static_cast<std::size_t>(peer);
    sockets.push_back(connect_tcp(*SocketAddress::parse(job.roster[index].mesh_address), deadline));
    client_handshake(sockets.back(), job.identity, Purpose::kMesh, 0, deadline);
  }
  say("fault");
  for (const Socket& socket : sockets) socket.send_all(sent, deadline);
  if (how == "half_header") sockets.clear();
  stay_forever();
}

// An all-reduce whose bits depend on the order of its additions.
std::string result_hash(Communicator& communicator) {
  constexpr std::size_t kCount = 300'001;
  std::vector<float> data(kCount);
  for (std::size_t i = 0; i < kCount; ++i) {
    data[i] = random_f32(1, static_cast<std::uint64_t>(communicator.rank()), i);
  }
  communicator.all_reduce(std::span(data), ReduceOp::kSum);
  return to_hex(blake3(std::as_bytes(std::span(data))));
}

void hold() {
  say("held");
  std::string line;
  std::getline(std::cin, line);
}

void run(const Options& options) {
  const auto environment = rank_environment();
  if (!environment) throw Error(ErrorCode::kInvalidArgument, "RANK is not set");
  JobOptions where;
  where.rank = environment->rank;
  where.world_size = environment->world_size;
  where.master_host = environment->master_host;
  where.master_port = environment->master_port;
  where.interface = options.interface;
  where.timeout =
      std::chrono::round<std::chrono::nanoseconds>(std::chrono::duration<double>(options.timeout));
  if (!options.token_file.empty()) where.token = read_token_file(options.token_file);
  std::optional<Socket> listener;
  if (environment->listener) listener.emplace(Descriptor(*environment->listener), "rendezvous");
  JoinedJob job = join_job(where, std::move(listener));
  Json addresses = Json::array();
  for (const Card& card : job.roster) addresses.push_back(card.mesh_address);
  say("joined", {{"mesh", addresses}});
  if (!options.fake.empty()) be_fake(job, options.fake, Deadline::after(where.timeout));

  auto mesh = std::make_unique<FaultTransport>(
      make_mesh(std::move(job), options.medium, where.timeout, options.compression),
      options.point.value_or(FaultPoint::kHalfway),
      [&] { do_fault(options.fault, where.master_port); });
  FaultTransport& faults = *mesh;
  Communicator world(std::make_unique<PlanEngine>(std::move(mesh)), where.timeout);
  std::unique_ptr<Communicator> part;
  if (options.split) part = world.split(where.rank == 0 ? 1 : 0, 0);
  Communicator& communicator = part ? *part : world;

  Case test_case = options.test_case;
  test_case.world_size = communicator.world_size();
  if (options.call_time > 0) {
    test_case.time = std::chrono::round<std::chrono::nanoseconds>(
        std::chrono::duration<double>(options.call_time));
  }
  const CaseData data = make_data(test_case);
  for (std::uint64_t k = 1; k <= options.iterations; ++k) {
    if (k == options.hold_at) hold();
    if (k == options.fault_at) {
      if (options.point) {
        faults.arm();
      } else {
        do_fault(options.fault, where.master_port);
      }
    }
    if (k == options.odd_at) {
      Case odd = test_case;
      odd.count += 1;
      run_case(communicator, odd, make_data(odd));
    }
    run_case(communicator, test_case, data);
    if (k <= 3 || k == options.iterations) say("iteration", {{"k", k}});
  }
  const std::string hash = result_hash(communicator);
  say("done", {{"hash", hash},
               {"tcp_peers", mesh_connections(where.master_port).size()},
               {"ring_peers", count_rings()}});
  world.barrier();  // nobody leaves while another still counts
}

// An option whose values are the names of an enum's.
template <typename Enum, typename Target>
void add_choice(CLI::App& app, const std::string& flag, Target& chosen,
                const std::map<std::string, Enum>& names) {
  app.add_option_function<std::string>(
         flag, [&chosen, names](const std::string& name) { chosen = names.at(name); })
      ->check(CLI::IsMember(names));
}

int main_of(int argc, char** argv) {
  Options options;
  options.test_case.count = 500'003;
  CLI::App app("One rank of a fault test.");
  std::map<std::string, Collective> collectives;
  for (int i = 1; i <= static_cast<int>(Collective::kReduceScatterNodes); ++i) {
    collectives.emplace(to_string(static_cast<Collective>(i)), static_cast<Collective>(i));
  }
  Case& c = options.test_case;
  add_choice(app, "--collective", c.collective, collectives);
  app.add_option("--count", c.count);
  app.add_option("--root", c.root);
  app.add_flag("--allocated", c.allocated);
  add_choice<Medium>(app, "--transport", options.medium,
                     {{"tcp", Medium::kTcp}, {"shm", Medium::kShared}, {"auto", Medium::kAuto}});
  add_choice<WireCompression>(app, "--wire-compress", options.compression,
                              {{"auto", WireCompression::kAuto},
                               {"on", WireCompression::kOn},
                               {"off", WireCompression::kOff}});
  app.add_option("--timeout", options.timeout);
  app.add_option("--call-time", options.call_time);
  app.add_option("--token-file", options.token_file);
  app.add_option("--interface", options.interface);
  app.add_option("--iterations", options.iterations);
  app.add_option("--hold-at", options.hold_at, "Say \"held\" and wait for a line on stdin");
  app.add_option("--fault", options.fault)
      ->check(CLI::IsMember({"kill", "stop", "hang", "reset", "reset_and_go_on", "half_frame"}));
  app.add_option("--at", options.fault_at, "In which iteration");
  add_choice<FaultPoint>(app, "--point", options.point,
                         {{"halfway", FaultPoint::kHalfway},
                          {"located", FaultPoint::kLocated},
                          {"waiting", FaultPoint::kWaiting}});
  app.add_option("--fake", options.fake)
      ->check(CLI::IsMember({"half_header", "garbage", "wrong_frame"}));
  app.add_option("--odd-at", options.odd_at, "Call with one element more");
  app.add_flag("--split", options.split, "Use the group of all ranks but 0");
  CLI11_PARSE(app, argc, argv);
  if (over_nodes(c.collective)) c.lanes = 11;

  try {
    run(options);
    return 0;
  } catch (const Error& error) {
    say("error", {{"error_code", to_string(error.code())},
                  {"blamed_rank", error.rank()},
                  {"message", error.what()}});
  } catch (const std::exception& error) {
    say("error", {{"error_code", "wrong result"}, {"blamed_rank", -1}, {"message", error.what()}});
  }
  return 1;
}

}  // namespace
}  // namespace lockstep::test

int main(int argc, char** argv) { return lockstep::test::main_of(argc, argv); }
