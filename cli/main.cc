#include <cstdio>

int main() {
  std::puts("lockstep");
  return 0;
}
