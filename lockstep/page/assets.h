#pragma once

#include <string_view>

// The files of lockstep/page that a browser reads, as cmake/embed.cmake puts them into the program.
namespace lockstep::assets {

extern const std::string_view kPageHtml;
extern const std::string_view kPageCss;
extern const std::string_view kPlotsJson;
extern const std::string_view kPlotsJs;
extern const std::string_view kPageJs;

}  // namespace lockstep::assets
