# What a run serves at /metrics, read by Prometheus's own checker.
# ctest: TIMEOUT 300
# builds: release
import os
import shutil
import signal
import subprocess
import sys
import unittest
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "support"))
from pages import PageCase  # noqa: E402
from ranks import skip  # noqa: E402

ARTEFACTS = Path(os.environ["LOCKSTEP_BUILD_DIR"])


def find_promtool():
    """Prometheus's own checker: the system's, or that of the distribution's package, which is unpacked and not installed, because it
    would start a service. None without a network."""
    if found := shutil.which("promtool"):
        return found
    folder = ARTEFACTS.parent / "test_tools"
    promtool = folder / "usr" / "bin" / "promtool"
    if not promtool.exists() and shutil.which("apt-get"):
        folder.mkdir(exist_ok=True)
        subprocess.run(["apt-get", "download", "-q", "prometheus"], cwd=folder, capture_output=True, timeout=120)
        for package in folder.glob("prometheus_*.deb"):
            subprocess.run(["dpkg", "-x", package, folder], check=True)
    return promtool if promtool.exists() else None


class Metrics(PageCase):
    def test_promtool_finds_nothing_wrong(self):
        run, url = self.start("--steps", 400, "--workers", 2, "--out", self.folder / "one", "--eval-every", 2, "--save-every", 2)
        self.wait_for_step(url, 6)
        metrics = self.get(url, "metrics")[1]
        checked = subprocess.run([find_promtool(), "check", "metrics"], input=metrics, capture_output=True, text=True)
        self.assertEqual((checked.returncode, checked.stdout + checked.stderr), (0, ""))
        self.assertEqual(self.end(run, signal.SIGINT)[0], 128 + signal.SIGINT)


if __name__ == "__main__":
    if not find_promtool():
        skip("no promtool, and no network to get it from")
    unittest.main()
