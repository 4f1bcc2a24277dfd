#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>

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
// In one line, or with `indent` spaces per level.
std::string to_text(const Json& json, int indent = -1);

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
