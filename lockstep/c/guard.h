#pragma once

#include <cstddef>
#include <exception>
#include <new>
#include <string>

#include "lockstep/base/error.h"
#include "lockstep/c.h"

namespace lockstep::c {

// The code of the C interface for an error of ours, and back.
int code_of(ErrorCode code);
ErrorCode error_code_of(int code);

// Remembers what went wrong, for lockstep_last_error() on this thread; returns its code.
int remember(int code, int rank, const char* text);

// Runs the body of a function of the interface: no exception leaves it.
template <typename Body>
int guarded(Body&& body) noexcept {
  try {
    return body();
  } catch (const Error& error) {
    return remember(code_of(error.code()), error.rank(), error.what());
  } catch (const std::bad_alloc&) {
    return remember(LOCKSTEP_INTERNAL, -1, "out of memory");
  } catch (const std::exception& error) {
    return remember(LOCKSTEP_INTERNAL, -1, error.what());
  } catch (...) {
    return remember(LOCKSTEP_INTERNAL, -1, "an exception of an unknown kind");
  }
}

// Throws Error{kInvalidArgument} unless `pointer` is given.
void require(const void* pointer, const char* what);
[[noreturn]] void refuse(const std::string& why);

inline const char* or_empty(const char* text) { return text == nullptr ? "" : text; }

// Copies what the caller's version of a structure has of ours; the rest stays zero. Both begin with
// `size`. Fields of a later version are refused unless they are zero: they ask for what we do not
// know.
template <typename Struct>
Struct known_part(const Struct* given, const char* what);
// Writes as much of `value` as the caller's version has.
template <typename Struct>
void write_known_part(Struct* place, Struct value, const char* what);

void copy_known(const void* given, std::size_t given_size, void* ours, std::size_t ours_size,
                const char* what);
void refuse_unknown(const void* given, std::size_t given_size, std::size_t ours_size,
                    const char* what);

template <typename Struct>
Struct known_part(const Struct* given, const char* what) {
  Struct ours{};
  if (given == nullptr) return ours;
  refuse_unknown(given, given->size, sizeof ours, what);
  copy_known(given, given->size, &ours, sizeof ours, what);
  return ours;
}

template <typename Struct>
void write_known_part(Struct* place, Struct value, const char* what) {
  require(place, what);
  value.size = place->size;
  copy_known(&value, sizeof value, place, place->size, what);
}

}  // namespace lockstep::c
