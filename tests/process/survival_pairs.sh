#!/usr/bin/env bash
# Workers are lost at every place, over every transport, ...: any two of these together at least once. The whole table is the script's.
# ctest: PROCESSORS 2 TIMEOUT 600 COST 100
# builds: release
exec python3 "$(dirname "$0")/../../scripts/survival_matrix.py" --pairwise --lockstep "$LOCKSTEP_BIN" -j 4
