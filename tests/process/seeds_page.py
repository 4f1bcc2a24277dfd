"""docs/seeds.md says what became of every name and which test shows it: what it says is here must be here, and its tests must
use it."""
# builds: release

import os
import re
import sys

ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..")
SOURCES = (".h", ".cc", ".cu", ".cuh", ".py")
LEAST_ROWS = 90


def read(path):
    with open(os.path.join(ROOT, path), encoding="utf-8") as file:
        return file.read()


def sources(*folders):
    for folder in folders:
        for where, _, names in os.walk(os.path.join(ROOT, folder)):
            for name in names:
                if name.endswith(SOURCES):
                    yield os.path.relpath(os.path.join(where, name), ROOT)


def unit_tests():
    """The text of every test's file, by Suite.Test."""
    found = {}
    for path in sources("tests"):
        text = read(path)
        for suite, name in re.findall(r"^(?:TYPED_)?TEST(?:_[FP])?\((\w+),\s*(\w+)\)", text, re.MULTILINE):
            found[f"{suite}.{name}"] = text
    return found


def process_case(name):
    """The text of a process test and of what it imports, if it has such a case."""
    script, _, case = name.partition(".py: ")
    try:
        text = read(f"tests/process/{script}.py")
    except FileNotFoundError:
        return None
    if not any(case in line for line in text.splitlines() if "cases.run(" in line):
        return None
    helpers = [f"tests/process/support/{name}.py" for name in re.findall(r"^(?:import|from) (\w+)", text, re.MULTILINE)]
    return text + "".join(read(path) for path in helpers if os.path.exists(os.path.join(ROOT, path)))


def words_of(text):
    return set(re.findall(r"--[\w-]+|\w+", text))


# Flags and commands are what process tests know of the code.
SPOKEN = {"GradientServer": "coordinator", "OriginalStar": "--protocol", "Mode": "--mode", "send_shards": "ShardAssignment",
          "kNonFinite": "non-finite", "WorkerCard": "gpu_count", "kOriginalLargestFrame": "100000000", "Requests": "SIGUSR1",
          "kUnexpectedMessage": "ShardAssignment", "Average": "average_gradients", "find_non_finite": "non-finite",
          "LossSum": "correct", "RoundResult": "loss"}


def main():
    code = "\n".join(read(path) for path in sources("lockstep", "cli"))
    words = set(re.findall(r"\w+", code))
    tests = unit_tests()

    def is_here(name):
        if "/" in name:
            return os.path.exists(os.path.join(ROOT, name))
        if name.startswith("--"):
            return f'"{name.split()[0]}' in code
        return set(re.findall(r"\w+", name)) <= words

    wrong, rows, untested = [], 0, []
    for line in read("docs/seeds.md").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")] if line.startswith("| ") else []
        if len(cells) != 3 or cells[0] == "there":
            continue
        rows += 1
        there, here, shown = cells
        names = re.findall(r"`([^`]+)`", here)
        wrong += [f"{there}: not in this tree: {name}" for name in names if not is_here(name)]
        wrong += [f"{there}: no page {link}" for link in re.findall(r"\]\((\w+\.md)\)", here)
                  if not os.path.exists(os.path.join(ROOT, "docs", link))]
        if shown.startswith("— "):
            untested.append(there)
            continue
        used = set()
        shows = re.findall(r"`([^`]+)`", shown)
        for name in shows:
            text = process_case(name) if ".py: " in name else tests.get(name)
            if text is None:
                wrong.append(f"{there}: no test {name}")
            else:
                used |= words_of(text)
        wanted = {word for name in names for word in words_of(name)}
        wanted |= {SPOKEN[name] for name in names if name in SPOKEN}
        if not shows or not wanted & used:
            wrong.append(f"{there}: its tests use none of {sorted(wanted)}")
    print(f"{rows} rows, without a test: {untested}")
    for text in wrong:
        print(text)
    sys.exit(1 if wrong or rows < LEAST_ROWS or len(untested) > 1 else 0)


if __name__ == "__main__":
    main()
