#include "lockstep/comm/mpi/group.h"

#include <fmt/format.h>

#include <future>
#include <memory>

#include "lockstep/base/thread.h"

namespace lockstep {
namespace {

using namespace std::chrono_literals;

MPI_Comm create(MPI_Comm parent, const std::vector<int>& members, std::uint32_t group) {
  constexpr std::uint32_t kTags = 32768;  // as many as every MPI has
  const auto lock = mpi_lock();
  MPI_Group all = MPI_GROUP_NULL;
  MPI_Group some = MPI_GROUP_NULL;
  MPI_Comm comm = MPI_COMM_NULL;
  check_mpi(MPI_Comm_group(parent, &all), "MPI_Comm_group");
  check_mpi(MPI_Group_incl(all, static_cast<int>(members.size()), members.data(), &some),
            "MPI_Group_incl");
  check_mpi(MPI_Comm_create_group(parent, some, static_cast<int>(group % kTags), &comm),
            "MPI_Comm_create_group");
  check_mpi(MPI_Comm_set_errhandler(comm, MPI_ERRORS_RETURN), "MPI_Comm_set_errhandler");
  MPI_Group_free(&some);
  MPI_Group_free(&all);
  return comm;
}

}  // namespace

MpiGroup::MpiGroup(MpiWorld& world, MPI_Comm comm, std::vector<int> members)
    : world_(world), comm_(comm), members_(std::move(members)) {
  const auto lock = mpi_lock();
  check_mpi(MPI_Comm_rank(comm_, &rank_), "MPI_Comm_rank");
}

MpiGroup::~MpiGroup() {
  if (!world_.usable()) return;
  const auto lock = mpi_lock();
  MPI_Comm comm = comm_;
  MPI_Comm_free(&comm);
}

std::unique_ptr<MpiGroup> MpiGroup::split(const std::vector<int>& members,
                                          std::uint32_t group) const {
  // MPI can do this only in a blocking call, which a stopped member would never let return: it gets
  // a thread of its own, which is left behind in that case.
  const auto task = std::make_shared<std::packaged_task<MPI_Comm()>>(
      [parent = comm_, members, group] { return create(parent, members, group); });
  std::future<MPI_Comm> created = task->get_future();
  Thread thread;
  thread.start(
      "the thread that splits a group", [task] { (*task)(); }, [](const Error&) {});
  thread.detach();
  const Deadline deadline = Deadline::after(10 * world_.timeout());
  while (created.wait_for(1ms) != std::future_status::ready) {
    control().latch().check();
    if (deadline.expired()) {
      control().fail(
          Error(ErrorCode::kTimeout, fmt::format("split: {} waited in vain for the other {} ranks",
                                                 name_of(rank_), members.size() - 1)));
    }
  }
  try {
    std::vector<int> job_ranks;
    for (const int member : members) job_ranks.push_back(job_rank(member));
    return std::make_unique<MpiGroup>(world_, created.get(), std::move(job_ranks));
  } catch (const Error& error) {
    control().fail(error);
  }
}

}  // namespace lockstep
