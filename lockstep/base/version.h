#pragma once

#include <string_view>

namespace lockstep {

// Of this library, such as "0.1.0".
std::string_view version();

}  // namespace lockstep
