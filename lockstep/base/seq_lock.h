#pragma once

#include <array>
#include <atomic>
#include <bit>
#include <cstdint>
#include <optional>
#include <type_traits>

namespace lockstep {

// A value that one thread writes often and cheaply and others read now and then.
template <typename T>
class SeqLock {
  static_assert(std::is_trivially_copyable_v<T> && sizeof(T) % sizeof(std::uint64_t) == 0);
  static constexpr std::size_t kWords = sizeof(T) / sizeof(std::uint64_t);

 public:
  void store(const T& value) {
    const auto words = std::bit_cast<std::array<std::uint64_t, kWords>>(value);
    const std::uint64_t version = version_.load(std::memory_order_relaxed);
    version_.store(version + 1, std::memory_order_relaxed);
    // Release on every word: whoever sees a new word also sees the odd version.
    for (std::size_t i = 0; i < kWords; ++i) words_[i].store(words[i], std::memory_order_release);
    version_.store(version + 2, std::memory_order_release);
  }

  T load() const {
    for (;;) {
      if (const std::optional<T> value = load_once()) return *value;
    }
  }
  // Nothing if the writer does not come to an end: it may have been stopped or killed in the
  // middle, in another process.
  std::optional<T> try_load() const {
    constexpr int kAttempts = 1000;
    for (int i = 0; i < kAttempts; ++i) {
      if (const std::optional<T> value = load_once()) return value;
    }
    return std::nullopt;
  }

 private:
  std::optional<T> load_once() const {
    std::array<std::uint64_t, kWords> words;
    const std::uint64_t before = version_.load(std::memory_order_acquire);
    for (std::size_t i = 0; i < kWords; ++i) words[i] = words_[i].load(std::memory_order_acquire);
    const std::uint64_t after = version_.load(std::memory_order_relaxed);
    if (before != after || before % 2 != 0) return std::nullopt;
    return std::bit_cast<T>(words);
  }

  std::atomic<std::uint64_t> version_{0};
  std::array<std::atomic<std::uint64_t>, kWords> words_{};
};

}  // namespace lockstep
