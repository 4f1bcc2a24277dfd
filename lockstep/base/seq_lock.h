#pragma once

#include <array>
#include <atomic>
#include <bit>
#include <cstdint>
#include <cstring>
#include <optional>
#include <type_traits>
#include <utility>

namespace lockstep {

// A value that one thread writes often and cheaply and others read now and then.
template <typename T>
class SeqLock {
  static_assert(std::is_trivially_copyable_v<T> && sizeof(T) % sizeof(std::uint64_t) == 0);
  static constexpr std::size_t kWords = sizeof(T) / sizeof(std::uint64_t);

 public:
  void store(const T& value) { store_words(value, std::make_index_sequence<kWords>()); }

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
  // Word by word, without a loop: the compiler then keeps a value that is made of words in registers.
  // It would put an array together on the stack, and read it there before the stores are through.
  template <std::size_t... kIndices>
  void store_words(const T& value, std::index_sequence<kIndices...>) {
    const std::uint64_t version = version_.load(std::memory_order_relaxed);
    version_.store(version + 1, std::memory_order_relaxed);
    // Release on every word: whoever sees a new word also sees the odd version.
    (words_[kIndices].store(word_of<kIndices>(value), std::memory_order_release), ...);
    version_.store(version + 2, std::memory_order_release);
  }
  template <std::size_t kIndex>
  static std::uint64_t word_of(const T& value) {
    std::uint64_t word;
    std::memcpy(&word, reinterpret_cast<const char*>(&value) + kIndex * sizeof word, sizeof word);
    return word;
  }

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
