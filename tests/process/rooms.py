# Files include only rooms that the table in lockstep/README.md allows them, and foreign headers stay in rooms of their names.
# builds: release
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
FOREIGN = {"mpi": r"<mpi\.h>", "cuda": r"<cu(da|blas|dnn)\w*\.h>", "nccl": r"<nccl\.h>", "sentencepiece": r"<sentencepiece"}


def allowed_rooms():
    """Room -> rooms it may include, itself among them; None: any."""
    rooms = {}
    for line in (ROOT / "lockstep/README.md").read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 3 and (room := re.fullmatch(r"`([\w/]+)`", cells[0])):
            named = re.findall(r"`([\w/.]+)`", cells[2])
            rooms[room[1]] = None if cells[2] == "any" else {room[1], *named}
    return rooms


def problems():
    rooms = allowed_rooms()
    for file in sorted((ROOT / "lockstep").rglob("*.*")):
        room = str(file.parent.relative_to(ROOT / "lockstep"))
        if file.suffix not in {".h", ".cc", ".cu", ".cuh"} or room == ".":
            continue
        if room not in rooms:
            yield f"{file}: lockstep/README.md has no room {room}"
            continue
        for number, line in enumerate(file.read_text().splitlines(), 1):
            place = f"{file.relative_to(ROOT)}:{number}"
            if included := re.match(r'#include "lockstep/(?:([\w/]+)/)?\w+\.\w+"', line):
                from_room = included[1] or "lockstep.h"
                if rooms[room] is not None and from_room not in rooms[room]:
                    yield f"{place}: {room} may not include {from_room}"
            for name, header in FOREIGN.items():
                # NCCL works on CUDA's memory.
                homes = {name, "nccl"} if name == "cuda" else {name}
                if re.match("#include " + header, line) and not homes & set(room.split("/")):
                    yield f"{place}: only rooms named {name} include this"
    for room in rooms:
        if not (ROOT / "lockstep" / room).is_dir():
            yield f"lockstep/README.md: there is no room {room}"


found = list(problems())
print("\n".join(found) or "every file includes only what it may")
sys.exit(1 if found else 0)
