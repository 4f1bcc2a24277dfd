// libfmt for what is linked without its shared library: distributions do not have it as an archive.
#define FMT_HEADER_ONLY
#include <fmt/format.h>

#include <cstdint>
#include <cstdio>
#include <locale>
#include <string>

namespace lockstep {
namespace {

// Inline functions are in the object file only if somebody uses them.
[[gnu::used]] std::string (*const kFormat)(fmt::string_view, fmt::format_args) = &fmt::vformat;
[[gnu::used]] void (*const kPrint)(fmt::string_view, fmt::format_args) = &fmt::vprint;
[[gnu::used]] void (*const kPrintTo)(std::FILE*, fmt::string_view, fmt::format_args) = &fmt::vprint;
[[gnu::used]] void (*const kError)(const char*) = &fmt::detail::throw_format_error;
[[gnu::used]] void (*const kAssert)(const char*, int, const char*) = &fmt::detail::assert_fail;
[[gnu::used]] bool (*const kPrintable)(std::uint32_t) = &fmt::detail::is_printable;

}  // namespace
}  // namespace lockstep

template std::locale fmt::detail::locale_ref::get<std::locale>() const;
template fmt::detail::thousands_sep_result<char> fmt::detail::thousands_sep_impl<char>(
    fmt::detail::locale_ref);
