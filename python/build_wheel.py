"""What pip calls to make the wheel: CMake builds the library and the command, this file packs them with the Python files.

    pip install .                                        builds in build/wheel
    pip install . --config-settings build-dir=DIR        packs what DIR has built already

The wheel needs nothing of a machine but its C library, and says by its tag which version of that."""

from __future__ import annotations

import base64
import hashlib
import os
import pathlib
import platform
import re
import shutil
import subprocess
import tempfile
import zipfile
from typing import Any, Dict, List, Optional

ROOT = pathlib.Path(__file__).resolve().parents[1]
TARGETS = ["lockstep_shared", "lockstep_portable"]
# Libraries that every Linux of the tag has.
ALLOWED = re.compile(r"lib(c|m|dl|pthread|rt)\.so\.\d|ld-linux.*\.so\.\d")


def prepare_metadata_for_build_wheel(metadata_directory: str, config_settings: Optional[Dict[str, Any]] = None) -> str:
    """Without it pip would build everything to read a name and a version."""
    info = f"lockstep-{_version()}.dist-info"
    folder = pathlib.Path(metadata_directory) / info
    folder.mkdir()
    for name, data in _metadata("py3-none-any").items():
        (folder / name).write_bytes(data)
    return info


def build_wheel(wheel_directory: str, config_settings: Optional[Dict[str, Any]] = None, metadata_directory: Optional[str] = None) -> str:
    given = (config_settings or {}).get("build-dir")
    build = pathlib.Path(given) if given else _build(ROOT / "build" / "wheel")
    binaries = {"lockstep/liblockstep.so": build / "liblockstep.so", "lockstep/bin/lockstep": build / "portable" / "lockstep"}
    for path in binaries.values():
        if not path.exists():
            raise SystemExit(f"{path} is missing: build the targets {' and '.join(TARGETS)} first (they need libsodium.a and libcrypto.a)")
    with tempfile.TemporaryDirectory() as folder:
        stripped = {name: _strip(path, pathlib.Path(folder)) for name, path in binaries.items()}
        return _pack(pathlib.Path(wheel_directory), stripped)


def _build(folder: pathlib.Path) -> pathlib.Path:
    configure = ["cmake", "-S", str(ROOT), "-B", str(folder), "-DCMAKE_BUILD_TYPE=Release", "-DCMAKE_CXX_FLAGS_RELEASE=-O3",
                 "-DLOCKSTEP_TESTS=OFF", "-DLOCKSTEP_MPI=OFF", "-DLOCKSTEP_SENTENCEPIECE=OFF"]
    if shutil.which("ninja") and not (folder / "CMakeCache.txt").exists():
        configure += ["-G", "Ninja"]
    subprocess.run(configure, check=True)
    subprocess.run(["cmake", "--build", str(folder), "-j", str(os.cpu_count() or 1), "--target", *TARGETS], check=True)
    return folder


def _strip(path: pathlib.Path, folder: pathlib.Path) -> pathlib.Path:
    out = folder / path.name
    subprocess.run(["strip", "--strip-unneeded", "-o", str(out), str(path)], check=True)
    return out


def _tag(binaries: List[pathlib.Path]) -> str:
    """manylinux with the newest version of glibc that the binaries ask for. They may ask for nothing else."""
    newest = (2, 17)
    for path in binaries:
        dynamic = subprocess.run(["readelf", "-d", "-V", "-W", str(path)], check=True, capture_output=True, text=True).stdout
        foreign = [name for name in re.findall(r"\(NEEDED\).*\[(.*)\]", dynamic) if not ALLOWED.fullmatch(name)]
        if foreign:
            raise SystemExit(f"{path.name} needs {', '.join(foreign)}: the wheel must need nothing but the C library")
        newest = max([newest, *((int(major), int(minor)) for major, minor in re.findall(r"GLIBC_(\d+)\.(\d+)", dynamic))])
    return f"py3-none-manylinux_{newest[0]}_{newest[1]}_{platform.machine()}"


def _pack(folder: pathlib.Path, binaries: Dict[str, pathlib.Path]) -> str:
    version = _version()
    tag = _tag(list(binaries.values()))
    info = f"lockstep-{version}.dist-info"
    contents: Dict[str, bytes] = {}
    for path in sorted((ROOT / "python" / "lockstep").rglob("*")):
        if path.suffix == ".py" or path.name == "py.typed":
            contents[str(path.relative_to(ROOT / "python"))] = path.read_bytes()
    for name, path in binaries.items():
        contents[name] = path.read_bytes()
    contents.update({f"{info}/{name}": data for name, data in _metadata(tag).items()})
    record = "".join(f"{name},sha256={_digest(data)},{len(data)}\n" for name, data in contents.items())
    contents[f"{info}/RECORD"] = (record + f"{info}/RECORD,,\n").encode()

    wheel = f"lockstep-{version}-{tag}.whl"
    with zipfile.ZipFile(folder / wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in contents.items():
            entry = zipfile.ZipInfo(name)  # of a fixed date: the same files give the same wheel
            entry.compress_type = zipfile.ZIP_DEFLATED
            entry.external_attr = (0o100755 if name in binaries else 0o100644) << 16  # a plain file, with its rights
            archive.writestr(entry, data)
    return wheel


def _version() -> str:
    found = re.search(r"project\(lockstep VERSION ([\d.]+)", (ROOT / "CMakeLists.txt").read_text())
    assert found is not None
    return found[1]


def _metadata(tag: str) -> Dict[str, bytes]:
    """The files of a wheel's dist-info, but for the list of all files."""
    return {
        "LICENSE": (ROOT / "LICENSE").read_bytes(),
        "METADATA": (
            f"Metadata-Version: 2.1\nName: lockstep\nVersion: {_version()}\n"
            "Summary: Data-parallel training with the same bits at any number of workers\nLicense: MIT\n"
            "Requires-Python: >=3.9\nProvides-Extra: numpy\nRequires-Dist: numpy; extra == 'numpy'\n"
            "Provides-Extra: torch\nRequires-Dist: torch; extra == 'torch'\n").encode(),
        "WHEEL": f"Wheel-Version: 1.0\nGenerator: lockstep\nRoot-Is-Purelib: false\nTag: {tag}\n".encode(),
        "entry_points.txt": b"[console_scripts]\nlockstep = lockstep.__main__:main\n",
    }


def _digest(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
