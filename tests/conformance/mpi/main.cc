// One rank of an MPI job; tests/process/mpi_conformance.py starts them. The first argument says
// what to do, the second is the job's timeout in milliseconds, the third which collectives to use.

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdio>
#include <cstdlib>
#include <random>
#include <string_view>

#include "lockstep/comm/collectives/plan_engine.h"
#include "lockstep/comm/mpi/mpi.h"
#include "tests/support/case_lists.h"

namespace lockstep::test {
namespace {

constexpr std::size_t kCases = 900;

// Some of all cases for this world size, the same on every rank.
std::vector<Case> some_cases(int world_size) {
  std::vector<Case> all;
  for (const auto make : {reduction_cases, move_cases, node_cases}) {
    const std::vector<Case> more = make(world_size, Sharing::kNone);
    std::vector<Case> some;
    std::ranges::sample(more, std::back_inserter(some), kCases / 3, std::mt19937(7));
    all.insert(all.end(), some.begin(), some.end());
  }
  return all;
}

// For MPI's own collectives: values that any order of additions sums to the same.
std::vector<Case> native_cases(int world_size) {
  std::vector<Case> cases = some_cases(world_size);
  for (Case& c : cases) {
    c.algorithm = Algorithm::kNative;
    c.small_values = true;
  }
  return cases;
}

void run_all(Communicator& comm, const std::vector<Case>& cases) {
  for (const Case& c : cases) run_case(comm, c, make_data(c));
}

// Two groups of every other rank, in reverse order.
void run_split(Communicator& comm, bool native) {
  const int rank = comm.rank();
  const std::unique_ptr<Communicator> half = comm.split(rank % 2, -rank);
  if (half->rank() != half->world_size() - 1 - rank / 2) {
    throw std::runtime_error(fmt::format("rank {} became {}", rank, half->rank()));
  }
  std::vector<Case> cases =
      native ? native_cases(half->world_size()) : some_cases(half->world_size());
  cases.resize(cases.size() / 4);
  run_all(*half, cases);
}

std::unique_ptr<Engine> make_engine(const MpiOptions& options, bool native) {
  if (native) return make_mpi_engine(options);
  return std::make_unique<PlanEngine>(make_mpi_transport(options),
                                      PlanOptions{GroupOptions{}.segment_bytes});
}

void expect(bool condition, const char* what) {
  if (!condition) throw std::runtime_error(what);
}

// What the conformance tests of the other transports do with messages between two ranks.
void run_messages(Transport& transport, std::chrono::nanoseconds timeout) {
  if (transport.rank() > 1 || transport.world_size() == 1) return;
  const int other = 1 - transport.rank();
  const auto soon = [&] { return Deadline::after(timeout); };
  std::vector<std::byte> message(kSentAhead), data(kSentAhead);
  for (std::size_t i = 0; i < message.size(); ++i) message[i] = static_cast<std::byte>(i * 7);
  const auto receive = [&] {
    std::ranges::fill(data, std::byte{0});
    transport.recv(other, data, soon());
    expect(data == message, "other bytes came");
  };
  if (transport.rank() == 0) {
    const auto in_vain = Deadline::after(std::chrono::milliseconds(20));
    expect(!transport.recv_if_begun(other, data, in_vain, soon()), "a message that nobody sent");
    transport.send(other, message, soon());
  } else {
    receive();
  }
  // Both before either reads.
  transport.send(other, message, soon());
  receive();
  if (transport.rank() == 0) {
    expect(transport.recv_if_begun(other, data, soon(), soon()), "a message did not begin");
    expect(data == message, "other bytes came");
  } else {
    transport.send(other, message, soon());
  }
}

void run_cases(const MpiOptions& options) {
  MpiOptions in_rounds = options;
  in_rounds.most_elements = 1000;
  Communicator planned(make_engine(options, false), options.timeout, /*group=*/0);
  Communicator native(make_engine(options, true), options.timeout, /*group=*/1);
  Communicator native_in_rounds(make_engine(in_rounds, true), options.timeout, /*group=*/2);
  const int n = planned.world_size();
  run_messages(*make_mpi_transport(options), options.timeout);
  run_all(planned, some_cases(n));
  run_all(native, native_cases(n));
  run_all(native_in_rounds, native_cases(n));
  run_split(planned, false);
  run_split(native, true);
  if (planned.rank() == 0) fmt::print("{}: {} ranks, all right\n", mpi_library(), n);
}

void say_inside(const Communicator& comm) {
  fmt::print("inside {} {}\n", comm.rank(), ::getpid());
  std::fflush(stdout);
}

// Collectives without end, for the runner to do harm to.
[[noreturn]] void run_for_ever(Communicator& comm) {
  std::vector<float> data(1 << 18, 1.0F);
  for (int i = 0;; ++i) {
    comm.all_reduce(std::span(data), ReduceOp::kMax);
    if (i == 10) say_inside(comm);
  }
}

// Rank 1 calls something else than the others.
void run_mismatch(Communicator& comm) {
  std::vector<float> data(100, 1.0F);
  comm.all_reduce(std::span(data), comm.rank() == 1 ? ReduceOp::kMin : ReduceOp::kMax);
}

// Rank 1 sends more than the others expect.
void run_wrong_counts(Communicator& comm) {
  const auto n = static_cast<std::size_t>(comm.world_size());
  const auto me = static_cast<std::size_t>(comm.rank());
  std::vector<std::size_t> sent(n, 3);
  const std::vector<std::size_t> received = sent;
  if (me == 1) sent[0] = 5;
  const std::vector<float> in(me == 1 ? 3 * n + 2 : 3 * n);
  std::vector<float> out(3 * n);
  comm.all_to_all(std::span(in), std::span(out), sent, received);
}

// Rank 1 lives but never comes.
void run_absent(Communicator& comm, std::chrono::nanoseconds timeout) {
  comm.barrier();
  say_inside(comm);
  while (comm.rank() == 1) ::pause();
  CallOptions options;
  options.deadline = Deadline::after(timeout);
  std::vector<float> data(100, 1.0F);
  comm.all_reduce(std::span(data), ReduceOp::kMax, options);
}

void run(std::string_view what, const MpiOptions& options, bool native) {
  if (what == "cases") return run_cases(options);
  Communicator comm(make_engine(options, native), options.timeout);
  if (what == "for_ever") run_for_ever(comm);
  if (what == "mismatch") return run_mismatch(comm);
  if (what == "wrong_counts") return run_wrong_counts(comm);
  if (what == "absent") return run_absent(comm, options.timeout);
  if (what == "exit") std::exit(comm.rank() == 1 ? 3 : (run_for_ever(comm), 0));
  // Rank 1 is stopped when the others have already reached the end of main.
  if (what == "late_exit") {
    comm.barrier();
    say_inside(comm);
    while (comm.rank() == 1) ::pause();
    return;
  }
  throw std::runtime_error(fmt::format("no such test: {}", what));
}

}  // namespace
}  // namespace lockstep::test

int main(int argc, char** argv) {
  if (argc != 4) {
    fmt::print(stderr, "usage: mpi_conformance WHAT TIMEOUT_MS planned|native\n");
    return 2;
  }
  lockstep::MpiOptions options;
  options.timeout = std::chrono::milliseconds(std::atol(argv[2]));
  try {
    lockstep::test::run(argv[1], options, std::string_view(argv[3]) == "native");
  } catch (const std::exception& error) {
    fmt::print(stderr, "failed: {}\n", error.what());
    return 1;
  }
  return 0;
}
