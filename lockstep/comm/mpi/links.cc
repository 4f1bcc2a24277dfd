#include <memory>
#include <mutex>

#include "lockstep/base/index.h"
#include "lockstep/comm/mpi/stream.h"
#include "lockstep/comm/transport/mesh_transport.h"

namespace lockstep {
namespace {

class MpiLinks final : public Links {
 public:
  explicit MpiLinks(std::unique_ptr<MpiGroup> group)
      : group_(std::move(group)), streams_(static_cast<std::size_t>(group_->world_size())) {}

  Stream& to(int peer, Deadline) override {
    const std::lock_guard lock(mutex_);
    std::unique_ptr<Stream>& stream = streams_[index_of(peer)];
    if (stream == nullptr) stream = std::make_unique<MpiStream>(*group_, peer);
    return *stream;
  }
  int job_rank(int rank) const override { return group_->job_rank(rank); }
  std::string name_of(int rank) const override { return group_->name_of(rank); }
  Supervisor& supervisor() override { return group_->control(); }
  std::unique_ptr<Links> split(const std::vector<int>& members, int, std::uint32_t group) override {
    return std::make_unique<MpiLinks>(group_->split(members, group));
  }
  // MPI has its own ways within a host.
  SharedSpace* shared_space() override { return nullptr; }
  bool oversubscribed() const override { return group_->world().oversubscribed(); }
  bool spare_cores() const override { return false; }

 private:
  const std::unique_ptr<MpiGroup> group_;
  std::mutex mutex_;
  std::vector<std::unique_ptr<Stream>> streams_;  // guarded by mutex_
};

}  // namespace

std::unique_ptr<Transport> make_mpi_transport(const MpiOptions& options) {
  std::unique_ptr<MpiGroup> group = MpiWorld::join(options).group();
  const int rank = group->rank();
  const int world_size = group->world_size();
  return std::make_unique<MeshTransport>(rank, world_size, /*generation=*/0, /*group=*/0,
                                         std::make_unique<MpiLinks>(std::move(group)));
}

}  // namespace lockstep
