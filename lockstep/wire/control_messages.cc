#include "lockstep/wire/control_messages.h"

#include <algorithm>
#include <string_view>
#include <utility>

#include "lockstep/wire/bytes.h"
#include "lockstep/wire/wire_error.h"

namespace lockstep {
namespace {

constexpr std::size_t kMinProgressBytes = 4 + 8 + 1 + 4 + 4;
static_assert(kMaxGroups * (kMinProgressBytes + kMaxDescription) + kMaxErrorText + 64 <
              kMaxControlBody);

void write_progress(ByteWriter& writer, const std::vector<Progress>& progress) {
  const std::size_t count = std::min<std::size_t>(progress.size(), kMaxGroups);
  writer.count(count, kMaxGroups);
  for (const Progress& entry : std::span(progress).first(count)) {
    writer.u32(entry.group);
    writer.u64(entry.sequence);
    writer.u8(entry.inside ? 1 : 0);
    writer.string(std::string_view(entry.description).substr(0, kMaxDescription), kMaxDescription);
    writer.i32(entry.waits_for);
  }
}

std::vector<Progress> read_progress(ByteReader& reader) {
  const std::uint32_t count = reader.count(kMinProgressBytes, kMaxGroups);
  std::vector<Progress> progress;
  progress.reserve(count);
  for (std::uint32_t i = 0; i < count && reader.ok(); ++i) {
    Progress entry;
    entry.group = reader.u32();
    entry.sequence = reader.u64();
    const std::uint8_t inside = reader.u8();
    entry.inside = inside == 1;
    entry.description = reader.string(kMaxDescription);
    entry.waits_for = reader.i32();
    if (inside > 1) reader.fail();
    progress.push_back(std::move(entry));
  }
  return progress;
}

}  // namespace

std::vector<std::byte> encode(const std::vector<Progress>& progress) {
  ByteWriter writer;
  write_progress(writer, progress);
  return std::move(writer).take();
}

std::optional<std::vector<Progress>> decode_progress(std::span<const std::byte> body) {
  ByteReader reader(body);
  auto progress = read_progress(reader);
  if (!reader.finished()) return std::nullopt;
  return progress;
}

std::vector<std::byte> encode(const Report& report) {
  ByteWriter writer;
  write_error(writer, report.error);
  write_progress(writer, report.progress);
  return std::move(writer).take();
}

std::optional<Report> decode_report(std::span<const std::byte> body) {
  ByteReader reader(body);
  const WireError error = read_error(reader);
  auto progress = read_progress(reader);
  if (!reader.finished()) return std::nullopt;
  return Report{error.error(), std::move(progress)};
}

}  // namespace lockstep
