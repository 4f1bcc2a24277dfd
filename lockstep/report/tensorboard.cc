#include "lockstep/report/tensorboard.h"

#include <fmt/format.h>
#include <unistd.h>

#include <bit>
#include <utility>
#include <vector>

#include "lockstep/base/error.h"
#include "lockstep/base/hash/crc32c.h"
#include "lockstep/base/host.h"
#include "lockstep/train/run_checkpoints.h"

namespace lockstep {
namespace {

constexpr std::chrono::seconds kBetweenPhases{1};

// Fields of the messages that are used here, as tensorboard/compat/proto numbers them.
enum EventField : std::uint32_t {
  kWallTime = 1,
  kStep = 2,
  kFileVersion = 3,
  kSummary = 5,
  kSessionLog = 7
};
enum ValueField : std::uint32_t { kTag = 1, kSimpleValue = 2, kTensor = 8, kMetadata = 9 };
enum TensorField : std::uint32_t { kDataType = 1, kShape = 2, kStringValue = 8 };
constexpr std::uint32_t kSummaryValue = 1;
constexpr std::uint32_t kSessionStatus = 1;
constexpr std::uint32_t kPluginData = 1;
constexpr std::uint32_t kPluginName = 1;
constexpr std::uint32_t kDataClass = 4;
constexpr std::uint32_t kDimension = 2;
constexpr std::uint32_t kDimensionSize = 1;
constexpr std::uint64_t kStatusStart = 1;
constexpr std::uint64_t kStringType = 7;
constexpr std::uint64_t kTensorClass = 2;

// A message of protocol buffers, field by field.
class ProtoWriter {
 public:
  void varint(std::uint32_t field, std::uint64_t value) {
    key(field, 0);
    raw_varint(value);
  }
  void fixed64(std::uint32_t field, double value) {
    key(field, 1);
    raw_bytes(&value, sizeof value);
  }
  void fixed32(std::uint32_t field, float value) {
    key(field, 5);
    raw_bytes(&value, sizeof value);
  }
  void bytes(std::uint32_t field, std::string_view value) {
    key(field, 2);
    raw_varint(value.size());
    text_ += value;
  }
  const std::string& text() const { return text_; }

 private:
  void key(std::uint32_t field, std::uint32_t wire_type) { raw_varint(field << 3 | wire_type); }
  void raw_varint(std::uint64_t value) {
    for (; value >= 0x80; value >>= 7) text_ += static_cast<char>(value | 0x80);
    text_ += static_cast<char>(value);
  }
  void raw_bytes(const void* value, std::size_t size) {
    static_assert(std::endian::native == std::endian::little);
    text_.append(static_cast<const char*>(value), size);
  }

  std::string text_;
};

std::uint32_t masked_crc(std::string_view bytes) {
  const std::uint32_t crc = crc32c(std::as_bytes(std::span(bytes)));
  return std::rotr(crc, 15) + 0xa282ead8U;
}

template <typename Number>
std::string_view bytes_of(const Number& number) {
  return {reinterpret_cast<const char*>(&number), sizeof number};
}

double unix_time() {
  return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
}

ProtoWriter event_at(double time, std::int64_t step) {
  ProtoWriter event;
  event.fixed64(kWallTime, time);
  event.varint(kStep, static_cast<std::uint64_t>(step));
  return event;
}

}  // namespace

std::string tfevents_record(std::string_view data) {
  const std::uint64_t size = data.size();
  std::string record(bytes_of(size));
  record += bytes_of(masked_crc(bytes_of(size)));
  record += data;
  record += bytes_of(masked_crc(data));
  return record;
}

std::string scalars_event(double time, std::int64_t step, std::span<const ScalarValue> values) {
  ProtoWriter summary;
  for (const ScalarValue& each : values) {
    ProtoWriter value;
    value.bytes(kTag, each.tag);
    value.fixed32(kSimpleValue, static_cast<float>(each.value));
    summary.bytes(kSummaryValue, value.text());
  }
  ProtoWriter event = event_at(time, step);
  event.bytes(kSummary, summary.text());
  return event.text();
}

std::string text_event(double time, std::int64_t step, std::string_view tag,
                       std::string_view text) {
  ProtoWriter plugin;
  plugin.bytes(kPluginName, "text");
  ProtoWriter metadata;
  metadata.bytes(kPluginData, plugin.text());
  metadata.varint(kDataClass, kTensorClass);
  ProtoWriter dimension;
  dimension.varint(kDimensionSize, 1);
  ProtoWriter shape;
  shape.bytes(kDimension, dimension.text());
  ProtoWriter tensor;
  tensor.varint(kDataType, kStringType);
  tensor.bytes(kShape, shape.text());
  tensor.bytes(kStringValue, text);
  ProtoWriter value;
  value.bytes(kTag, tag);
  value.bytes(kTensor, tensor.text());
  value.bytes(kMetadata, metadata.text());
  ProtoWriter summary;
  summary.bytes(kSummaryValue, value.text());
  ProtoWriter event = event_at(time, step);
  event.bytes(kSummary, summary.text());
  return event.text();
}

TensorBoardFile::TensorBoardFile(const std::string& out, std::int64_t steps_done, WriteGuard guard,
                                 Storage& storage)
    : guard_(std::move(guard)), last_step_(steps_done) {
  const std::string path = out + "/" + kTensorBoardFolder;
  guard_.require(path);
  make_folder(out, storage);
  const auto folder = own_folder(*storage.open_folder(out), kTensorBoardFolder);
  ProtoWriter version;
  version.fixed64(kWallTime, unix_time());
  version.bytes(kFileVersion, "brain.Event:2");
  ProtoWriter session;
  session.varint(kSessionStatus, kStatusStart);
  ProtoWriter begin = event_at(unix_time(), steps_done + 1);
  begin.bytes(kSessionLog, session.text());
  // TensorBoard reads files in the order of their names.
  const std::string name = fmt::format("events.out.tfevents.{:017.6f}.{}.{}", unix_time(),
                                       this_host().hostname, ::getpid());
  file_ = folder->open(name, Folder::Mode::kAppend);
  try {
    write(tfevents_record(version.text()) + tfevents_record(begin.text()));
  } catch (const Error&) {
    folder->remove(name);
    throw;
  }
}

void TensorBoardFile::add(const StepReport& report) {
  if (report.step <= last_step_) return;
  std::vector<ScalarValue> values = {
      {"loss/train", report.loss},
      {"optimizer/gradient_norm", report.gradient_norm},
      {"optimizer/learning_rate", report.learning_rate},
      {"speed/step_seconds", report.seconds},
  };
  if (report.seconds > 0) {
    values.push_back(
        {"speed/tokens_per_second", static_cast<double>(report.tokens) / report.seconds});
  }
  if (report.validation_loss) values.push_back({"loss/validation", *report.validation_loss});
  if (report.validation_accuracy) {
    values.push_back({"accuracy/validation", *report.validation_accuracy});
  }
  const auto now = std::chrono::steady_clock::now();
  if (!told_phases_ || now - *told_phases_ >= kBetweenPhases) {
    told_phases_ = now;
    for (std::size_t rank = 0; rank < report.phases.size(); ++rank) {
      for (std::size_t i = 0; i < kPhases; ++i) {
        values.push_back({fmt::format("phases/rank_{}/{}", rank, to_string(static_cast<Phase>(i))),
                          report.phases[rank].all()[i]});
      }
    }
  }
  write(tfevents_record(scalars_event(unix_time(), report.step, values)));
  last_step_ = report.step;
}

void TensorBoardFile::add_text(std::string_view tag, std::string_view text, std::int64_t step) {
  write(tfevents_record(text_event(unix_time(), step, tag, text)));
}

void TensorBoardFile::write(const std::string& record) {
  guard_.require(file_->path());
  append_whole(*file_, record);
}

}  // namespace lockstep
