"""docs/seeds.md says what became of every name and which test shows it: every name is in a row, what it says is here must be here,
and each of its tests must use it, in its own body or in what that calls."""
# builds: release

import ast
import functools
import os
import re
import sys

ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..")
SOURCES = (".h", ".cc", ".cu", ".cuh", ".py")
# What a process test asserts of a row. It knows the code by its flags and by what it says.
ASSERTED = {
    ("F-DP-001", "star_train.py: blocks at an original server"): r"len\(\{run\.weights for run in runs\}\) == 1",
    ("F-DP-003", "star_faults.py: NaN"): r'expect_end\(\[star\.coordinator, \*workers\], 3,\s+\[.*"step 1", "element 678"',
    ("F-DP-003", "star_original.py: NaN in an average"): r'expect_end\(3, "non-finite"',
    ("C-DDP-001, the output is the mean", "star_original.py: our coordinator"): r"same_bits\(got, client\.average\(sent, None\)",
    ("`DistributedConfig::coordinator`", "star_run.py: usage"): r'"coordinator", "--workers", 0\], "--workers"',
    ("`WorkerConnection`", "star_original.py: GPUs and backend"): r"check\(\(name, backend\) == .* and gpus in",
    ("`send_shard_assignments`", "star_original.py: our coordinator"): r"check\(shard == \(steps, first, first \+ samples",
    ("the flow of fine-tuning", "star_original.py: our coordinator"): r"peer\.wait_for_shard\(\)\) is not None",
    ("the flow of fine-tuning", "star_original.py: their server"): r"check\(totals == \[\(synthetic\.loss",
    ("the flow of fine-tuning", "star_train.py: a vector at an original server"): r"correct == expected\.correct\[step\]",
    ("the flow of pre-training", "star_original.py: our coordinator"): r"trainer\.allreduce\(",
    ("the flow of pre-training", "star_original.py: their server"): r"same_bits\(sent\[i\], expected, f\"part",
    ("the flow of pre-training", "star_original.py: a trainer leaves in the middle"): r"it owes block 0 of step 1",
    ("`has_non_finite`", "star_original.py: infinity in an average"): r'expect_end\(3, "non-finite"',
    ("messages over 100,000,000", "star_original.py: 100 MB for an original server"): r'"message too large", "100000000"',
    ("messages over 100,000,000", "star_original.py: 100 MB for an original worker"): r'"message too large", .*"original protocol"',
    ('"expected GradientPayload', "star_original.py: a server of the other flow"): r'expect_end\(3, "ShardAssignment", "mode vector"',
    ("`DistributedComm::Remote`", "star_train.py: blocks at an original server"): r'"--protocol"',
    ("`DistributedComm::Remote`", "star_train.py: beside an original trainer"): r"got\.tobytes\(\) == expected\.tobytes\(\)",
    ("`allreduce_impl`", "star_train.py: blocks at an original server"): r"block_idx mismatch: expected",
    ("`BlockGradientSet`", "star_train.py: blocks at an original server"): r"served\.sizes == \[\[SIZES\] \* LAYERS",
    ("the loss of a worker's batch", "star_train.py: a vector at an original server"): r"sum\(total for _, _, total in totals\) == 8 \* 16",
    ("the coordinator broadcasts", "star_train.py: saved from the coordinator"): r"coordinator\.signal\(signal\.SIGUSR1\)",
}


def read(path):
    with open(os.path.join(ROOT, path), encoding="utf-8") as file:
        return file.read()


def sources(*folders):
    for folder in folders:
        for where, _, names in os.walk(os.path.join(ROOT, folder)):
            for name in names:
                if name.endswith(SOURCES):
                    yield os.path.relpath(os.path.join(where, name), ROOT)


def words_of(text):
    return set(re.findall(r"--[\w-]+|\w+", text))


def with_what_it_calls(text, definitions):
    """The text and, as far as they are defined in `definitions`, all that it names."""
    whole, left = text, words_of(text)
    known = dict(definitions)
    while found := left & known.keys():
        more = "\n".join(known.pop(name) for name in found)
        whole += "\n" + more
        left = words_of(more)
    return whole


TOKEN = re.compile(r"[{};]|\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\\n])'|//[^\n]*")


def until_closed(text, start):
    """From `start` to the end of the braces that open behind it, or of the declaration if none do."""
    depth, opened = 0, False
    for at in TOKEN.finditer(text, start):
        depth += {"{": 1, "}": -1}.get(at[0], 0)
        opened = opened or at[0] == "{"
        if depth == 0 and (opened or at[0] == ";"):
            return text[start:at.end()]
    return text[start:]


TEST = re.compile(r"^(?:TYPED_)?TEST(?:_[FP])?\((\w+),\s*(\w+)\)", re.MULTILINE)
# A class, or a function or constant that begins a line, which is how all of ours are formatted.
CLASS = re.compile(r"^(?:template <.*>\n)?(?:class|struct) (\w+)[^;]*?\{", re.MULTILINE)
FUNCTION = re.compile(r"^(?! |TEST|TYPED|INSTANTIATE|namespace|using|template|#|//)[\w:<>,&*~ ]*?\b(\w+)(?:\(| =)", re.MULTILINE)


def behind_parameters(text, start):
    """Where the parentheses that `start` is behind are closed: defaults may have braces of their own."""
    depth = 1
    for at in re.compile(r"[()]").finditer(text, start):
        depth += 1 if at[0] == "(" else -1
        if depth == 0:
            return at.end()
    return len(text)


def cxx_definitions(text):
    found = {}
    for each in FUNCTION.finditer(text):
        body = behind_parameters(text, each.end()) if each[0].endswith("(") else each.end()
        found[each[1]] = found.get(each[1], "") + text[each.start():body] + until_closed(text, body)
    for each in CLASS.finditer(text):
        found[each[1]] = found.get(each[1], "") + until_closed(text, each.start())
    return found


def unit_tests():
    """The body of every test and what it calls of its file and of tests/support, by Suite.Test."""
    support = {}
    for path in sources("tests/support", "tests/cuda"):
        if path.endswith(".h"):
            support.update(cxx_definitions(read(path)))
    found = {}
    for path in sources("tests"):
        if not path.endswith((".cc", ".cu")):
            continue
        text = read(path)
        definitions = {**support, **cxx_definitions(text)}
        for each in TEST.finditer(text):
            body = until_closed(text, each.start())
            found[f"{each[1]}.{each[2]}"] = with_what_it_calls(body, definitions)
    return found


@functools.cache
def python_definitions(text):
    tree = ast.parse(text)
    kinds = (ast.FunctionDef, ast.ClassDef)
    return {node.name: ast.get_source_segment(text, node) for node in tree.body if isinstance(node, kinds)}


def words_of_case(node):
    """The name of a case, as far as it is no variable."""
    parts = node.values if isinstance(node, ast.JoinedStr) else [node]
    return "".join(part.value if isinstance(part, ast.Constant) else "\0" for part in parts)


def process_case(name):
    """The function of a case and what it calls of its script and of support, if there is such a case."""
    script, _, case = name.partition(".py: ")
    try:
        text = read(f"tests/process/{script}.py")
    except FileNotFoundError:
        return None
    definitions = {}
    for path in sources("tests/process/support"):
        if path.endswith(".py"):
            definitions.update(python_definitions(read(path)))
    definitions.update(python_definitions(text))
    del definitions["main"]
    for node in ast.walk(ast.parse(text)):
        called = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "run"
        if called and getattr(node.func.value, "id", "") == "cases" and case in words_of_case(node.args[0]):
            return with_what_it_calls(" ".join(each.id for each in node.args if isinstance(each, ast.Name)), definitions)
    return None


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

    wrong, all_there, untested, unused = [], "", [], set(ASSERTED)
    for line in read("docs/seeds.md").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")] if line.startswith("| ") else []
        if len(cells) != 3 or cells[0] == "there":
            continue
        there, here, shown = cells
        all_there += there + "\n"
        names = re.findall(r"`([^`]+)`", here)
        wrong += [f"{there}: not in this tree: {name}" for name in names if not is_here(name)]
        wrong += [f"{there}: no page {link}" for link in re.findall(r"\]\((\w+\.md)\)", here)
                  if not os.path.exists(os.path.join(ROOT, "docs", link))]
        if shown.startswith("— "):
            untested.append(there)
            continue
        wanted = {word for name in names for word in words_of(name)}
        shows = re.findall(r"`([^`]+)`", shown)
        if not shows:
            wrong.append(f"{there}: no test")
        for name in shows:
            text = process_case(name) if ".py: " in name else tests.get(name)
            if text is None:
                wrong.append(f"{there}: no test {name}")
            elif ".py: " not in name:
                if not wanted & words_of(text):
                    wrong.append(f"{there}: {name} uses none of {sorted(wanted)}")
            elif key := next((key for key in ASSERTED if there.startswith(key[0]) and key[1] == name), None):
                unused.discard(key)
                if not re.search(ASSERTED[key], text):
                    wrong.append(f"{there}: {name} does not assert {ASSERTED[key]}")
            else:
                wrong.append(f"{there}: what does {name} assert?")
    wrong += [f"no row with {key[0]} shown by {key[1]}" for key in unused]
    there_words = set(re.findall(r"[A-Z]-[A-Z]+-\d+|\w+", all_there))
    endings = tuple(re.findall(r"…(_\w+)", all_there))
    seed_names = read("tests/process/support/seed_names.txt").split()
    wrong += [f"in no row: {name}" for name in seed_names if name not in there_words and not name.endswith(endings)]
    print(f"{len(seed_names)} names, {len(all_there.splitlines())} rows, without a test: {untested}")
    for text in wrong:
        print(text)
    sys.exit(1 if wrong or len(untested) > 1 else 0)


if __name__ == "__main__":
    main()
