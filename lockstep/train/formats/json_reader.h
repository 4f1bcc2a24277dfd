#pragma once

#include <fmt/format.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <utility>

namespace lockstep {

using Json = nlohmann::ordered_json;

// Reads values from a JSON object that may be anything. Never throws: the first value that is
// missing or of another kind becomes the problem, and its reader returns an empty value.
class JsonReader {
 public:
  explicit JsonReader(const Json& json) : json_(json) {
    if (!json.is_object()) fail("not a JSON object");
  }

  void fail(std::string what) {
    if (!problem_) problem_ = std::move(what);
  }
  const std::optional<std::string>& problem() const { return problem_; }

  // nullptr: missing, which is a problem.
  const Json* value(const char* key) {
    const auto found = json_.is_object() ? json_.find(key) : json_.end();
    if (found == json_.end()) {
      fail(fmt::format("'{}' is missing", key));
      return nullptr;
    }
    return &*found;
  }
  std::string text(const char* key) {
    const Json* found = value(key);
    if (found == nullptr) return {};
    if (found->is_string()) return found->get<std::string>();
    fail(fmt::format("'{}' is not a text", key));
    return {};
  }
  std::uint64_t whole(const char* key, std::uint64_t most = UINT64_MAX) {
    const Json* found = value(key);
    if (found == nullptr) return 0;
    if (found->is_number_unsigned() && found->get<std::uint64_t>() <= most) {
      return found->get<std::uint64_t>();
    }
    fail(fmt::format("'{}' is not a whole number in its range", key));
    return 0;
  }
  double number(const char* key) {
    const Json* found = value(key);
    if (found == nullptr) return 0;
    if (found->is_number()) return found->get<double>();
    fail(fmt::format("'{}' is not a number", key));
    return 0;
  }
  float number_f32(const char* key) {
    const double wide = number(key);
    if (std::abs(wide) <= std::numeric_limits<float>::max()) return static_cast<float>(wide);
    fail(fmt::format("'{}' is too large", key));
    return 0;
  }
  bool flag(const char* key) {
    const Json* found = value(key);
    if (found == nullptr) return false;
    if (found->is_boolean()) return found->get<bool>();
    fail(fmt::format("'{}' is neither true nor false", key));
    return false;
  }
  const Json& list(const char* key) {
    static const Json kNone = Json::array();
    const Json* found = value(key);
    if (found == nullptr) return kNone;
    if (found->is_array()) return *found;
    fail(fmt::format("'{}' is not a list", key));
    return kNone;
  }

 private:
  const Json& json_;
  std::optional<std::string> problem_;
};

}  // namespace lockstep
