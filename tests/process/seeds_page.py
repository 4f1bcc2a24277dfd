"""docs/seeds.md says what became of every name; what it says is here must be here."""
# builds: release

import os
import re
import sys

ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..")
SOURCES = (".h", ".cc", ".cu", ".cuh", ".py")


def read(path):
    with open(os.path.join(ROOT, path), encoding="utf-8") as file:
        return file.read()


def sources(*folders):
    for folder in folders:
        for where, _, names in os.walk(os.path.join(ROOT, folder)):
            for name in names:
                if name.endswith(SOURCES):
                    yield read(os.path.join(where, name))


def main():
    code = "\n".join(sources("lockstep", "cli"))
    words = set(re.findall(r"\w+", code))
    tests = set(re.findall(r"^TEST(?:_[FP])?\((\w+),\s*(\w+)\)", "\n".join(sources("tests")), re.MULTILINE))

    def is_here(name):
        if "/" in name:
            return os.path.exists(os.path.join(ROOT, name))
        if name.startswith("--"):
            return f'"{name.split()[0]}' in code
        if "." in name:
            return tuple(name.split(".")) in tests
        return set(re.findall(r"\w+", name)) <= words

    wrong = []
    checked = 0
    for line in read("docs/seeds.md").splitlines():
        if not line.startswith("| ") or line.startswith("| there"):
            continue
        here = line.strip("|").split("|")[1]
        for link in re.findall(r"\]\((\w+\.md)\)", here):
            checked += 1
            if not os.path.exists(os.path.join(ROOT, "docs", link)):
                wrong.append(link)
        for name in re.findall(r"`([^`]+)`", here):
            checked += 1
            if not is_here(name):
                wrong.append(name)
    print(f"{checked} names")
    for name in wrong:
        print(f"not in this tree: {name}")
    sys.exit(1 if wrong or checked < 150 else 0)


if __name__ == "__main__":
    main()
