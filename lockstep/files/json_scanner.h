#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>

namespace lockstep {

// Reads JSON from front to back and builds no tree, for files whose lists are long. Everything that
// is no JSON (RFC 8259), not what the caller asks for, or nested more than 64 deep throws
// Error{kIo} with file and byte. The text must outlive the scanner and be UTF-8. One thread.
class JsonScanner {
 public:
  // `path` is for messages, in which positions count from the beginning of `text`.
  JsonScanner(std::string path, std::string_view text);
  // One value of the same text, as skip() gave it.
  JsonScanner at(std::string_view value) const;

  // The first character of the next value: one of {["tfn-0123456789. It stays to be read.
  char kind();
  // The callbacks must read the value, all of it.
  void object(const std::function<void(const std::string& key)>& member);
  void list(const std::function<void()>& element);
  std::string text();
  std::uint64_t whole(std::uint64_t most);
  bool flag();
  // Whether the next value is null, which is then read.
  bool null();
  // Reads any value and returns its text.
  std::string_view skip();
  // Nothing but space may be left.
  void finish();

  // Where the next value begins, or in the middle of one, where reading goes on.
  std::size_t position() const { return position_; }
  [[noreturn]] void fail(const std::string& what) const { fail(position_, what); }
  [[noreturn]] void fail(std::size_t position, const std::string& what) const;

 private:
  void spaces();
  bool take(char wanted);
  void expect(char wanted);
  void word(std::string_view wanted);
  void number();
  std::uint32_t hex4();
  void nest();

  std::string path_;
  std::string_view text_;
  std::size_t position_ = 0;
  std::size_t end_;
  int depth_ = 0;
};

}  // namespace lockstep
