#pragma once

#include <chrono>
#include <condition_variable>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string_view>
#include <thread>
#include <vector>

#include "lockstep/comm/communicator.h"
#include "lockstep/comm/transport/local_group.h"
#include "lockstep/comm/transport/transport.h"
#include "tests/support/faulty_stream.h"

namespace lockstep::test {

// What joins the ranks of a test, which are threads of this process on every medium.
enum class GroupMedium { kLocal, kLocalMessages, kTcp, kTcpV6, kTcpSealed, kTcpRails, kShm, kAuto };
std::string_view to_string(GroupMedium medium);  // "Local", "LocalMessages", ...

struct GroupOptions {
  GroupMedium medium = GroupMedium::kLocal;
  int world_size = 1;
  std::size_t segment_bytes = 4096;  // small, so that small tests reach the paths of large messages
  std::chrono::nanoseconds timeout = std::chrono::seconds(30);  // of the job and its calls
  std::vector<LocalFaults> faults;                              // kLocal and kLocalMessages only
  // The host that each rank pretends to be on; kLocal and kAuto only. Empty: all are on one.
  std::vector<int> hosts = {};
};

// Over real loopback sockets where the medium has any; port 0 everywhere.
std::vector<std::unique_ptr<Transport>> make_transports(const GroupOptions& options);

// One thread per rank, kept between runs.
class RankThreads {
 public:
  explicit RankThreads(int world_size);
  ~RankThreads();
  RankThreads(const RankThreads&) = delete;
  RankThreads& operator=(const RankThreads&) = delete;

  using Body = std::function<void(int rank)>;
  // Calls body(rank) on all threads and returns what each threw. `on_throw` is called after the
  // first one has. A body that takes longer than kLimit ends the process with its rank named.
  std::vector<std::exception_ptr> run(const Body& body, const std::function<void()>& on_throw = {});
  // The rank whose body threw first in the last run, or -1.
  int first_to_throw() const { return first_to_throw_; }

  static constexpr std::chrono::seconds kLimit{90};

 private:
  void serve(int rank);

  std::mutex mutex_;
  std::condition_variable changed_;
  const Body* body_ = nullptr;  // guarded by mutex_
  const std::function<void()>* on_throw_ = nullptr;
  std::uint64_t turn_ = 0;                  // guarded by mutex_
  bool closing_ = false;                    // guarded by mutex_
  std::vector<bool> running_;               // guarded by mutex_
  std::size_t left_ = 0;                    // guarded by mutex_: how many still run
  std::vector<std::exception_ptr> thrown_;  // guarded by mutex_
  int first_to_throw_ = -1;                 // guarded by mutex_
  std::vector<std::thread> threads_;
};

// Communicators of a group, each on its own thread.
class Group {
 public:
  explicit Group(const GroupOptions& options);
  ~Group();

  const GroupOptions& options() const { return options_; }
  int world_size() const { return options_.world_size; }
  Communicator& operator[](int rank) { return *communicators_[static_cast<std::size_t>(rank)]; }
  // A test may destroy one of the communicators.
  void destroy(int rank) { communicators_[static_cast<std::size_t>(rank)].reset(); }
  bool failed() const { return failed_; }

  using Body = std::function<void(Communicator&)>;
  // Runs the same on all ranks. The first failure aborts the group and is thrown as a
  // std::runtime_error that names the rank.
  void run(const Body& body);
  // Where failure is expected: the Error of every rank, nothing for those that succeeded.
  std::vector<std::optional<Error>> errors(const Body& body);

 private:
  const GroupOptions options_;
  RankThreads threads_;
  std::vector<std::unique_ptr<Communicator>> communicators_;
  bool failed_ = false;
};

// The group of this medium and size, made on first use and kept; a new one after a failure.
Group& kept_group(GroupMedium medium, int world_size);

}  // namespace lockstep::test
