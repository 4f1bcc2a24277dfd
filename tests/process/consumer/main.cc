#include <lockstep/lockstep.h>

#include <cstdio>

int main() {
  try {
    throw lockstep::Error(lockstep::ErrorCode::kPeerLost, "rank 3 is gone", 3);
  } catch (const lockstep::Error& error) {
    std::puts(error.what());
  }
}
