#pragma once

#include <bit>
#include <concepts>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string_view>
#include <vector>

namespace lockstep {

static_assert(std::endian::native == std::endian::little, "tensors travel as they lie in memory");

// Unaligned little-endian access for layouts with fixed offsets.
template <std::integral T>
T load_little_endian(const std::byte* from) {
  T value;
  std::memcpy(&value, from, sizeof(value));
  return value;
}
template <std::integral T>
void store_little_endian(std::byte* to, T value) {
  std::memcpy(to, &value, sizeof(value));
}

// Reads values from bytes that may be anything. Never throws, never allocates, never reads past the
// end. The first read that does not fit makes the reader fail for good: that read and every later
// one return zero or empty. So a message is read in one go, and ok() or finished() is asked at the
// end.
// Spans and string views point into the bytes given to the constructor.
class ByteReader {
 public:
  explicit ByteReader(std::span<const std::byte> bytes) : rest_(bytes) {}

  std::uint8_t u8() { return number<std::uint8_t>(); }
  std::uint16_t u16() { return number<std::uint16_t>(); }
  std::uint32_t u32() { return number<std::uint32_t>(); }
  std::uint64_t u64() { return number<std::uint64_t>(); }
  std::int32_t i32() { return number<std::int32_t>(); }
  std::int64_t i64() { return number<std::int64_t>(); }
  float f32() { return number<float>(); }
  double f64() { return number<double>(); }
  std::uint32_t u32_big_endian() { return __builtin_bswap32(u32()); }

  std::span<const std::byte> bytes(std::size_t size) {
    if (size > rest_.size()) [[unlikely]] {
      fail();
      return {};
    }
    const auto taken = rest_.first(size);
    rest_ = rest_.subspan(size);
    return taken;
  }

  // A u32 number of elements of at least `element_bytes` each that are still to be read. More than
  // `most`, or more than the bytes left can hold, is a failure: the result is safe to reserve.
  std::uint32_t count(std::size_t element_bytes, std::uint32_t most = UINT32_MAX);

  // A u32 length, at most `most`, and as many bytes.
  std::string_view string(std::uint32_t most);
  // The same for people to read: what is no UTF-8 is a failure.
  std::string_view text(std::uint32_t most);

  // For a caller that finds a value out of range: from now on the reader has failed.
  void fail() {
    ok_ = false;
    rest_ = {};
  }

  std::size_t remaining() const { return rest_.size(); }
  [[nodiscard]] bool ok() const { return ok_; }
  // All was read, and nothing is left over.
  [[nodiscard]] bool finished() const { return ok_ && rest_.empty(); }

 private:
  template <typename T>
  T number() {
    T value{};
    const auto taken = bytes(sizeof(value));
    if (!taken.empty()) std::memcpy(&value, taken.data(), sizeof(value));
    return value;
  }

  std::span<const std::byte> rest_;
  bool ok_ = true;
};

// Builds a message in memory, for ByteReader to read.
class ByteWriter {
 public:
  void u8(std::uint8_t value) { number(value); }
  void u16(std::uint16_t value) { number(value); }
  void u32(std::uint32_t value) { number(value); }
  void u64(std::uint64_t value) { number(value); }
  void i32(std::int32_t value) { number(value); }
  void i64(std::int64_t value) { number(value); }
  void f32(float value) { number(value); }
  void f64(double value) { number(value); }
  void u32_big_endian(std::uint32_t value) { number(__builtin_bswap32(value)); }

  void bytes(std::span<const std::byte> bytes);

  // The number of elements that follow. More than `most` throws Error{kMessageTooLarge}.
  void count(std::size_t count, std::uint32_t most = UINT32_MAX);

  // Longer than `most`, the maximum that the reader is given, throws Error{kMessageTooLarge}.
  void string(std::string_view text, std::uint32_t most);
  // For ByteReader::text: what is no UTF-8 becomes a question mark, and what is longer is cut
  // between two characters.
  void text(std::string_view text, std::uint32_t most);

  void reserve(std::size_t size) { bytes_.reserve(size); }
  std::span<const std::byte> written() const { return bytes_; }
  std::vector<std::byte> take() && { return std::move(bytes_); }

 private:
  template <typename T>
  void number(T value) {
    bytes(std::as_bytes(std::span(&value, 1)));
  }

  std::vector<std::byte> bytes_;
};

}  // namespace lockstep
