// Inputs and results of cases.

#include <algorithm>
#include <array>
#include <cstring>

#include "tests/support/collective_case.h"
#include "tests/support/kernel_reference.h"

namespace lockstep::test {
namespace {

// Cheap and good enough to make every element different.
class Generator {
 public:
  explicit Generator(std::uint64_t seed) : state_(seed * 0x9e3779b97f4a7c15ULL + 1) {}
  std::uint64_t next() {
    state_ += 0x9e3779b97f4a7c15ULL;
    std::uint64_t z = state_;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ULL;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebULL;
    return z ^ (z >> 31);
  }

 private:
  std::uint64_t state_;
};

struct FloatFormat {
  int exponent_bits;
  int mantissa_bits;
};

FloatFormat format_of(DataType type) {
  switch (type) {
    case DataType::kF64: return {11, 52};
    case DataType::kF16: return {5, 10};
    case DataType::kBf16: return {8, 7};
    default: return {8, 23};
  }
}

bool is_float(DataType type) {
  return type == DataType::kF32 || type == DataType::kF64 || type == DataType::kF16 ||
         type == DataType::kBf16;
}

std::uint64_t special_bits(FloatFormat f, std::uint64_t choice) {
  const std::uint64_t sign = std::uint64_t{1} << (f.exponent_bits + f.mantissa_bits);
  const std::uint64_t infinity = ((std::uint64_t{1} << f.exponent_bits) - 1) << f.mantissa_bits;
  const std::uint64_t quiet = infinity | std::uint64_t{1} << (f.mantissa_bits - 1);
  switch (choice % 12) {
    case 0: return quiet;
    case 1: return sign | quiet | 5;  // a NaN with sign and payload
    case 2: return infinity;
    case 3: return sign | infinity;
    case 4: return 0;
    case 5: return sign;
    case 6: return 1;  // the smallest denormal
    case 7: return sign | 3;
    case 8: return (std::uint64_t{1} << f.mantissa_bits) - 1;  // the largest denormal
    case 9: return infinity - 1;                               // the largest finite value
    case 10: return sign | (infinity - 1);
    default: return std::uint64_t{1} << f.mantissa_bits;  // the smallest normal
  }
}

// Around one, so that sums round but rarely overflow; one in 32 is special.
std::uint64_t arbitrary_bits(FloatFormat f, std::uint64_t random) {
  if (random % 32 == 0) return special_bits(f, random >> 8);
  const std::uint64_t bias = (std::uint64_t{1} << (f.exponent_bits - 1)) - 1;
  const std::uint64_t exponent = bias - 5 + (random >> 8) % 9;
  const std::uint64_t mantissa = (random >> 12) & ((std::uint64_t{1} << f.mantissa_bits) - 1);
  const std::uint64_t sign = (random >> 5) & 1;
  return sign << (f.exponent_bits + f.mantissa_bits) | exponent << f.mantissa_bits | mantissa;
}

// Sums of small integers and products of small powers of two are exact.
double small_value(ReduceOp op, std::uint64_t random) {
  if (op == ReduceOp::kProduct) return std::array{1.0, -1.0, 2.0}[random % 3];
  return static_cast<double>(random % 7) - 3;
}

void store(DataType type, std::byte* to, std::uint64_t bits) {
  std::memcpy(to, &bits, size_of(type));  // little-endian
}

void store_number(DataType type, std::byte* to, double value) {
  reference::with_type(type, [&](auto load, auto store_value) {
    store_value(to, static_cast<decltype(load(to))>(static_cast<std::int64_t>(value)));
  });
}

std::vector<std::byte> make_leaf(const Case& c, std::size_t count, std::uint64_t leaf) {
  const std::size_t element = size_of(c.type);
  std::vector<std::byte> bytes(count * element);
  Generator random(leaf * 1000003 + count);
  for (std::size_t i = 0; i < count; ++i) {
    std::byte* const to = bytes.data() + i * element;
    const std::uint64_t bits = random.next();
    if (c.small_values) {
      store_number(c.type, to, small_value(c.op, bits));
    } else {
      store(c.type, to, is_float(c.type) ? arbitrary_bits(format_of(c.type), bits) : bits);
    }
  }
  return bytes;
}

}  // namespace

std::vector<std::byte> reduce_leaves(const Case& c,
                                     std::span<const std::vector<std::byte>> leaves) {
  if (leaves.size() == 1) return leaves[0];
  std::size_t cut = 1;
  while (2 * cut < leaves.size()) cut *= 2;
  std::vector<std::byte> left = reduce_leaves(c, leaves.first(cut));
  const std::vector<std::byte> right = reduce_leaves(c, leaves.subspan(cut));
  reference::combine(c.op, c.type, left.data(), left.data(), right.data(),
                     left.size() / size_of(c.type));
  return left;
}

std::size_t equal_share(std::size_t count, int world_size) {
  return count <= 64 ? count : count / static_cast<std::size_t>(world_size);
}

bool same_data(const Case& a, const Case& b) {
  const bool moves = !reduces(a.collective);
  return reduces(a.collective) == reduces(b.collective) && a.world_size == b.world_size &&
         a.count == b.count && a.type == b.type && (moves || a.op == b.op) && a.lanes == b.lanes &&
         a.small_values == b.small_values;
}

CaseData make_data(const Case& c) {
  CaseData data;
  const auto n = static_cast<std::size_t>(c.world_size);
  const std::size_t leaves = over_nodes(c.collective) ? c.lanes : n;
  // Moved data is cut from the first leaf, or from every rank's own.
  const std::size_t count =
      reduces(c.collective) ? c.count : std::max(c.count, equal_share(c.count, c.world_size) * n);
  for (std::size_t leaf = 0; leaf < leaves; ++leaf)
    data.leaves.push_back(make_leaf(c, count, leaf));
  if (!reduces(c.collective)) return data;
  data.result = reduce_leaves(c, data.leaves);
  if (c.op == ReduceOp::kMean && leaves > 1) {
    reference::finish_mean(c.type, data.result.data(), static_cast<int>(leaves),
                           data.result.size() / size_of(c.type));
  }
  return data;
}

}  // namespace lockstep::test
