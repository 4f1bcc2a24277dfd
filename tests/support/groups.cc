#include "tests/support/groups.h"

#include <fmt/format.h>

#include <cstdio>
#include <cstdlib>
#include <map>
#include <stdexcept>

#include "lockstep/comm/collectives/plan_engine.h"
#include "tests/support/job_groups.h"

namespace lockstep::test {
namespace {

std::string text_of(const std::exception_ptr& thrown) {
  try {
    std::rethrow_exception(thrown);
  } catch (const std::exception& error) {
    return error.what();
  } catch (...) {
    return "something that is no exception";
  }
}

}  // namespace

std::string_view to_string(GroupMedium medium) {
  switch (medium) {
    case GroupMedium::kLocal: return "Local";
    case GroupMedium::kLocalMessages: return "LocalMessages";
    case GroupMedium::kTcp: return "Tcp";
    case GroupMedium::kTcpV6: return "TcpV6";
    case GroupMedium::kTcpSealed: return "TcpSealed";
    case GroupMedium::kTcpRails: return "TcpRails";
    case GroupMedium::kShm: return "Shm";
    case GroupMedium::kAuto: return "Auto";
  }
  return "?";
}

RankThreads::RankThreads(int world_size)
    : running_(static_cast<std::size_t>(world_size)),
      thrown_(static_cast<std::size_t>(world_size)) {
  for (int rank = 0; rank < world_size; ++rank) {
    threads_.emplace_back([this, rank] { serve(rank); });
  }
}

RankThreads::~RankThreads() {
  {
    const std::lock_guard lock(mutex_);
    closing_ = true;
  }
  changed_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

void RankThreads::serve(int rank) {
  const auto me = static_cast<std::size_t>(rank);
  std::uint64_t seen = 0;
  for (;;) {
    const Body* body = nullptr;
    {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [&] { return closing_ || turn_ != seen; });
      if (turn_ == seen) return;
      seen = turn_;
      body = body_;
    }
    std::exception_ptr thrown;
    try {
      (*body)(rank);
    } catch (...) {
      thrown = std::current_exception();
    }
    {
      const std::lock_guard lock(mutex_);
      thrown_[me] = thrown;
      if (thrown != nullptr && first_to_throw_ < 0) {
        first_to_throw_ = rank;
        if (*on_throw_) (*on_throw_)();
      }
      running_[me] = false;
      if (--left_ > 0) continue;
    }
    changed_.notify_all();
  }
}

std::vector<std::exception_ptr> RankThreads::run(const Body& body,
                                                 const std::function<void()>& on_throw) {
  std::unique_lock lock(mutex_);
  body_ = &body;
  on_throw_ = &on_throw;
  ++turn_;
  left_ = threads_.size();
  first_to_throw_ = -1;
  std::fill(running_.begin(), running_.end(), true);
  std::fill(thrown_.begin(), thrown_.end(), nullptr);
  changed_.notify_all();
  if (!changed_.wait_for(lock, kLimit, [&] { return left_ == 0; })) {
    for (std::size_t r = 0; r < running_.size(); ++r) {
      if (running_[r]) {
        std::fprintf(stderr, "rank %zu hangs\n", r);
      } else if (thrown_[r] != nullptr) {
        std::fprintf(stderr, "rank %zu threw: %s\n", r, text_of(thrown_[r]).c_str());
      }
    }
    std::abort();
  }
  return thrown_;
}

std::vector<std::unique_ptr<Transport>> make_transports(const GroupOptions& options) {
  switch (options.medium) {
    case GroupMedium::kLocal:
    case GroupMedium::kLocalMessages: {
      LocalOptions local;
      if (!options.faults.empty()) local.wrap_stream = make_faulty(options.faults);
      local.shared_memory = options.medium == GroupMedium::kLocal;
      local.hosts = options.hosts;
      return make_local_group(options.world_size, local);
    }
    default: break;
  }
  std::vector<std::unique_ptr<Transport>> transports(static_cast<std::size_t>(options.world_size));
  Rendezvous rendezvous(options);
  RankThreads threads(options.world_size);
  const auto thrown = threads.run([&](int rank) {
    transports[static_cast<std::size_t>(rank)] = rendezvous.join(options, rank);
  });
  const int first = threads.first_to_throw();
  if (first >= 0) std::rethrow_exception(thrown[static_cast<std::size_t>(first)]);
  return transports;
}

Group::Group(const GroupOptions& options) : options_(options), threads_(options.world_size) {
  for (std::unique_ptr<Transport>& transport : make_transports(options)) {
    communicators_.push_back(std::make_unique<Communicator>(
        std::make_unique<PlanEngine>(
            std::move(transport),
            PlanOptions{.segment_bytes = options.segment_bytes,
                        .rails = options.medium == GroupMedium::kTcpRails ? 3 : 0}),
        options.timeout));
  }
}

Group::~Group() = default;

void Group::run(const Body& body) {
  const auto abort_all = [this] { (*this)[0].abort("a rank of the test failed"); };
  const auto thrown = threads_.run([&](int rank) { body((*this)[rank]); }, abort_all);
  const int first = threads_.first_to_throw();
  if (first < 0) return;
  failed_ = true;
  throw std::runtime_error(fmt::format("rank {} of {} ({}): {}", first, world_size(),
                                       to_string(options_.medium),
                                       text_of(thrown[static_cast<std::size_t>(first)])));
}

std::vector<std::optional<Error>> Group::errors(const Body& body) {
  failed_ = true;
  std::vector<std::optional<Error>> errors(static_cast<std::size_t>(world_size()));
  const auto thrown = threads_.run([&](int rank) {
    try {
      body((*this)[rank]);
    } catch (const Error& error) {
      errors[static_cast<std::size_t>(rank)] = error;
    }
  });
  const int first = threads_.first_to_throw();
  if (first >= 0) std::rethrow_exception(thrown[static_cast<std::size_t>(first)]);
  return errors;
}

Group& kept_group(GroupMedium medium, int world_size) {
  static std::map<std::pair<GroupMedium, int>, std::unique_ptr<Group>> groups;
  std::unique_ptr<Group>& group = groups[{medium, world_size}];
  if (group == nullptr || group->failed()) {
    group.reset();
    GroupOptions options;
    options.medium = medium;
    options.world_size = world_size;
    options.timeout = std::chrono::seconds(6);
    group = std::make_unique<Group>(options);
  }
  return *group;
}

}  // namespace lockstep::test
