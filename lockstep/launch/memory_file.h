#pragma once

#include <string>

#include "lockstep/base/descriptor.h"

namespace lockstep {

// A file in memory that holds the text and has no path: a child may inherit it, and no other
// process can open it. `name` is for /proc. No file if the text is empty. Throws Error{kIo}.
Descriptor memory_file(const std::string& name, const std::string& text);

}  // namespace lockstep
