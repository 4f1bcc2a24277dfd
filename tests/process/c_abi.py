#!/usr/bin/env python3
"""The C interface keeps its promise: what a program was compiled with, the library still offers. Compares lockstep/c.h and
the symbols of liblockstep.so with what was recorded in support/c_abi.txt, and the table of the Python package with both.

`c_abi.py --record` adds new declarations to the record; with them LOCKSTEP_ABI_VERSION goes up by one. A declaration that
changed or went breaks every program there is."""
# builds: release

import ctypes
import os
import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
RECORD = ROOT / "tests" / "process" / "support" / "c_abi.txt"
LIBRARY = os.path.join(os.environ["LOCKSTEP_BUILD_DIR"], "liblockstep.so")


def declarations(text):
    """Every declaration of the header on a line of its own, by what it declares."""
    text = re.sub(r"/\*.*?\*/", " ", text, flags=re.DOTALL)
    found = {name: f"#define {name} {value}" for name, value in re.findall(r"^#define (LOCKSTEP_\w+) (\w+)$", text, re.MULTILINE)}
    text = re.sub(r"^#(?:[^\n]*\\\n)*[^\n]*$", " ", text, flags=re.MULTILINE)
    text = re.sub(r"\s+", " ", re.sub(r'extern "C" \{', " ", text))
    # A body in braces has semicolons of its own.
    for each in re.findall(r"((?:[^;{}]|\{[^}]*\})+);", text):
        line = each.strip()
        name = re.search(r"(\w+)\(", line) if "(" in line and "{" not in line else re.search(r"(\w+)$", line)
        found[name[1]] = line + ";"
    return found


def broken(old, new):
    """Why programs that were compiled with the old declarations no longer work."""
    for name, line in old.items():
        if name not in new:
            yield f"gone: {line}"
        elif new[name] != line:
            if name == "LOCKSTEP_ABI_VERSION":  # new functions and fields raise it
                allowed = int(new[name].split()[-1]) > int(line.split()[-1])
            elif line.startswith("typedef enum"):
                allowed = set(re.findall(r"\w+ = \d+", line)) <= set(re.findall(r"\w+ = \d+", new[name]))
            else:  # fields are added at the end of structures that tell their size
                allowed = "{ size_t size;" in line and new[name].startswith(line[:line.rindex("}")].rstrip())
            if not allowed:
                yield f"changed: {line}\n     to: {new[name]}"


def main():
    now = declarations((ROOT / "lockstep" / "c.h").read_text())
    if "--record" in sys.argv:
        RECORD.write_text("".join(line + "\n" for line in now.values()))
        return
    recorded = declarations(RECORD.read_text())
    wrong = list(broken(recorded, now))
    wrong += [f"not recorded (c_abi.py --record): {now[name]}" for name in now if now[name] != recorded.get(name)]

    functions = {name: line for name, line in now.items() if line.startswith("LOCKSTEP_API ")}
    if not os.path.exists(LIBRARY):
        print("skipped: this build makes no liblockstep.so (libsodium.a and libcrypto.a are needed)")
        sys.exit(77)
    symbols = subprocess.run(["nm", "-D", "--defined-only", LIBRARY], check=True, capture_output=True, text=True).stdout
    offered = {line.split()[-1] for line in symbols.splitlines()}
    wrong += [f"the library lacks {name}" for name in sorted(functions.keys() - offered)]
    wrong += [f"the library offers {name}, which c.h does not declare" for name in sorted(offered - functions.keys())]

    os.environ["LOCKSTEP_LIBRARY"] = LIBRARY
    sys.path.insert(0, str(ROOT / "python"))
    from lockstep import _library

    known = {"lockstep_" + name: arguments for name, (_, arguments) in _library._FUNCTIONS.items()}
    wrong += [f"the Python package does not know {name}" for name in sorted(functions.keys() - known.keys())]
    for name in functions.keys() & known.keys():
        inside = functions[name].split("(", 1)[1].rsplit(")", 1)[0].strip()
        count = 0 if inside == "void" else len(inside.split(","))
        if count != len(known[name]):
            wrong.append(f"the Python package calls {name} with {len(known[name])} arguments instead of {count}")
    structures = {"lockstep_join_options": _library.JoinOptions, "lockstep_error": _library.ErrorStructure,
                  "lockstep_departure": _library.Departure, "lockstep_wishes": _library.Wishes, "lockstep_outcome": _library.Outcome,
                  "lockstep_call_options": _library.CallOptions, "lockstep_range": _library.Range, "lockstep_merge": _library.Merge,
                  "lockstep_lane_step": _library.LaneStep, "lockstep_tensor": _library.TensorStructure}
    sizes = {"int": 4, "size_t": 8, "int64_t": 8, "uint64_t": 8, "uint32_t": 4, "uint16_t": 2}
    for name, structure in structures.items():
        fields = [field.split() for field in now[name].split("{")[1].split("}")[0].split(";") if field.strip()]
        theirs = [8 if "*" in " ".join(words) else sizes[words[0]] for words in fields]
        ours = [ctypes.sizeof(kind) for _, kind in structure._fields_]
        if theirs != ours:
            wrong.append(f"{name}: its fields take {theirs} bytes, in the Python package {ours}")
    print(f"{len(functions)} functions, {len(now) - len(functions)} other declarations, {len(structures)} structures")
    sys.exit("\n".join(wrong) or 0)


if __name__ == "__main__":
    main()
