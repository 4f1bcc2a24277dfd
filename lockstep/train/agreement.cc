#include "lockstep/train/agreement.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <mutex>
#include <optional>

#include "lockstep/base/deadline.h"
#include "lockstep/base/error.h"
#include "lockstep/base/host.h"
#include "lockstep/base/index.h"
#include "lockstep/base/log.h"
#include "lockstep/files/json.h"
#include "lockstep/model/weights_hash.h"

namespace lockstep {
namespace {

std::span<const std::uint8_t> bytes_of(std::string_view text) {
  return {reinterpret_cast<const std::uint8_t*>(text.data()), text.size()};
}

// Of what a rank tells at once.
constexpr std::int64_t kMostTextBytes = std::int64_t{16} << 20;

std::optional<std::vector<Setting>> parse_settings(const std::string& text) {
  const Json json = parse_json(text);
  if (!json.is_array()) return std::nullopt;
  std::vector<Setting> settings;
  try {
    for (const Json& entry : json) settings.push_back({entry.at(0), entry.at(1), entry.at(2)});
  } catch (const Json::exception&) {
    return std::nullopt;
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

// Others wait while a rank reads its data: half a day is a hundred terabytes from a good disk.
constexpr auto kReadingPatience = std::chrono::hours(12);

void hash_payloads_of(std::span<const TokenShard* const> shards,
                      std::chrono::seconds between_notes) {
  std::vector<const TokenShard*> unknown;
  std::uint64_t bytes = 0;
  for (const TokenShard* shard : shards) {
    if (shard->payload().known()) continue;
    unknown.push_back(shard);
    bytes += shard->payload().bytes();
  }
  std::mutex mutex;
  std::uint64_t done = 0;
  auto told = std::chrono::steady_clock::now();
  const auto progress = [&](std::uint64_t more) {
    const std::lock_guard lock(mutex);
    done += more;
    const auto now = std::chrono::steady_clock::now();
    if (now - told < between_notes) return;
    told = now;
    log(LogLevel::kInfo, "hashing the data (once only): {:.1f} of {:.1f} GB read",
        static_cast<double>(done) / 1e9, static_cast<double>(bytes) / 1e9);
  };
  for (const TokenShard* shard : unknown) shard->payload().get(progress);
}

}  // namespace

std::vector<std::string> gather_texts(Communicator& communicator, std::string_view own,
                                      const CallOptions& options) {
  const auto ranks = static_cast<std::size_t>(communicator.world_size());
  const std::int64_t size = static_cast<std::int64_t>(own.size());
  std::vector<std::int64_t> sizes(ranks);
  communicator.all_gather(std::span(&size, 1), std::span(sizes), {}, options);
  for (std::size_t rank = 0; rank < ranks; ++rank) {
    if (sizes[rank] < 0 || sizes[rank] > kMostTextBytes) {
      refuse_telling(communicator, static_cast<int>(rank),
                     fmt::format("a text of {} bytes", sizes[rank]));
    }
  }
  std::vector<std::size_t> counts(sizes.begin(), sizes.end());
  std::size_t total = 0;
  for (const std::size_t count : counts) total += count;
  std::vector<std::uint8_t> all(total);
  communicator.all_gather(bytes_of(own), std::span(all), counts, options);
  std::vector<std::string> texts;
  std::size_t begin = 0;
  for (const std::size_t count : counts) {
    texts.emplace_back(reinterpret_cast<const char*>(all.data()) + begin, count);
    begin += count;
  }
  // Who believed that would plan with a state that it does not have.
  if (texts[index_of(communicator.rank())] != own) {
    refuse_telling(communicator, communicator.rank(), "its own text, which came back changed");
  }
  return texts;
}

void hash_payloads(std::span<const TokenShard> shards, std::chrono::seconds between_notes) {
  std::vector<const TokenShard*> all;
  for (const TokenShard& shard : shards) all.push_back(&shard);
  hash_payloads_of(all, between_notes);
}

void find_payload_hashes(Communicator& communicator, std::span<const TokenShard> shards) {
  Json places = Json::array();
  for (const TokenShard& shard : shards) {
    const std::string identity = shard.payload().identity();
    places.push_back(identity.empty() ? "" : this_host().boot_id + " " + identity);
  }
  std::vector<Json> by_rank;
  for (const std::string& text : gather_texts(communicator, to_text(places))) {
    by_rank.push_back(parse_json(text));
  }
  // The first rank that sees the same file.
  const auto reader_of = [&](std::size_t shard) {
    for (std::size_t rank = 0; rank < by_rank.size(); ++rank) {
      const Json& theirs = by_rank[rank];
      const bool fits = theirs.is_array() && theirs.size() == shards.size();
      if (fits && theirs[shard] == places[shard]) return rank;
    }
    return by_rank.size();
  };
  const auto own = index_of(communicator.rank());
  std::vector<const TokenShard*> mine;
  std::vector<std::size_t> readers;
  for (std::size_t i = 0; i < shards.size(); ++i) {
    readers.push_back(places[i] == "" ? own : reader_of(i));
    if (readers[i] == own) mine.push_back(&shards[i]);
  }
  hash_payloads_of(mine, kBetweenReadingNotes);
  Json found = Json::array();
  for (std::size_t i = 0; i < shards.size(); ++i) {
    found.push_back(readers[i] == own ? to_hex(shards[i].payload().get()) : "");
  }
  const CallOptions patient = {.deadline = Deadline::after(kReadingPatience)};
  const auto told = gather_texts(communicator, to_text(found), patient);
  for (std::size_t i = 0; i < shards.size(); ++i) {
    if (readers[i] == own) continue;
    const Json theirs = parse_json(told[readers[i]]);
    const bool told_it = theirs.is_array() && i < theirs.size() && theirs[i].is_string();
    const std::string text = told_it ? theirs[i].get<std::string>() : "";
    if (const auto hash = parse_hash(text)) shards[i].payload().set(*hash);
  }
}

void refuse_telling(Communicator& communicator, int rank, std::string_view what) {
  communicator.fail(Error(
      ErrorCode::kUnexpectedMessage,
      fmt::format("{} told what makes no sense: {}", communicator.name_of(rank), what), rank));
}

void compare_settings(Communicator& communicator, std::span<const Setting> own) {
  Json list = Json::array();
  for (const Setting& setting : own) {
    list.push_back({setting.name, setting.value, setting.required});
  }
  const auto by_rank = gather_parsed(communicator, to_text(list), "its settings", parse_settings);
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
