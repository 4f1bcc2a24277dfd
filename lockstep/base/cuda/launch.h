#pragma once

namespace lockstep::cuda {

// Throws when the kernel that was just enqueued could not be.
void check_launch(const char* kernel);

// Lets a kernel have more shared memory than the 48 KiB it gets unasked.
void allow_shared(const void* kernel, unsigned bytes);

}  // namespace lockstep::cuda
