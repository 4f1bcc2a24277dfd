#include "tests/support/case_lists.h"

#include <algorithm>
#include <array>
#include <random>
#include <set>

namespace lockstep::test {
namespace {

constexpr DataType kTypes[] = {DataType::kF32, DataType::kF64, DataType::kF16, DataType::kBf16,
                               DataType::kI32, DataType::kI64, DataType::kU8};
constexpr ReduceOp kOps[] = {ReduceOp::kSum, ReduceOp::kMean, ReduceOp::kMin, ReduceOp::kMax,
                             ReduceOp::kProduct};
constexpr Algorithm kAlgorithms[] = {
    Algorithm::kAuto,   Algorithm::kPair, Algorithm::kRing,   Algorithm::kHalvingDoubling,
    Algorithm::kDirect, Algorithm::kTree, Algorithm::kShared, Algorithm::kTwoLevel};
constexpr std::size_t kSmallCount = 64;
constexpr std::size_t kSegment = GroupOptions{}.segment_bytes;

// Three segments in every rank's piece and one element more.
std::size_t several_segments(int world_size, DataType type) {
  return 3 * kSegment / size_of(type) * static_cast<std::size_t>(world_size) + 1;
}

std::vector<std::size_t> counts_for(int world_size, DataType type) {
  const auto n = static_cast<std::size_t>(world_size);
  std::vector<std::size_t> counts{0,     1, n - 1,   n,
                                  n + 1, 7, 100'000, several_segments(world_size, type)};
  std::sort(counts.begin(), counts.end());
  counts.erase(std::unique(counts.begin(), counts.end()), counts.end());
  return counts;
}

// Variants of one case, by property.
class Variants {
 public:
  Variants(Case base, Sharing sharing) : list_{base}, sharing_(sharing) {}

  template <typename Values, typename Set>
  Variants& each(const Values& values, Set set) {
    std::vector<Case> more;
    for (const Case& c : list_) {
      for (const auto& value : values) {
        more.push_back(c);
        set(more.back(), value);
      }
    }
    list_ = std::move(more);
    return *this;
  }
  Variants& every_algorithm() {
    std::vector<Algorithm> algorithms;
    for (const Algorithm a : kAlgorithms) {
      if (offers(list_.front().collective, a, sharing_)) algorithms.push_back(a);
    }
    return each(algorithms, [](Case& c, Algorithm a) { c.algorithm = a; });
  }
  // Of large vectors, and unless all are asked for: the first, the last and one between.
  Variants& every_root(bool really = true) {
    const int n = list_.front().world_size;
    std::set<int> roots{0, n / 2, n - 1};
    for (int r = 0; r < n && really && list_.front().count <= kSmallCount; ++r) roots.insert(r);
    return each(roots, [](Case& c, int r) { c.root = r; });
  }
  Variants& both(bool Case::*property) {
    return each(std::array{false, true}, [=](Case& c, bool value) { c.*property = value; });
  }
  void append_to(std::vector<Case>& cases) const {
    cases.insert(cases.end(), list_.begin(), list_.end());
  }

 private:
  std::vector<Case> list_;
  Sharing sharing_;
};

// In turn, so that neither doubles the number of cases.
void vary_memory_and_thread(std::vector<Case>& cases) {
  for (std::size_t i = 0; i < cases.size(); ++i) {
    cases[i].allocated = i % 2 == 1;
    cases[i].asynchronous = i % 5 == 4;
  }
}

}  // namespace

std::vector<Case> reduction_cases(int world_size, Sharing sharing) {
  std::vector<Case> cases;
  Case c;
  c.world_size = world_size;
  for (const DataType type : kTypes) {
    c.type = type;
    for (const std::size_t count : counts_for(world_size, type)) {
      c.count = count;
      for (const ReduceOp op : kOps) {
        c.op = op;
        // Every type and every operation meets every root, but not all three.
        const bool rooted = (static_cast<int>(type) + static_cast<int>(op)) % 5 == 0;
        for (const bool small : {false, true}) {
          c.small_values = small;
          std::vector<Case> some;
          c.collective = Collective::kAllReduce;
          Variants(c, sharing).every_algorithm().append_to(some);
          c.collective = Collective::kReduceScatter;
          Variants(c, sharing).every_algorithm().both(&Case::uneven).append_to(some);
          c.collective = Collective::kReduce;
          Variants(c, sharing).every_algorithm().every_root(rooted).append_to(some);
          for (std::size_t i = 0; i < some.size(); ++i) {
            if (some[i].collective == Collective::kReduce) some[i].in_place = i % 2 == 1;
          }
          // Small values are for the order-free.
          std::erase_if(some, [&](const Case& s) {
            return small && (s.algorithm != Algorithm::kRing || !order_matters(s));
          });
          cases.insert(cases.end(), some.begin(), some.end());
        }
      }
    }
  }
  vary_memory_and_thread(cases);
  return cases;
}

std::vector<Case> move_cases(int world_size, Sharing sharing) {
  std::vector<Case> cases;
  Case c;
  c.world_size = world_size;
  for (const DataType type : kTypes) {
    c.type = type;
    for (const std::size_t count : counts_for(world_size, type)) {
      c.count = count;
      c.collective = Collective::kAllGather;
      Variants(c, sharing)
          .every_algorithm()
          .both(&Case::uneven)
          .both(&Case::in_place)
          .append_to(cases);
      c.collective = Collective::kBroadcast;
      Variants(c, sharing).every_algorithm().every_root().append_to(cases);
      for (const Collective rooted : {Collective::kGather, Collective::kScatter}) {
        c.collective = rooted;
        Variants(c, sharing).every_algorithm().every_root().both(&Case::uneven).append_to(cases);
      }
      c.collective = Collective::kAllToAll;
      Variants(c, sharing).every_algorithm().both(&Case::uneven).append_to(cases);
      c.collective = Collective::kBarrier;
      Variants(c, sharing).every_algorithm().append_to(cases);
    }
  }
  vary_memory_and_thread(cases);
  return cases;
}

std::vector<Case> node_cases(int world_size, Sharing sharing) {
  std::vector<Case> cases;
  Case c;
  c.world_size = world_size;
  const auto n = static_cast<std::uint32_t>(world_size);
  const std::set<std::uint32_t> lane_counts{n, 2 * n + 1, 5 * n + 3};
  const std::set<std::size_t> counts{0, 1, std::size_t{n}, 7, 2500};
  for (const DataType type : kTypes) {
    c.type = type;
    for (const ReduceOp op : kOps) {
      c.op = op;
      for (const std::size_t count : counts) {
        c.count = count;
        for (const std::uint32_t lanes : lane_counts) {
          c.lanes = lanes;
          c.collective = Collective::kReduceNodes;
          Variants(c, sharing)
              .every_algorithm()
              .both(&Case::scattered_lanes)
              .both(&Case::in_place)
              .append_to(cases);
          c.collective = Collective::kReduceScatterNodes;
          Variants(c, sharing)
              .every_algorithm()
              .both(&Case::scattered_lanes)
              .both(&Case::uneven)
              .append_to(cases);
        }
      }
    }
  }
  vary_memory_and_thread(cases);
  return cases;
}

namespace {

// A case as numbers, one per property; properties without meaning for its collective are 0.
using Properties = std::array<std::size_t, 13>;

Properties properties_of(const Case& c) {
  const int n = c.world_size;
  const auto count = static_cast<int>(c.count);
  const std::array small{0, 1, n - 1, n, n + 1, 7, 2000};
  const auto found = std::find(small.begin(), small.end(), count);
  const int count_kind = found != small.end() ? static_cast<int>(found - small.begin())
                         : count < 100'000    ? 7
                                              : 8;
  const int root_kind = c.root == 0 ? 0 : c.root == n - 1 ? 1 : 2;
  const int lane_kind = c.lanes == 0 ? 0 : static_cast<int>(c.lanes) / n;
  const std::array<int, 13> all{static_cast<int>(c.collective),
                                n,
                                count_kind,
                                static_cast<int>(c.type),
                                static_cast<int>(c.op),
                                static_cast<int>(c.algorithm),
                                root_kind,
                                lane_kind,
                                c.uneven,
                                c.in_place,
                                c.scattered_lanes,
                                c.allocated,
                                c.asynchronous};
  Properties properties;
  std::copy(all.begin(), all.end(), properties.begin());
  return properties;
}

// Which combinations of two properties, or of the collective and two others, are there already.
class Combinations {
 public:
  explicit Combinations(bool with_collective) : with_collective_(with_collective) {}

  int fresh(const Case& c) const {
    int number = 0;
    visit(c, [&](std::size_t combination) { number += seen_[combination] ? 0 : 1; });
    return number;
  }
  void add(const Case& c) {
    visit(c, [&](std::size_t combination) { seen_[combination] = true; });
  }

 private:
  static constexpr std::size_t kProperties = std::tuple_size_v<Properties>;
  static constexpr std::size_t kValues = 20;  // of a property, at most

  // Calls visitor(number of the combination).
  template <typename Visitor>
  void visit(const Case& c, Visitor visitor) const {
    const Properties p = properties_of(c);
    const std::size_t collective = with_collective_ ? p[0] : 0;
    for (std::size_t i = 0; i < kProperties; ++i) {
      for (std::size_t k = i + 1; k < kProperties; ++k) {
        const std::size_t where = (collective * kProperties + i) * kProperties + k;
        visitor((where * kValues + p[i]) * kValues + p[k]);
      }
    }
  }
  const bool with_collective_;
  std::vector<bool> seen_ =
      std::vector<bool>(kValues * kProperties * kProperties * kValues * kValues);
};

}  // namespace

std::vector<Case> covering_cases(Sharing sharing) {
  std::vector<Case> all;
  for (const int n : kWorldSizes) {
    for (const auto make : {reduction_cases, move_cases, node_cases}) {
      const std::vector<Case> some = make(n, sharing);
      all.insert(all.end(), some.begin(), some.end());
    }
  }
  constexpr std::size_t kGreedy = 380;
  constexpr int kCandidates = 100;
  std::mt19937 random(1);  // the same set every time
  Combinations pairs(false);
  Combinations triples(true);
  std::vector<Case> chosen;
  const auto choose = [&](const Case& c) {
    chosen.push_back(c);
    pairs.add(c);
    triples.add(c);
  };
  while (chosen.size() < kGreedy) {
    const Case* best = nullptr;
    int most = -1;
    for (int i = 0; i < kCandidates; ++i) {
      const Case& candidate = all[random() % all.size()];
      const int fresh = triples.fresh(candidate);
      if (fresh <= most) continue;
      most = fresh;
      best = &candidate;
    }
    choose(*best);
  }
  for (const Case& c : all) {
    if (pairs.fresh(c) > 0) choose(c);
  }
  std::stable_sort(chosen.begin(), chosen.end(),
                   [](const Case& a, const Case& b) { return a.world_size < b.world_size; });
  return chosen;
}

void run_cases(Group& group, std::span<const Case> cases) {
  while (!cases.empty()) {
    std::size_t alike = 1;
    while (alike < cases.size() && same_data(cases[0], cases[alike])) ++alike;
    const CaseData data = make_data(cases[0]);
    group.run([&](Communicator& comm) {
      for (const Case& c : cases.first(alike)) run_case(comm, c, data);
    });
    cases = cases.subspan(alike);
  }
}

}  // namespace lockstep::test
