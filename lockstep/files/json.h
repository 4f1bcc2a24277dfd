#pragma once

#include <concepts>
#include <cstdint>
#include <limits>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace lockstep {

// Members stand in the order in which they came; one is found by going through all of them.
using Json = nlohmann::ordered_json;
// Members are sorted by name: for objects that may have many, whose order does not matter.
using SortedJson = nlohmann::json;

// What is no JSON becomes a value that is neither an object nor a list. These are functions of
// their own because nlohmann's parser and printer take a compiler two seconds wherever they are
// named.
Json parse_json(std::string_view text);
SortedJson parse_sorted_json(std::string_view text);
// In one line, or with `indent` spaces per level; U+FFFD for bytes that are no UTF-8.
std::string to_text(const Json& json, int indent = -1);

// The whole number that `json` is, from `least` to `most`; nothing for fractions and other values.
// nlohmann's get() casts whatever number is there, which may be undefined.
template <std::integral Number>
std::optional<Number> whole(const Json& json, Number least = std::numeric_limits<Number>::min(),
                            Number most = std::numeric_limits<Number>::max()) {
  const auto fitting = [&](auto number) -> std::optional<Number> {
    if (std::cmp_less(number, least) || std::cmp_greater(number, most)) return std::nullopt;
    return static_cast<Number>(number);
  };
  if (json.is_number_unsigned()) return fitting(json.get<std::uint64_t>());
  if (json.is_number_integer()) return fitting(json.get<std::int64_t>());
  return std::nullopt;
}
// All of a list; nothing if `json` is none, or one of its elements is no such number.
template <std::integral Number>
std::optional<std::vector<Number>> wholes(const Json& json,
                                          Number least = std::numeric_limits<Number>::min(),
                                          Number most = std::numeric_limits<Number>::max()) {
  if (!json.is_array()) return std::nullopt;
  std::vector<Number> numbers;
  for (const Json& element : json) {
    const auto number = whole(element, least, most);
    if (!number) return std::nullopt;
    numbers.push_back(*number);
  }
  return numbers;
}

// Reads values from a JSON object that may be anything. Never throws: the first value that is
// missing or of another kind becomes the problem, and its reader returns an empty value. `json`
// must outlive the reader.
class JsonReader {
 public:
  explicit JsonReader(const Json& json);

  void fail(std::string what);
  const std::optional<std::string>& problem() const { return problem_; }

  // nullptr: missing, which is a problem.
  const Json* value(const char* key);
  std::string text(const char* key);
  std::uint64_t whole(const char* key, std::uint64_t most = UINT64_MAX);
  double number(const char* key);
  float number_f32(const char* key);
  bool flag(const char* key);
  const Json& list(const char* key);

 private:
  const Json& json_;
  std::optional<std::string> problem_;
};

}  // namespace lockstep
