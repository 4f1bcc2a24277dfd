#!/usr/bin/env python3
"""Where the compiler may fuse a product and a sum into one rounding: nowhere on processors, in device code wherever nvcc likes."""
# builds: release

import os
import re
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BUILD = Path(os.environ["LOCKSTEP_BUILD_DIR"])


def flags_of(language):
    """Of every object that the build compiles in this language: its name and its flags."""
    object_rule = re.compile(rf"^build (\S+): {language}_COMPILER__\S+", re.M)
    text = (BUILD / "build.ninja").read_text()
    for found in object_rule.finditer(text):
        block = text[found.end():text.index("\n\n", found.end())]
        yield found[1], re.search(r"^  FLAGS = (.*)$", block, re.M)[1]


class Contraction(unittest.TestCase):
    def test_processors_fuse_nothing_that_the_source_does_not_ask_for(self):
        objects = dict(flags_of("CXX"))
        ours = {name: flags for name, flags in objects.items() if name.startswith("lib/")}
        self.assertGreater(len(ours), 10)
        for name, flags in ours.items():
            self.assertEqual(re.findall(r"-ffp-contract=\w+|-ffast-math|-Ofast", flags), ["-ffp-contract=off"], name)

    def test_device_code_says_that_it_may(self):
        for name, flags in flags_of("CUDA"):
            self.assertIn("--fmad=true", flags, name)
        options = (ROOT / "CMakeLists.txt").read_text()
        self.assertEqual(len(re.findall(r"COMPILE_LANGUAGE:CUDA>[^\n]*--fmad=true[^\n]*-ffp-contract=off", options)), 1)

    def test_the_pages_say_so(self):
        for page in ("docs/architecture.md", "docs/decisions/storage.md"):
            self.assertTrue("--fmad=true" in (ROOT / page).read_text(), page)


if __name__ == "__main__":
    unittest.main()
