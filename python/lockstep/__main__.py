"""python -m lockstep is the command: this process becomes it.

`python -m lockstep run --workers 3 program.py` starts a program of Python with this interpreter."""

import os
import pathlib
import sys


def main() -> None:
    """Never returns."""
    binary = os.environ.get("LOCKSTEP_BIN") or str(pathlib.Path(__file__).with_name("bin") / "lockstep")
    os.environ["LOCKSTEP_PYTHON"] = sys.executable  # what `run` starts a program of Python with
    try:
        os.execv(binary, ["lockstep", *sys.argv[1:]])
    except OSError as error:
        sys.exit(f"{binary}: {error.strerror}; an installed package has the command there, in a source tree LOCKSTEP_BIN names it")


if __name__ == "__main__":
    main()
