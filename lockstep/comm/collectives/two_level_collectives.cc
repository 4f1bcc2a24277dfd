#include "lockstep/comm/collectives/two_level_collectives.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cstring>

#include "lockstep/base/check.h"
#include "lockstep/base/error.h"
#include "lockstep/base/index.h"
#include "lockstep/base/thread.h"
#include "lockstep/comm/collectives/host_exchange.h"
#include "lockstep/comm/group_number.h"
#include "lockstep/comm/kernels/outcome.h"
#include "lockstep/comm/transport/shared_space.h"

namespace lockstep {
namespace {

constexpr std::size_t kEntryWords = sizeof(Board::Entry::data) / (sizeof(std::uint64_t));

std::uint64_t* words_of(Board::Entry& entry) {
  return reinterpret_cast<std::uint64_t*>(entry.data);
}

std::uint64_t partition_digest(const HostMap& hosts) {
  std::uint64_t digest = 0xcbf29ce484222325ULL;
  for (const int host : hosts.host_of) {
    digest = (digest ^ static_cast<std::uint64_t>(host)) * 0x100000001b3ULL;
  }
  return digest;
}

Transfer whole_transfer(int peer, Direction direction, std::byte* const& row, std::size_t bytes) {
  Transfer transfer;
  transfer.peer = peer;
  transfer.direction = direction;
  transfer.layout.rows = {&row, 1};
  transfer.layout.row_bytes = bytes;
  transfer.limit = bytes;
  return transfer;
}

}  // namespace

// A collective as reduce and gather, or one half of it, over chunks of a vector.
struct TwoLevelCollectives::Task {
  Task(const Call& call_, const MeshFrame& stamp_, CollectiveStay& stay_, HostShares shares_)
      : call(call_), stamp(stamp_), stay(stay_), shares(std::move(shares_)) {}

  const Call& call;
  const MeshFrame& stamp;
  CollectiveStay& stay;
  const HostShares shares;
  bool reduces = true;  // a broadcast too: its root brings the only leaf
  bool gathers = true;
  int from_host = -1;  // the host that has everything from the start; -1: none
  const HostInputs* inputs = nullptr;
  std::size_t element = 1;  // bytes

  // What this rank brings to the reduction, and where its result goes.
  std::vector<const std::byte*> own_partials;
  std::byte* own_out = nullptr;
  // The same of all ranks of the host, as this rank sees their memory.
  std::vector<std::vector<const std::byte*>> partials;
  std::vector<std::byte*> outs;  // whole vectors, if it gathers
};

// The group of the ranks on this host: shows them each other's memory. A rank reads and writes its
// own memory where it is; the others see that, or a copy.
class TwoLevelCollectives::Neighbours {
 public:
  Neighbours(Transport& transport, const std::vector<int>& members, std::uint32_t group)
      : members_(members),
        transport_(transport.split(members, group_number(group, 0, members.front()))),
        place_(transport_->rank()),
        space_(*shared_space_of(*transport_)),
        sync_(*transport_, space_, transport_->oversubscribed()) {}

  SharedSpace& space() { return space_; }
  Transport& transport() { return *transport_; }

  void enter() { sync_.enter(); }
  // Enters with what this rank brings, and waits until all have.
  void meet(Task& task) {
    sync_.begin(task.stamp, task.stay);
    task.stay.enter();  // takes no time beside a copy
    stage(task);
    sync_.gather_entries();
    const std::size_t bytes = task.call.total * task.element;
    for (int place = 0; place < transport_->world_size(); ++place) {
      const std::size_t partials =
          task.reduces ? task.inputs->partials_of[index_of(members_[index_of(place)])] : 0;
      std::vector<const std::byte*> shown;
      for (std::size_t i = 0; i < partials; ++i) {
        shown.push_back(place == place_ ? task.own_partials[i] : locate(place, i + 1, bytes));
      }
      task.partials.push_back(std::move(shown));
      if (!task.gathers) continue;
      task.outs.push_back(place == place_ ? task.own_out : locate(place, 0, bytes));
    }
  }
  // Waits until all are done, and takes what they have left here.
  void part(const Task& task) {
    sync_.signal(&Board::finished, ++rounds_);
    sync_.await(&Board::finished, rounds_);
    if (staged_out_ != nullptr) {
      for_others(task, [&](std::size_t at, std::size_t bytes) {
        copy_bytes(task.own_out + at, staged_out_ + at, bytes);
      });
    }
  }
  void leave() { sync_.leave(); }
  // After leave(), when the job has failed.
  void await_leaving() {
    if (space_.shares_heap()) sync_.await_leaving();
  }

 private:
  static SharedSpace* shared_space_of(Transport& transport) {
    LOCKSTEP_CHECK(transport.shared_space() != nullptr);
    return transport.shared_space();
  }

  // Calls visit(offset, bytes) for what the others of this host handle.
  template <typename Visit>
  void for_others(const Task& task, Visit visit) const {
    for (int place = 0; place < transport_->world_size(); ++place) {
      if (place == place_) continue;
      for (const Range& part : task.shares.parts(members_[index_of(place)])) {
        visit(part.begin * task.element, part.size() * task.element);
      }
    }
  }

  std::byte* copy(std::size_t index, std::size_t bytes) {
    if (copies_.size() <= index) copies_.resize(index + 1);
    if (copies_[index].bytes() < bytes) copies_[index] = space_.allocate(bytes);
    return copies_[index].data();
  }

  // Notes in the own entry where the others find this rank's memory: the result first, then the
  // partials. A result may overwrite a copied partial, as every element has one user.
  void stage(const Task& task) {
    const std::size_t bytes = task.call.total * task.element;
    std::uint64_t* const words = words_of(sync_.entry(place_));
    staged_out_ = nullptr;
    if (bytes == 0) return;
    std::size_t copied = 0;
    const auto published = [&](const std::byte* data) {
      const std::optional<std::uint64_t> shown = space_.publish(data, bytes);
      LOCKSTEP_CHECK(shown.has_value());
      return *shown;
    };
    for (std::size_t i = 0; i < task.own_partials.size(); ++i) {
      const std::byte* const partial = task.own_partials[i];
      const std::optional<std::uint64_t> shown = space_.publish(partial, bytes);
      if (shown) {
        words[i + 1] = *shown;
        continue;
      }
      std::byte* const to = copy(copied++, bytes);
      for_others(
          task, [&](std::size_t at, std::size_t size) { copy_bytes(to + at, partial + at, size); });
      words[i + 1] = published(to);
    }
    if (!task.gathers) return;
    if (const auto shown = space_.publish(task.own_out, bytes)) {
      words[0] = *shown;
    } else {
      staged_out_ = copy(0, bytes);
      words[0] = published(staged_out_);
    }
  }

  // The number is the other rank's: it need not be right.
  std::byte* locate(int place, std::size_t word, std::size_t bytes) {
    if (bytes == 0) return nullptr;
    std::byte* const data = space_.locate(place, words_of(sync_.entry(place))[word], bytes);
    if (data == nullptr) [[unlikely]] {
      sync_.fail(place, "showed memory that is not there");
    }
    return data;
  }

  const std::vector<int>& members_;  // ranks of the whole group
  const std::unique_ptr<Transport> transport_;
  const int place_;
  SharedSpace& space_;
  BoardSync sync_;
  std::uint64_t rounds_ = 0;
  std::vector<Buffer> copies_;
  std::byte* staged_out_ = nullptr;  // of the collective under way: what others write instead
};

TwoLevelCollectives::TwoLevelCollectives(Transport& transport, HostMap hosts, std::uint32_t group,
                                         std::size_t segment_bytes)
    : transport_(transport),
      hosts_(std::move(hosts)),
      rank_(transport.rank()),
      host_(hosts_.host_of[index_of(rank_)]),
      segment_bytes_(segment_bytes) {
  const std::vector<int>& members = hosts_.members[index_of(host_)];
  if (members.size() > 1) neighbours_ = std::make_unique<Neighbours>(transport, members, group);
}

TwoLevelCollectives::~TwoLevelCollectives() = default;

bool TwoLevelCollectives::supports(Collective collective) {
  switch (collective) {
    case Collective::kAllReduce:
    case Collective::kReduceScatter:
    case Collective::kAllGather:
    case Collective::kBroadcast:
    case Collective::kReduceNodes:
    case Collective::kReduceScatterNodes: return true;
    default: return false;
  }
}

bool TwoLevelCollectives::supports(const Call& call, int world_size) {
  if (!supports(call.collective)) return false;
  // No rank has more partials than there are lanes; to count them takes long.
  return call.owners.size() < kEntryWords ||
         TreeInputs::nodes(call.owners, world_size).most_partials < kEntryWords;
}

Buffer TwoLevelCollectives::allocate(std::size_t bytes) {
  return neighbours_ != nullptr ? neighbours_->space().allocate(bytes) : Buffer::heap(bytes);
}

void TwoLevelCollectives::note_waits_in(WaitNote& waits) {
  if (neighbours_ != nullptr) neighbours_->transport().note_waits_in(waits);
}

// Ranks that see other hosts would wait for each other for ever. Whoever agrees with its
// neighbours in rank order agrees with all.
void TwoLevelCollectives::agree_on_hosts(const MeshFrame& stamp, Deadline deadline) {
  const int n = transport_.world_size();
  const int behind = (rank_ + n - 1) % n;
  std::array<std::uint64_t, 2> digests{partition_digest(hosts_), 0};
  std::array<std::byte*, 2> rows{reinterpret_cast<std::byte*>(&digests[0]),
                                 reinterpret_cast<std::byte*>(&digests[1])};
  std::array transfers{
      whole_transfer((rank_ + 1) % n, Direction::kSend, rows[0], sizeof(std::uint64_t)),
      whole_transfer(behind, Direction::kRecv, rows[1], sizeof(std::uint64_t))};
  transport_.run(transfers, stamp, nullptr, deadline);
  if (digests[0] != digests[1]) {
    transport_.supervisor().fail(
        Error(ErrorCode::kCollectiveMismatch,
              fmt::format("{} and {} do not agree on which ranks share a host; all ranks need the "
                          "same transport",
                          transport_.name_of(behind), transport_.name_of(rank_)),
              transport_.job_rank(behind)));
  }
  agreed_ = true;
}

// A rank that throws may free its memory at once; those of its host that are threads must be out of
// it by then.
Outcome TwoLevelCollectives::run(const Call& call, const MeshFrame& stamp, CollectiveStay& stay) {
  if (!agreed_) agree_on_hosts(stamp, stay.enter());
  if (neighbours_ == nullptr) {
    carry_out(call, stamp, stay);
    return outcome_of(call, rank_);
  }
  neighbours_->enter();
  try {
    carry_out(call, stamp, stay);
  } catch (...) {
    neighbours_->leave();
    Supervisor& supervisor = transport_.supervisor();
    if (!supervisor.latch().tripped()) supervisor.fail_quietly(caught_error("a collective"));
    neighbours_->await_leaving();
    throw;
  }
  neighbours_->leave();
  return outcome_of(call, rank_);
}

const HostInputs& TwoLevelCollectives::inputs_for(const Call& call) {
  LeafOwners owners = call.owners;
  if (call.collective == Collective::kBroadcast) {
    owners = {call.root};
  } else if (owners.empty()) {
    owners = even_owners(hosts_.host_of.size(), hosts_.world_size());
  }
  if (owners != inputs_owners_) {
    inputs_ = HostInputs::of(owners, hosts_, host_);
    inputs_owners_ = std::move(owners);
  }
  return inputs_;
}

void TwoLevelCollectives::carry_out(const Call& call, const MeshFrame& stamp,
                                    CollectiveStay& stay) {
  // Chunks that the caller does not see are cut so that all hosts send equally much.
  const bool scatters = call.collective == Collective::kReduceScatter ||
                        call.collective == Collective::kReduceScatterNodes;
  const bool only_gathers = call.collective == Collective::kAllGather;
  Task task(call, stamp, stay,
            HostShares(hosts_, scatters || only_gathers
                                   ? chunks_of(call.counts, call.total, hosts_.world_size())
                                   : chunks_by_host(hosts_, call.total)));
  task.element = size_of(call.out.type());
  task.reduces = !only_gathers;
  task.gathers = !scatters;
  task.own_out = call.out.data();
  if (task.reduces) task.inputs = &inputs_for(call);
  if (call.collective == Collective::kBroadcast) {
    task.from_host = hosts_.host_of[index_of(call.root)];
    if (rank_ == call.root) task.own_partials = {call.out.data()};
  } else if (!call.owners.empty()) {
    for (const ConstBufferView& partial : call.partials) {
      task.own_partials.push_back(partial.data());
    }
  } else if (task.reduces) {
    task.own_partials = {call.in.data()};
  }

  if (neighbours_ != nullptr) {
    neighbours_->meet(task);
  } else {
    task.partials = {task.own_partials};
    if (task.gathers) task.outs = {task.own_out};
  }
  exchange(task);
  if (neighbours_ != nullptr) neighbours_->part(task);
}

void TwoLevelCollectives::exchange(const Task& task) {
  HostExchange exchange;
  exchange.hosts = &hosts_;
  exchange.shares = &task.shares;
  exchange.type = task.call.out.type();
  exchange.op = task.call.op;
  exchange.inputs = task.inputs;
  exchange.partials = task.partials;
  exchange.own_chunk = task.reduces ? nullptr : task.call.in.data();
  exchange.outs =
      task.gathers ? std::span<std::byte* const>(task.outs) : std::span(&task.own_out, 1);
  exchange.first_out = task.gathers ? 0 : task.shares.chunk(rank_).begin;
  exchange.gathers = task.gathers;
  exchange.from_host = task.from_host;
  exchange.root = task.call.root;
  exchange.segment_bytes = segment_bytes_;
  exchange.run(transport_, windows_, task.stamp, task.stay.enter());
}

}  // namespace lockstep
