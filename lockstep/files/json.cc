#include "lockstep/files/json.h"

#include <fmt/format.h>

#include <cmath>
#include <limits>
#include <utility>

namespace lockstep {

Json parse_json(std::string_view text) {
  return Json::parse(text, nullptr, /*allow_exceptions=*/false);
}

SortedJson parse_sorted_json(std::string_view text) {
  return SortedJson::parse(text, nullptr, /*allow_exceptions=*/false);
}

std::string to_text(const Json& json, int indent) {
  // A path or a name of this host may be any bytes: that ends no run.
  return json.dump(indent, ' ', false, Json::error_handler_t::replace);
}

JsonReader::JsonReader(const Json& json) : json_(json) {
  if (!json.is_object()) fail("not a JSON object");
}

void JsonReader::fail(std::string what) {
  if (!problem_) problem_ = std::move(what);
}

const Json* JsonReader::value(const char* key) {
  const auto found = json_.is_object() ? json_.find(key) : json_.end();
  if (found == json_.end()) {
    fail(fmt::format("'{}' is missing", key));
    return nullptr;
  }
  return &*found;
}

std::string JsonReader::text(const char* key) {
  const Json* found = value(key);
  if (found == nullptr) return {};
  if (found->is_string()) return found->get<std::string>();
  fail(fmt::format("'{}' is not a text", key));
  return {};
}

std::uint64_t JsonReader::whole(const char* key, std::uint64_t most) {
  const Json* found = value(key);
  if (found == nullptr) return 0;
  if (found->is_number_unsigned() && found->get<std::uint64_t>() <= most) {
    return found->get<std::uint64_t>();
  }
  fail(fmt::format("'{}' is not a whole number in its range", key));
  return 0;
}

double JsonReader::number(const char* key) {
  const Json* found = value(key);
  if (found == nullptr) return 0;
  if (found->is_number()) return found->get<double>();
  fail(fmt::format("'{}' is not a number", key));
  return 0;
}

float JsonReader::number_f32(const char* key) {
  const double wide = number(key);
  if (std::abs(wide) <= std::numeric_limits<float>::max()) return static_cast<float>(wide);
  fail(fmt::format("'{}' is too large", key));
  return 0;
}

bool JsonReader::flag(const char* key) {
  const Json* found = value(key);
  if (found == nullptr) return false;
  if (found->is_boolean()) return found->get<bool>();
  fail(fmt::format("'{}' is neither true nor false", key));
  return false;
}

const Json& JsonReader::list(const char* key) {
  static const Json kNone = Json::array();
  const Json* found = value(key);
  if (found == nullptr) return kNone;
  if (found->is_array()) return *found;
  fail(fmt::format("'{}' is not a list", key));
  return kNone;
}

}  // namespace lockstep
