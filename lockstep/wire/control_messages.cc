#include "lockstep/wire/control_messages.h"

#include <algorithm>
#include <string_view>
#include <utility>

#include "lockstep/wire/bytes.h"
#include "lockstep/wire/wire_error.h"

namespace lockstep {
namespace {

constexpr std::size_t kMinProgressBytes = 4 + 8 + 1 + 4 + 4;
constexpr std::uint32_t kMaxSignal = 64;
constexpr std::uint32_t kMaxAddress = 255;
static_assert(kMaxGroups * (kMinProgressBytes + kMaxDescription) + kMaxErrorText + 64 <
              kMaxControlBody);

void write_progress(ByteWriter& writer, const std::vector<Progress>& progress) {
  const std::size_t count = std::min<std::size_t>(progress.size(), kMaxGroups);
  writer.count(count, kMaxGroups);
  for (const Progress& entry : std::span(progress).first(count)) {
    writer.u32(entry.group);
    writer.u64(entry.sequence);
    writer.u8(entry.inside ? 1 : 0);
    writer.text(entry.description, kMaxDescription);
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
    entry.description = reader.text(kMaxDescription);
    entry.waits_for = reader.i32();
    if (inside > 1) reader.fail();
    progress.push_back(std::move(entry));
  }
  return progress;
}

}  // namespace

std::vector<std::byte> encode(const Pulse& pulse) {
  ByteWriter writer;
  writer.u32(pulse.generation);
  write_progress(writer, pulse.progress);
  return std::move(writer).take();
}

std::optional<Pulse> decode_pulse(std::span<const std::byte> body) {
  ByteReader reader(body);
  Pulse pulse;
  pulse.generation = reader.u32();
  pulse.progress = read_progress(reader);
  if (!reader.finished()) return std::nullopt;
  return pulse;
}

std::vector<std::byte> encode(const Report& report) {
  ByteWriter writer;
  writer.u32(report.generation);
  write_error(writer, report.error);
  write_progress(writer, report.progress);
  return std::move(writer).take();
}

std::optional<Report> decode_report(std::span<const std::byte> body) {
  ByteReader reader(body);
  const std::uint32_t generation = reader.u32();
  const WireError error = read_error(reader);
  auto progress = read_progress(reader);
  if (!reader.finished()) return std::nullopt;
  return Report{error.error(), std::move(progress), generation};
}

std::vector<std::byte> encode(const GenerationEnd& end) {
  ByteWriter writer;
  writer.u32(end.generation);
  write_error(writer, end.error);
  return std::move(writer).take();
}

std::optional<GenerationEnd> decode_generation_end(std::span<const std::byte> body) {
  ByteReader reader(body);
  const std::uint32_t generation = reader.u32();
  const WireError error = read_error(reader);
  if (!reader.finished()) return std::nullopt;
  return GenerationEnd{generation, error.error()};
}

std::vector<std::byte> encode(const Wish& wish) {
  ByteWriter writer;
  writer.u32(wish.stop);
  writer.u32(wish.save);
  writer.u8(wish.regroup ? 1 : 0);
  return std::move(writer).take();
}

std::optional<Wish> decode_wish(std::span<const std::byte> body) {
  ByteReader reader(body);
  Wish wish;
  wish.stop = reader.u32();
  wish.save = reader.u32();
  const std::uint8_t regroup = reader.u8();
  wish.regroup = regroup == 1;
  if (!reader.finished() || wish.stop > kMaxSignal || wish.save > kMostSaveRequest || regroup > 1) {
    return std::nullopt;
  }
  return wish;
}

std::vector<std::byte> encode_tag(std::uint32_t generation) {
  ByteWriter writer;
  writer.u32(generation);
  return std::move(writer).take();
}

std::optional<std::uint32_t> decode_tag(std::span<const std::byte> body) {
  ByteReader reader(body);
  const std::uint32_t generation = reader.u32();
  if (!reader.finished()) return std::nullopt;
  return generation;
}

std::vector<std::byte> encode_redirect(std::string_view address) {
  ByteWriter writer;
  writer.string(address, kMaxAddress);
  return std::move(writer).take();
}

std::optional<std::string> decode_redirect(std::span<const std::byte> body) {
  ByteReader reader(body);
  std::string address(reader.text(kMaxAddress));
  if (!reader.finished()) return std::nullopt;
  return address;
}

}  // namespace lockstep
