#!/usr/bin/env bash
# clang-format and clang-tidy on what changed since BASE (a commit), the working tree included.
# usage: scripts/lint.sh [BASE]
set -euo pipefail
cd "$(dirname "$0")/.."
base=$(git merge-base "${1:-main}" HEAD)
mapfile -t changed < <({ git diff --name-only --diff-filter=d "$base"; git ls-files --others --exclude-standard; } |
  grep -E '\.(cc|h)$' | sort -u)
if [ ${#changed[@]} = 0 ]; then
  echo "lint: no C++ file changed since $base"
  exit 0
fi
clang-format --dry-run -Werror "${changed[@]}"

# Each file by itself. Headers are seen through the files that include them.
cmake --preset clang -B build/lint -DLOCKSTEP_UNITY=OFF -DCMAKE_DISABLE_PRECOMPILE_HEADERS=ON >/dev/null
mapfile -t sources < <(printf '%s\n' "${changed[@]}" | grep '\.cc$' | while read -r file; do
  if grep -qF "/$file\"" build/lint/compile_commands.json; then echo "$file"; fi
done)
if [ ${#sources[@]} != 0 ]; then
  clang-tidy --quiet -p build/lint "${sources[@]}"
fi
echo "lint: ${#changed[@]} files are in order"
