#pragma once

#include <cstddef>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "lockstep/comm/engine.h"

namespace lockstep::test {

// Carries out collectives as another engine does, but what this rank brings may be changed before.
class LyingEngine final : public Engine {
 public:
  // Gets the bytes that the rank brings to a call; of a sum over lanes, those of its first partial.
  using Lie = std::function<void(const Call& call, std::span<std::byte> brought)>;

  LyingEngine(std::unique_ptr<Engine> engine, Lie lie)
      : engine_(std::move(engine)), lie_(std::move(lie)) {}

  int rank() const override { return engine_->rank(); }
  int world_size() const override { return engine_->world_size(); }
  std::string name_of(int rank) const override { return engine_->name_of(rank); }
  Supervisor& supervisor() override { return engine_->supervisor(); }
  Algorithm choose(const Call& call) const override { return engine_->choose(call); }
  Outcome run(const Call& call, const MeshFrame& stamp, CollectiveStay& stay) override {
    const auto writable = [](const ConstBufferView& view) {
      return std::span(const_cast<std::byte*>(view.data()), view.bytes());
    };
    if (!call.partials.empty()) {
      lie_(call, writable(call.partials[0]));
      return engine_->run(call, stamp, stay);
    }
    // In place, or of a caller who keeps it to itself.
    if (call.in.data() == call.out.data()) {
      lie_(call, writable(call.in));
      return engine_->run(call, stamp, stay);
    }
    const std::span<const std::byte> own = writable(call.in);
    std::vector<std::byte> brought(own.begin(), own.end());
    lie_(call, brought);
    Call told = call;
    told.in = ConstBufferView(brought.data(), call.in.count(), call.in.type());
    return engine_->run(told, stamp, stay);
  }
  std::unique_ptr<Engine> split(const std::vector<int>& members, std::uint32_t group) override {
    return engine_->split(members, group);
  }
  Buffer allocate(std::size_t bytes) override { return engine_->allocate(bytes); }

 private:
  const std::unique_ptr<Engine> engine_;
  const Lie lie_;
};

}  // namespace lockstep::test
