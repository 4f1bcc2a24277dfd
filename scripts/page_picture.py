#!/usr/bin/env python3
"""Takes docs/page.png: the live page of a real run of three workers on this repository's own texts. One of them is made slow, and
another one is killed on the way.

usage: scripts/page_picture.py [--lockstep build/release/lockstep] [--steps 600] [--at 450] [--dark] [--phone] [FILE]"""

import argparse
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests" / "process" / "support"))
from browser import Browser  # noqa: E402

SHAPE = ["--hidden", "96", "--layers", "2", "--heads", "4", "--context", "96", "--global-batch", "24", "--micro-batch", "2", "--threads", "1",
         "--lr", "2e-3", "--eval-every", "50", "--save-every", "200", "--no-balance"]


def reached(step):
    return f"Number(document.documentElement.dataset.step) >= {step}"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lockstep", type=pathlib.Path, default=ROOT / "build" / "release" / "lockstep")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--at", type=int, default=450, help="the step at which the picture is taken")
    parser.add_argument("--dark", action="store_true")
    parser.add_argument("--phone", action="store_true")
    parser.add_argument("file", nargs="?", type=pathlib.Path, default=ROOT / "docs" / "page.png")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        text = folder / "documentation.txt"
        text.write_text("".join(path.read_text() for path in sorted(ROOT.glob("**/*.md")) if "build" not in path.parts))
        run = subprocess.Popen([str(word) for word in (options.lockstep, "train", "--data", text, "--out", folder / "documentation", "--workers", 3,
                                                       "--steps", options.steps, "--page", 0, *SHAPE)],
                               env={**os.environ, "LOCKSTEP_FAULT": "rank=1 step=1 at=backward do=slow ms=2"},
                               stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        browser = Browser(limit=600)
        try:
            url = next(re.search(r"page: (http://\S+)", line)[1] for line in run.stderr if "page: " in line)
            browser.colour_scheme("dark" if options.dark else "light")
            browser.resize(*((390, 844, True) if options.phone else (1280, 1000)))
            browser.open(url)
            threading.Thread(target=run.stderr.read, daemon=True).start()
            browser.wait_for(reached(options.at // 3))
            ranks = json.load(urllib.request.urlopen(url + "api/run"))["ranks"]
            os.kill(int(re.search(r"pid (\d+)", ranks[2]["name"])[1]), signal.SIGKILL)
            browser.wait_for(f"{reached(options.at)} && document.querySelector('#phases svg').textContent.includes('slow')")
            # All but the settings.
            height = browser.value("document.querySelector('#settings').parentElement.getBoundingClientRect().top + scrollY")
            browser.resize(390 if options.phone else 1280, int(height), options.phone)
            time.sleep(1.5)  # drawn anew for that height
            print(len(browser.screenshot(options.file)), "bytes,", browser.problems)
        finally:
            browser.close()
            run.send_signal(signal.SIGINT)
            run.wait()


if __name__ == "__main__":
    main()
