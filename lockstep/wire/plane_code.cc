#include "lockstep/wire/plane_code.h"

#include <algorithm>
#include <optional>
#include <span>
#include <utility>

#include "lockstep/base/check.h"

namespace lockstep {
namespace {

constexpr std::size_t kStreams = 4;
constexpr std::size_t kValues = 256;
// So many codes fit into the 56 bits that are read or written at once, with what is left of a byte.
constexpr std::size_t kCodesAtOnce = 5;
static_assert(7 + kCodesAtOnce * kLongestCode < 64 && kCodesAtOnce * kLongestCode <= 56);

using Counts = std::array<std::uint32_t, kValues>;
using Lengths = std::array<std::uint8_t, kValues>;  // of codes; 0: the value does not occur

std::size_t words_of_stream(std::size_t words) { return (words + kStreams - 1) / kStreams; }

// The words of each stream: [begin, end).
std::pair<std::size_t, std::size_t> stream_words(std::size_t stream, std::size_t words) {
  const std::size_t each = words_of_stream(words);
  return {std::min(stream * each, words), std::min((stream + 1) * each, words)};
}

// Four tables: values that follow each other are often alike, and would wait for each other.
Counts count_values(const std::byte* plane, std::size_t words) {
  std::array<Counts, 4> parts{};
  std::size_t i = 0;
  for (; i + 4 <= words; i += 4) {
    for (std::size_t k = 0; k < 4; ++k) {
      ++parts[k][std::to_integer<std::size_t>(plane[kPlaneWord * (i + k)])];
    }
  }
  for (; i < words; ++i) ++parts[0][std::to_integer<std::size_t>(plane[kPlaneWord * i])];
  Counts counts;
  for (std::size_t v = 0; v < kValues; ++v) {
    counts[v] = parts[0][v] + parts[1][v] + parts[2][v] + parts[3][v];
  }
  return counts;
}

// Huffman's code, with lengths cut to kLongestCode.
Lengths code_lengths(const Counts& counts) {
  struct Node {
    std::uint32_t count;
    int parent;
  };
  std::array<Node, 2 * kValues> nodes;
  std::array<std::uint8_t, kValues> values;
  std::size_t leaves = 0;
  for (std::size_t v = 0; v < kValues; ++v) {
    if (counts[v] > 0) values[leaves++] = static_cast<std::uint8_t>(v);
  }
  std::sort(values.begin(), values.begin() + static_cast<std::ptrdiff_t>(leaves),
            [&](std::uint8_t a, std::uint8_t b) {
              return std::pair(counts[a], a) < std::pair(counts[b], b);
            });
  Lengths lengths{};
  if (leaves == 1) lengths[values[0]] = 1;
  if (leaves <= 1) return lengths;
  for (std::size_t i = 0; i < leaves; ++i) nodes[i] = {counts[values[i]], -1};
  // Leaves and inner nodes are each in ascending order, so the two smallest are at their fronts.
  std::size_t leaf = 0, inner = leaves, end = leaves;
  const auto take_smallest = [&] {
    const bool take_leaf =
        leaf < leaves && (inner == end || nodes[leaf].count <= nodes[inner].count);
    return take_leaf ? leaf++ : inner++;
  };
  for (; end < 2 * leaves - 1; ++end) {
    const std::size_t a = take_smallest(), b = take_smallest();
    nodes[end] = {nodes[a].count + nodes[b].count, -1};
    nodes[a].parent = nodes[b].parent = static_cast<int>(end);
  }
  // From the root down: the depth of a node is known before those of its children.
  std::array<std::uint8_t, 2 * kValues> depths;
  depths[end - 1] = 0;
  for (std::size_t i = end - 1; i-- > 0;) {
    depths[i] = static_cast<std::uint8_t>(depths[static_cast<std::size_t>(nodes[i].parent)] + 1);
  }
  // `used`: how much of all codes of the greatest length the lengths take.
  constexpr std::uint32_t kAll = 1U << kLongestCode;
  std::uint32_t used = 0;
  for (std::size_t i = 0; i < leaves; ++i) {
    depths[i] = std::min<std::uint8_t>(depths[i], kLongestCode);
    used += kAll >> depths[i];
  }
  // The rarest values pay for those that were cut, and get back what is too much.
  for (std::size_t i = 0; used > kAll; i = (i + 1) % leaves) {
    if (depths[i] == kLongestCode) continue;
    used -= kAll >> (depths[i] + 1);
    ++depths[i];
  }
  for (std::size_t i = leaves; i-- > 0;) {
    while (depths[i] > 1 && used + (kAll >> depths[i]) <= kAll) used += kAll >> depths[i]--;
  }
  for (std::size_t i = 0; i < leaves; ++i) lengths[values[i]] = depths[i];
  return lengths;
}

// Codes are in the order of their lengths, then of their values. A stream begins at the lowest bit
// of its first byte, so the bits of a code are turned round.
struct Code {
  std::uint16_t bits;
  std::uint16_t length;
};
using Codes = std::array<Code, kValues>;

std::uint16_t turned_round(std::uint32_t code, unsigned length) {
  std::uint32_t bits = 0;
  for (unsigned i = 0; i < length; ++i) bits |= (code >> i & 1) << (length - 1 - i);
  return static_cast<std::uint16_t>(bits);
}

// Calls visit(value, code, length) for every value that has a code. False: these are no lengths of
// a code.
template <typename Visit>
bool for_each_code(const Lengths& lengths, Visit&& visit) {
  std::array<std::uint32_t, kLongestCode + 2> next{};
  for (const std::uint8_t length : lengths) {
    if (length > 0) ++next[length + 1U];
  }
  std::uint32_t code = 0;
  for (unsigned length = 1; length <= kLongestCode; ++length) {
    const std::uint32_t how_many = next[length + 1];
    next[length] = code;
    code += how_many;
    if (code > 1U << length) return false;
    code <<= 1;
  }
  for (std::size_t v = 0; v < kValues; ++v) {
    const unsigned length = lengths[v];
    if (length > 0) visit(v, turned_round(next[length]++, length), length);
  }
  return true;
}

// The values of a plane that have codes, ascending, and half a byte for the length of each.
std::byte* write_lengths(const Lengths& lengths, std::byte* to) {
  std::byte* const count_at = to++;
  std::size_t count = 0;
  for (std::size_t v = 0; v < kValues; ++v) {
    if (lengths[v] == 0) continue;
    *to++ = static_cast<std::byte>(v);
    ++count;
  }
  *count_at = static_cast<std::byte>(count - 1);
  std::size_t half = 0;
  for (const std::uint8_t length : lengths) {
    if (length == 0) continue;
    if (half++ % 2 == 0) {
      *to = static_cast<std::byte>(length);
    } else {
      *to++ |= static_cast<std::byte>(length << 4);
    }
  }
  return to + half % 2;
}

std::optional<Lengths> read_lengths(ByteReader& reader) {
  Lengths lengths{};
  const std::size_t count = std::size_t{reader.u8()} + 1;
  const auto values = reader.bytes(count);
  const auto halves = reader.bytes((count + 1) / 2);
  if (!reader.ok()) return std::nullopt;
  for (std::size_t i = 0; i < count; ++i) {
    const auto length = std::to_integer<unsigned>(halves[i / 2]) >> (4 * (i % 2)) & 0xf;
    if (length == 0 || length > kLongestCode) return std::nullopt;
    if (i > 0 && values[i] <= values[i - 1]) return std::nullopt;
    lengths[std::to_integer<std::size_t>(values[i])] = static_cast<std::uint8_t>(length);
  }
  return lengths;
}

// Spoils up to eight bytes behind the stream.
std::byte* write_stream(const std::byte* plane, std::size_t words, const Codes& codes,
                        std::byte* to) {
  std::uint64_t bits = 0;
  unsigned count = 0;
  const auto add = [&](std::size_t word) {
    const Code code = codes[std::to_integer<std::size_t>(plane[kPlaneWord * word])];
    bits |= std::uint64_t{code.bits} << count;
    count += code.length;
  };
  const auto flush = [&] {
    store_little_endian(to, bits);
    to += count / 8;
    bits >>= count & ~7U;
    count %= 8;
  };
  std::size_t i = 0;
  for (; i + kCodesAtOnce <= words; i += kCodesAtOnce) {
    for (std::size_t k = 0; k < kCodesAtOnce; ++k) add(i + k);
    flush();
  }
  for (; i < words; ++i) {
    add(i);
    flush();
  }
  return to + (count > 0 ? 1 : 0);
}

// Bits of a stream, which may be any bytes. Behind its end come zeros; exhausted() tells.
class BitReader {
 public:
  explicit BitReader(std::span<const std::byte> stream)
      : at_(stream.data()), end_(stream.data() + stream.size()) {}

  // There are 56 bits and more afterwards.
  void refill() {
    if (end_ - at_ >= 8) [[likely]] {
      bits_ |= load_little_endian<std::uint64_t>(at_) << count_;
      at_ += (63 - count_) / 8;
      count_ |= 56;
      return;
    }
    while (count_ < 56) {
      if (at_ < end_) {
        bits_ |= std::uint64_t{std::to_integer<std::uint8_t>(*at_++)} << count_;
      } else {
        behind_ += 8;
      }
      count_ += 8;
    }
  }
  std::size_t peek() const { return bits_ & ((1U << kLongestCode) - 1); }
  void drop(unsigned bits) {
    bits_ >>= bits;
    count_ -= bits;
  }
  // All bytes were read, and no more than them.
  bool exhausted() const { return at_ == end_ && count_ >= behind_ && count_ - behind_ < 8; }

 private:
  const std::byte* at_;
  const std::byte* end_;
  std::uint64_t bits_ = 0;
  unsigned count_ = 0;   // how many of them are valid
  unsigned behind_ = 0;  // bits from behind the end
};

using Table = decltype(PlaneTable::entries);
using Streams = std::array<std::span<const std::byte>, kStreams>;

// Bits that begin no code are those of the smallest value: every entry has a length.
bool fill_table(const Lengths& lengths, Table& table) {
  const auto smallest =
      std::ranges::find_if(lengths, [](std::uint8_t length) { return length > 0; });
  table.fill({static_cast<std::uint8_t>(smallest - lengths.begin()), *smallest});
  return for_each_code(lengths, [&](std::size_t v, std::uint16_t bits, unsigned length) {
    for (std::size_t i = bits; i < table.size(); i += std::size_t{1} << length) {
      table[i] = {static_cast<std::uint8_t>(v), static_cast<std::uint8_t>(length)};
    }
  });
}

bool read_streams(const Streams& streams, const Table& table, std::size_t words, std::byte* plane) {
  std::array<BitReader, kStreams> readers{BitReader(streams[0]), BitReader(streams[1]),
                                          BitReader(streams[2]), BitReader(streams[3])};
  const std::size_t each = words_of_stream(words);
  const auto read_word = [&](std::size_t stream, std::size_t i) {
    const PlaneTable::Entry entry = table[readers[stream].peek()];
    readers[stream].drop(entry.length);
    plane[kPlaneWord * (stream * each + i)] = static_cast<std::byte>(entry.value);
  };
  const auto [last_begin, last_end] = stream_words(kStreams - 1, words);
  const std::size_t in_all = last_end - last_begin;  // so many words has every stream
  std::size_t i = 0;
  for (; i + kCodesAtOnce <= in_all; i += kCodesAtOnce) {
    for (BitReader& reader : readers) reader.refill();
    for (std::size_t k = 0; k < kCodesAtOnce; ++k) {
      for (std::size_t stream = 0; stream < kStreams; ++stream) read_word(stream, i + k);
    }
  }
  for (std::size_t stream = 0; stream < kStreams; ++stream) {
    const auto [begin, end] = stream_words(stream, words);
    for (std::size_t k = i; k < end - begin; ++k) {
      readers[stream].refill();
      read_word(stream, k);
    }
  }
  return std::ranges::all_of(readers, [](const BitReader& reader) { return reader.exhausted(); });
}

}  // namespace

std::byte* write_plane(const std::byte* plane, std::size_t words, std::byte* to) {
  LOCKSTEP_CHECK(words > 0 && words <= kMostPlaneWords);
  const Lengths lengths = code_lengths(count_values(plane, words));
  Codes codes;
  LOCKSTEP_CHECK(for_each_code(lengths, [&](std::size_t v, std::uint16_t bits, unsigned length) {
    codes[v] = {bits, static_cast<std::uint16_t>(length)};
  }));
  to = write_lengths(lengths, to);
  std::byte* size_at = to;
  to += kStreams * sizeof(std::uint16_t);
  for (std::size_t stream = 0; stream < kStreams; ++stream) {
    const auto [begin, end] = stream_words(stream, words);
    std::byte* const stream_end = write_stream(plane + kPlaneWord * begin, end - begin, codes, to);
    store_little_endian(size_at, static_cast<std::uint16_t>(stream_end - to));
    size_at += sizeof(std::uint16_t);
    to = stream_end;
  }
  return to;
}

bool read_plane(ByteReader& reader, std::size_t words, PlaneTable& table, std::byte* plane) {
  const auto lengths = read_lengths(reader);
  std::array<std::uint16_t, kStreams> sizes;
  for (std::uint16_t& size : sizes) size = reader.u16();
  Streams streams;
  for (std::size_t i = 0; i < kStreams; ++i) streams[i] = reader.bytes(sizes[i]);
  return reader.ok() && lengths && fill_table(*lengths, table.entries) &&
         read_streams(streams, table.entries, words, plane);
}

}  // namespace lockstep
