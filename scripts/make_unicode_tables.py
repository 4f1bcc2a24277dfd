#!/usr/bin/env python3
"""Writes lockstep/data/unicode_tables.h: what the tokenizers of Hugging Face need to know of Unicode.

usage: make_unicode_tables.py > lockstep/data/unicode_tables.h      needs: pip install unicodedata2==16.0.0; perl

Letters and numbers are those of Unicode 16.0, which Oniguruma has, the regular expressions of `tokenizers`. Normalisation is
that of Unicode 9.0, which its normaliser has: it leaves marks of later versions where they stand. No version changes what an
earlier one said of a character's normalisation, so the later tables without the later characters are the earlier ones."""

import subprocess
import sys

import unicodedata2 as unicode

CLASSES, NORMALISATION = "16.0.0", "9.0"
POINTS = [point for point in range(0x110000) if not 0xD800 <= point < 0xE000]


def ranges(points, value=lambda point: 0):
    """(first, last, value) of runs of neighbours with the same value."""
    runs = []
    for point in points:
        if runs and runs[-1][1] == point - 1 and runs[-1][2] == value(point):
            runs[-1][1] = point
        else:
            runs.append([point, point, value(point)])
    return runs


def table(kind, name, rows):
    print(f"\ninline constexpr {kind} {name}[] = {{")
    line = "   "
    for row in rows:
        entry = " {" + ", ".join(row) + "},"
        if len(line) + len(entry) > 100:
            print(line)
            line = "   "
        line += entry
    print(line + "\n};")


def main():
    if unicode.unidata_version != CLASSES:
        sys.exit(f"unicodedata2 has Unicode {unicode.unidata_version}, not {CLASSES}")
    perl = f"for (0..0x10ffff) {{ print \"$_\\n\" if !($_ >= 0xd800 && $_ < 0xe000) && chr($_) =~ /\\p{{Present_In={NORMALISATION}}}/ }}"
    known = set(map(int, subprocess.run(["perl", "-e", perl], check=True, capture_output=True, text=True).stdout.split()))
    print(f"""// Made by scripts/make_unicode_tables.py: letters and numbers of Unicode {CLASSES}, normalisation of Unicode {NORMALISATION}.
#pragma once

#include <cstdint>

// clang-format off
namespace lockstep::unicode_tables {{

struct Run {{
  std::uint32_t first;
  std::uint32_t last;
}};
struct CombiningRun {{
  std::uint32_t first;
  std::uint32_t last;
  std::uint8_t combining_class;
}};
// A character and the one or two (else 0) that it stands for. `composes`: whether the two become it again.
struct Decomposition {{
  std::uint32_t whole;
  std::uint32_t first;
  std::uint32_t second;
  bool composes;
}};""")
    for name, letter in (("kLetters", "L"), ("kNumbers", "N")):
        runs = ranges(point for point in POINTS if unicode.category(chr(point))[0] == letter)
        table("Run", name, [(f"{first:#x}", f"{last:#x}") for first, last, _ in runs])
    combining = [point for point in POINTS if point in known and unicode.combining(chr(point))]
    runs = ranges(combining, lambda point: unicode.combining(chr(point)))
    table("CombiningRun", "kCombining", [(f"{first:#x}", f"{last:#x}", str(value)) for first, last, value in runs])
    rows = []
    for point in POINTS:
        parts = unicode.decomposition(chr(point)).split()
        if point in known and parts and not parts[0].startswith("<"):
            pair = [int(part, 16) for part in parts] + [0]
            composes = len(parts) == 2 and unicode.normalize("NFC", chr(point)) == chr(point)
            rows.append((f"{point:#x}", f"{pair[0]:#x}", f"{pair[1]:#x}", "true" if composes else "false"))
    table("Decomposition", "kDecompositions", rows)
    print("\n}  // namespace lockstep::unicode_tables")


main()
