#include "lockstep/train/agreement.h"

#include <fmt/format.h>

#include <algorithm>
#include <cstdint>

#include "lockstep/base/error.h"
#include "lockstep/base/log.h"
#include "lockstep/files/json.h"
#include "lockstep/model/weights_hash.h"

namespace lockstep {
namespace {

std::span<const std::uint8_t> bytes_of(std::string_view text) {
  return {reinterpret_cast<const std::uint8_t*>(text.data()), text.size()};
}

std::vector<Setting> parse_settings(const std::string& text) {
  std::vector<Setting> settings;
  for (const auto& entry : parse_json(text)) {
    settings.push_back({entry[0], entry[1], entry[2]});
  }
  return settings;
}

// The first difference from rank 0, in words; empty when all agree. `warnings` gets the differences
// that are allowed.
std::string find_difference(std::span<const std::vector<Setting>> by_rank,
                            std::vector<std::string>& warnings) {
  const std::vector<Setting>& first = by_rank[0];
  for (std::size_t rank = 1; rank < by_rank.size(); ++rank) {
    const std::vector<Setting>& other = by_rank[rank];
    for (std::size_t i = 0; i < std::max(first.size(), other.size()); ++i) {
      if (i >= first.size() || i >= other.size() || first[i].name != other[i].name) {
        return fmt::format("rank {} compares other settings than rank 0: the programs differ",
                           rank);
      }
      if (first[i].value == other[i].value) continue;
      const std::string text = fmt::format("rank {} has {} {}, rank 0 has {}", rank, first[i].name,
                                           other[i].value, first[i].value);
      if (first[i].required) return text;
      warnings.push_back(text);
    }
  }
  return "";
}

// The first rank with the hash that most ranks have.
std::size_t majority(std::span<const Blake3Hash> hashes) {
  std::size_t best = 0;
  long most = 0;
  for (std::size_t i = 0; i < hashes.size(); ++i) {
    const long count = std::ranges::count(hashes, hashes[i]);
    if (count > most) {
      most = count;
      best = i;
    }
  }
  return best;
}

std::vector<Blake3Hash> gather_hashes(Communicator& communicator, std::span<const Blake3Hash> own) {
  const auto ranks = static_cast<std::size_t>(communicator.world_size());
  std::vector<Blake3Hash> all(ranks * own.size());
  const ConstBufferView in(own.data(), own.size() * sizeof(Blake3Hash), DataType::kU8);
  const BufferView out(all.data(), all.size() * sizeof(Blake3Hash), DataType::kU8);
  communicator.all_gather(in, out);
  return all;
}

}  // namespace

std::vector<std::string> gather_texts(Communicator& communicator, std::string_view own) {
  const auto ranks = static_cast<std::size_t>(communicator.world_size());
  const std::int64_t size = static_cast<std::int64_t>(own.size());
  std::vector<std::int64_t> sizes(ranks);
  communicator.all_gather(std::span(&size, 1), std::span(sizes));
  std::vector<std::size_t> counts(sizes.begin(), sizes.end());
  std::size_t total = 0;
  for (const std::size_t count : counts) total += count;
  std::vector<std::uint8_t> all(total);
  communicator.all_gather(bytes_of(own), std::span(all), counts);
  std::vector<std::string> texts;
  std::size_t begin = 0;
  for (const std::size_t count : counts) {
    texts.emplace_back(reinterpret_cast<const char*>(all.data()) + begin, count);
    begin += count;
  }
  return texts;
}

void compare_settings(Communicator& communicator, std::span<const Setting> own) {
  Json list = Json::array();
  for (const Setting& setting : own) {
    list.push_back({setting.name, setting.value, setting.required});
  }
  std::vector<std::vector<Setting>> by_rank;
  for (const std::string& text : gather_texts(communicator, to_text(list))) {
    by_rank.push_back(parse_settings(text));
  }
  std::vector<std::string> warnings;
  const std::string difference = find_difference(by_rank, warnings);
  if (!difference.empty()) {
    throw Error(ErrorCode::kInvalidArgument,
                fmt::format("{}; all workers need the same", difference));
  }
  if (communicator.rank() != 0) return;
  for (const std::string& warning : warnings) {
    log(LogLevel::kWarning, "{}: the bits of the result may differ from those on one machine",
        warning);
  }
}

void compare_replicas(Communicator& communicator, const ParameterLayout& layout,
                      std::span<const Blake3Hash> tensors, std::int64_t step) {
  const Blake3Hash own = hash_of_hashes(tensors);
  const std::vector<Blake3Hash> all = gather_hashes(communicator, {&own, 1});
  const std::size_t right = majority(all);
  const auto other =
      std::ranges::find_if(all, [&](const auto& hash) { return hash != all[right]; });
  if (other == all.end()) return;
  const auto wrong = static_cast<std::size_t>(other - all.begin());
  const std::vector<Blake3Hash> by_tensor = gather_hashes(communicator, tensors);
  std::size_t tensor = 0;
  while (tensor + 1 < tensors.size() &&
         by_tensor[wrong * tensors.size() + tensor] == by_tensor[right * tensors.size() + tensor]) {
    ++tensor;
  }
  throw Error(
      ErrorCode::kReplicaMismatch,
      fmt::format("after step {}: {} has other weights than {}; the first tensor that "
                  "differs is {}",
                  step, communicator.name_of(static_cast<int>(wrong)),
                  communicator.name_of(static_cast<int>(right)), layout.tensors()[tensor].name),
      static_cast<int>(wrong));
}

}  // namespace lockstep
