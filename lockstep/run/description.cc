#include "lockstep/run/description.h"

#include <utility>
#include <variant>

#include "lockstep/base/error.h"
#include "lockstep/lockstep.h"
#include "lockstep/wire/bytes.h"

namespace lockstep {
namespace {

constexpr std::uint32_t kFormat = 2;
constexpr std::uint32_t kMaxText = std::uint32_t{16} << 20;  // of each

}  // namespace

std::vector<std::byte> encode(const RunDescription& description) {
  ByteWriter writer;
  writer.u32(kFormat);
  writer.u8(description.on_device ? 1 : 0);
  writer.u8(description.page ? 1 : 0);
  for (const std::string& text : {description.options, description.out, description.data,
                                  description.run ? to_json(*description.run) : ""}) {
    writer.string(text, kMaxText);
  }
  const Tokenizer* tokenizer = description.tokenizer.get();
  writer.u8(static_cast<std::uint8_t>(tokenizer != nullptr ? tokenizer->kind()
                                                           : TokenizerKind::kUnknown));
  std::vector<TokenizerFile> files;
  if (tokenizer != nullptr) files = tokenizer->files();
  files.resize(2);
  for (const TokenizerFile& file : files) writer.string(file.bytes, kMaxText);
  return std::move(writer).take();
}

std::optional<RunDescription> decode_run_description(std::span<const std::byte> bytes) {
  ByteReader reader(bytes);
  RunDescription description;
  const std::uint32_t format = reader.u32();
  description.on_device = reader.u8() == 1;
  description.page = reader.u8() == 1;
  for (std::string* text : {&description.options, &description.out, &description.data}) {
    *text = reader.string(kMaxText);
  }
  const std::string run(reader.string(kMaxText));
  const auto kind = static_cast<TokenizerKind>(reader.u8());
  std::string model(reader.string(kMaxText));
  std::string config(reader.string(kMaxText));
  if (!reader.finished() || format != kFormat) return std::nullopt;
  if (!run.empty()) {
    const auto parsed = parse_run_state(run);
    if (!std::holds_alternative<RunState>(parsed)) return std::nullopt;
    description.run = std::get<RunState>(parsed);
  }
  description.tokenizer =
      tokenizer_of_files(kind, std::move(model), std::move(config), "the job's tokenizer");
  return description;
}

RunDescription description_of(const Job& job) {
  auto told = decode_run_description(job.description());
  if (!told) {
    throw Error(ErrorCode::kUnexpectedMessage, "the job describes itself in a way unknown here");
  }
  return *std::move(told);
}

}  // namespace lockstep
