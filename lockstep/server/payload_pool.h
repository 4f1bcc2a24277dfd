#pragma once

#include <array>
#include <cstddef>
#include <memory>

namespace lockstep {

// Memory for the elements of a gradient; not initialised.
struct Payload {
  std::unique_ptr<float[]> elements;
  std::size_t capacity = 0;
};

// Two payloads that serve one after the other: one is sent while the next is filled. Memory that
// has been used before has its pages.
class PayloadPool {
 public:
  // A payload that nobody else holds, with room for `count` elements, or nothing. `force`: rather
  // let one of the two go to its holders and make a new one.
  std::shared_ptr<Payload> take(std::size_t count, bool force) {
    for (auto& payload : payloads_) {
      if (!payload || payload.use_count() == 1) return fit(payload, count);
    }
    if (!force) return nullptr;
    payloads_.front() = nullptr;
    return fit(payloads_.front(), count);
  }

 private:
  static std::shared_ptr<Payload> fit(std::shared_ptr<Payload>& payload, std::size_t count) {
    if (!payload || payload->capacity < count) {
      payload = nullptr;  // before the new one is made, not after
      payload = std::make_shared<Payload>();
      payload->elements = std::make_unique_for_overwrite<float[]>(count);
      payload->capacity = count;
    }
    return payload;
  }

  std::array<std::shared_ptr<Payload>, 2> payloads_;
};

}  // namespace lockstep
