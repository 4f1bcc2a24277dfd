# The live page of a run, in a real browser: it loads, draws, goes on drawing, survives a reload and the loss of rank 0; the
# same data for Prometheus, for TensorBoard and in a report. The screenshot stays as page.png in the build's folder.
# ctest: TIMEOUT 300
# builds: release
import http.client
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import unittest
import urllib.error
import urllib.request
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "support"))
from browser import Browser, find_browser  # noqa: E402
from ranks import reserved_port  # noqa: E402
from training import LOCKSTEP, TINY, TextCase, lockstep, rows_of  # noqa: E402

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


class PageCase(TextCase):
    def start(self, *arguments, slow=20, **environment):
        """A run that takes its time without using the processor; returns the process and the address of its page."""
        usual = [word for flag, value in TINY.items() if flag not in arguments for word in (flag, value)]
        environment = {**os.environ, "LOCKSTEP_FAULT": f"rank=any step=1 at=lane do=slow ms={slow}", **environment}
        run = subprocess.Popen([str(word) for word in (LOCKSTEP, "train", "--data", self.text, "--page", 0, *usual, *arguments)], text=True,
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment)
        self.addCleanup(self.end, run)
        said = []
        for line in run.stderr:
            said.append(line)
            if match := re.search(r"page: (http://\S+)", line):
                return run, match[1]
        self.fail("".join(said))

    def end(self, run, how=signal.SIGKILL):
        if run.poll() is None:
            run.send_signal(how)
        output, errors = run.communicate(timeout=60)
        return run.returncode, output, errors

    def get(self, url, path="", **headers):
        """Status and text."""
        try:
            with urllib.request.urlopen(urllib.request.Request(url + path, headers=headers), timeout=30) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def wait_for_step(self, url, step):
        end = time.monotonic() + 60
        run = None
        while time.monotonic() < end:
            try:
                run = json.loads(self.get(url, "api/run")[1])
            except (OSError, http.client.HTTPException):  # nobody serves it now
                run = None
            if run and run["step"] >= step:
                return run
            time.sleep(0.02)
        self.fail(f"step {step} was not reached: {run}")


class Data(PageCase):
    def test_what_it_serves(self):
        out = self.folder / "runs" / "one"
        run, url = self.start("--steps", 400, "--workers", 2, "--out", out, "--eval-every", 2, "--save-every", 2, "--no-balance")
        told = self.wait_for_step(url, 6)
        self.assertEqual((told["name"], told["state"], told["steps"], len(told["ranks"])), ("one", "running", 400, 2))
        self.assertGreater(told["ranks"][1]["phases"]["data"] + told["ranks"][1]["phases"]["backward"], 0)
        self.assertEqual(told["start"]["settings"]["options"]["workers"], ["2"])
        self.assertTrue(any(event["event"] == "saved" and event["hash"].startswith("blake3:") for event in told["events"]))
        steps = json.loads(self.get(url, "api/steps?after=3")[1])
        self.assertEqual(steps["step"][:2], [4, 5])
        rows = {row["step"]: row for row in rows_of(out)[:-1] if "loss" in row}
        self.assertEqual(steps["loss"][0], rows[4]["loss"])
        # Bad input is refused, and the run goes on.
        for path, status in (("api/steps?after=x", 400), ("api/steps?run=../one", 404), ("nothing", 404), ("%", 400), ("?a=%00", 400)):
            self.assertEqual(self.get(url, path)[0], status, path)
        self.assertEqual(self.get(url, "", Host="evil.example")[0], 421)
        request = urllib.request.Request(url + "api/run", data=b"x", method="POST")
        with self.assertRaises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(request, timeout=30)
        self.assertEqual(refused.exception.code, 405)
        self.wait_for_step(url, told["step"] + 2)
        metrics = self.get(url, "metrics")[1]
        self.assertRegex(metrics, r'(?m)^lockstep_phase_duration_seconds\{run="one",rank="1",phase="backward"\} ')
        if promtool := find_promtool():
            checked = subprocess.run([promtool, "check", "metrics"], input=metrics, capture_output=True, text=True)
            self.assertEqual((checked.returncode, checked.stdout + checked.stderr), (0, ""))
        code, output, errors = self.end(run, signal.SIGINT)
        self.assertEqual(code, 128 + signal.SIGINT, errors)
        self.assertEqual(rows_of(out)[-1]["how"], "stopped")

    def test_one_worker_and_no_folder(self):
        run, url = self.start("--steps", 400)
        told = self.wait_for_step(url, 3)
        self.assertEqual((told["name"], told["out"], len(told["ranks"])), ("this run", "", 1))
        self.assertEqual(self.end(run, signal.SIGINT)[0], 128 + signal.SIGINT)

    def test_a_gradient_server_beside_the_launcher(self):
        run, url = self.start("--steps", 400, "--workers", 2, "--transport", "server")
        self.assertEqual(len(self.wait_for_step(url, 3)["ranks"]), 2)
        self.assertEqual(self.end(run, signal.SIGINT)[0], 128 + signal.SIGINT)

    def test_without_a_launcher_the_next_rank_opens_it_again(self):
        out = self.folder / "run"
        place, port = self.enterContext(reserved_port()), self.enterContext(reserved_port())
        ranks = []
        for rank in range(2):
            world = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(place)}
            usual = [str(word) for pair in TINY.items() for word in pair]
            fault = {"LOCKSTEP_FAULT": "rank=any step=1 at=lane do=slow ms=20"}
            ranks.append(subprocess.Popen([LOCKSTEP, "train", "--data", self.text, *usual, "--steps", "400", "--out", out, "--page", str(port)],
                                          env={**os.environ, **world, **fault}, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE))
            self.addCleanup(self.end, ranks[-1])
        url = f"http://127.0.0.1:{port}/"
        before = self.wait_for_step(url, 4)
        ranks[0].kill()
        after = self.wait_for_step(url, before["step"] + 3)
        self.assertIn("lost", [event["event"] for event in after["events"]])
        self.assertEqual(json.loads(self.get(url, "api/steps")[1])["step"][:4], [1, 2, 3, 4])  # from the folder
        self.assertEqual([row["step"] for row in rows_of(out)[:-1] if "loss" in row][:4], [1, 2, 3, 4])

    def test_beyond_this_host_a_secret_is_needed(self):
        self.assertIn("needs the job's secret", self.fails(2, "train", "--data", self.text, "--page", "0.0.0.0:0"))
        self.assertIn("neither PORT nor HOST:PORT", self.fails(2, "train", "--data", self.text, "--page", "x"))
        token = "0123456789abcdef-of-this-job"
        run, link = self.start("--steps", 400, "--page", "0.0.0.0:0", LOCKSTEP_TOKEN=token)
        url, secret = link.split("?secret=")
        url = re.sub(r"//[^:/]+:", "//127.0.0.1:", url)
        self.assertNotIn(token, secret)
        self.assertEqual(self.get(url)[0], 401)
        self.assertEqual(self.get(url, f"?secret={token}")[0], 401)
        self.assertEqual(self.get(url, f"?secret={secret}")[0], 200)
        self.assertEqual(self.get(url, "metrics", Authorization=f"Bearer {secret}")[0], 200)

    def test_a_port_that_is_taken(self):
        run, url = self.start("--steps", 400)
        port = url.rstrip("/").rsplit(":", 1)[1]
        self.assertIn("another port, or 0 for any, may be free",
                      self.fails(1, "train", "--data", self.text, "--steps", 1, "--page", port, "--workers", 2))

    def test_resumed_with_its_history(self):
        out = self.folder / "run"
        self.weights_of(lockstep("train", "--data", self.text, *[word for pair in TINY.items() for word in pair], "--steps", 4, "--out", out,
                                 "--save-every", 4))
        run, url = self.start("--resume", out, "--steps", 400)
        self.wait_for_step(url, 6)
        self.assertEqual(json.loads(self.get(url, "api/steps")[1])["step"][:6], [1, 2, 3, 4, 5, 6])


class Report(PageCase):
    def test_of_finished_and_broken_runs(self):
        usual = [word for pair in TINY.items() for word in pair]
        for name, workers in (("one", 1), ("two", 2)):
            run = lockstep("train", "--data", self.text, *usual, "--steps", 6, "--eval-every", 3, "--workers", workers, "--out", self.folder / "runs" / name)
            weights = self.weights_of(run)
        broken = self.folder / "broken"
        broken.mkdir()
        lines = (self.folder / "runs" / "two" / "metrics.jsonl").read_text().splitlines(keepends=True)
        (broken / "metrics.jsonl").write_text("".join(lines[:4]) + '{"step": 4, "lo')
        report = self.folder / "report"
        run = lockstep("report", self.folder / "runs", broken, "--out", report)
        self.assertEqual((run.returncode, run.stdout.strip()), (0, str(report / "report.html")), run.stderr)
        html = (report / "report.html").read_text()
        self.assertIn(weights, html)
        self.assertNotRegex(html, r'(src|href)=')
        data = json.loads(re.search(r'id="data">(.*?)</script>', html, re.S)[1])
        self.assertEqual([(each["name"], each["state"], each["step"]) for each in data["runs"]],
                         [("one", "done", 6), ("two", "done", 6), ("broken", "running", 3)])
        for name in ("loss", "speed", "norm", "rate", "phases-1", "phases-3"):
            svg = (report / f"{name}.svg").read_text()
            self.assertTrue(svg.startswith("<svg xmlns=") and svg.endswith("</svg>\n"), name)
            subprocess.run([sys.executable, "-c", "import sys, xml.dom.minidom as dom; dom.parse(sys.argv[1])", report / f"{name}.svg"], check=True)
        self.assertEqual((report / "loss.svg").read_text().count("<path d=\"M"), 6 + (report / "loss.svg").read_text().count("stroke=\"#d5dae0\"") + 6)
        self.assertIn("there is no run in it", self.fails(2, "report", self.folder / "report"))


@unittest.skipUnless(find_browser(), "no chromium here")
class InABrowser(PageCase):
    def setUp(self):
        super().setUp()
        self.browser = Browser()
        self.addCleanup(self.browser.close)

    def step(self):
        return int(self.browser.value("document.documentElement.dataset.step") or 0)

    def wait_beyond(self, step):
        self.browser.wait_for(f"Number(document.documentElement.dataset.step) > {step}")

    def test_through_a_run(self):
        browser = self.browser
        browser.resize(1280, 1100)
        # Another run to lie over it.
        self.weights_of(lockstep("train", "--data", self.text, *[word for pair in TINY.items() for word in pair], "--steps", 40, "--eval-every", 10,
                                 "--out", self.folder / "runs" / "baseline"))
        out = self.folder / "runs" / "three-workers"
        run, url = self.start("--steps", 2000, "--workers", 3, "--out", out, "--eval-every", 10, "--save-every", 25)
        browser.open(url)
        self.wait_beyond(10)
        drawn = "document.querySelector('svg[data-plot=loss] path.curve').dataset.points"
        points = int(browser.value(drawn))
        self.assertGreater(points, 5)
        self.assertEqual(browser.value("document.querySelectorAll('#plots svg').length"), 4)
        self.assertEqual(browser.value("document.querySelector('#state').textContent"), "running")
        self.assertIn("rank 2", browser.value("document.querySelector('svg[data-plot=phases]').textContent"))
        # It goes on, by itself.
        self.wait_beyond(self.step() + 5)
        self.assertGreater(int(browser.value(drawn)), points)
        # It comes back after a reload.
        browser.value("document.title = 'before'")
        browser.reload()
        browser.wait_for("document.title.endsWith('Lockstep')")
        self.wait_beyond(self.step() + 2)
        # Another run over it, log scale, and a part of it.
        browser.wait_for("document.querySelectorAll('#runs input').length === 2")
        browser.value("document.querySelectorAll('#runs input')[1].click()")
        browser.wait_for("document.querySelectorAll('svg[data-plot=loss] path[data-points]').length === 4")
        browser.value("document.querySelector('#log').click()")
        browser.value("""(() => {
          const svg = document.querySelector('svg[data-plot=loss]'), box = svg.getBoundingClientRect();
          const at = (name, share) => svg.dispatchEvent(new PointerEvent(name, {clientX: box.left + box.width * share, clientY: box.top + 50}));
          at('pointerdown', 0.3); at('pointermove', 0.5); at('pointerup', 0.6);
        })()""")
        self.assertFalse(browser.value("document.querySelector('#zoom-out').hidden"))
        browser.value("document.querySelector('#zoom-out').click()")
        # Rank 0 is lost: the page is still there, tells of it, and goes on.
        first = int(re.search(r"pid (\d+)", json.loads(self.get(url, "api/run")[1])["ranks"][0]["name"])[1])
        os.kill(first, signal.SIGKILL)
        browser.wait_for("[...document.querySelectorAll('#events td')].some(cell => cell.textContent === 'lost')")
        self.wait_beyond(self.step() + 3)
        browser.wait_for("[...document.querySelectorAll('#events td')].some(cell => cell.textContent === 'joined')")
        self.wait_beyond(self.step() + 30)
        browser.value("document.querySelector('#log').click()")
        self.assertGreater(len(browser.screenshot(ARTEFACTS / "page.png")), 10_000)
        # A phone, at night.
        light = browser.value("getComputedStyle(document.body).backgroundColor")
        browser.colour_scheme("dark")
        browser.resize(390, 844, mobile=True)
        self.wait_beyond(self.step() + 1)
        self.assertNotEqual(browser.value("getComputedStyle(document.body).backgroundColor"), light)
        self.assertLessEqual(browser.value("document.scrollingElement.scrollWidth"), 390)
        browser.screenshot(ARTEFACTS / "page_phone.png")
        self.assertEqual(browser.problems, [])
        # The end.
        code, _, errors = self.end(run, signal.SIGINT)
        self.assertEqual(code, 128 + signal.SIGINT, errors)
        browser.wait_for("!document.querySelector('#note').hidden")
        self.check_report(out.parent)

    def check_report(self, runs):
        """The report of both runs, from its file."""
        report = self.folder / "report"
        self.assertEqual(lockstep("report", runs, "--out", report).returncode, 0)
        self.browser.problems.clear()
        self.browser.colour_scheme("light")
        self.browser.resize(1280, 1100)
        self.browser.open((report / "report.html").as_uri())
        self.browser.wait_for("document.querySelectorAll('svg[data-plot=loss] path[data-points]').length === 4")
        self.assertIn("workers lost", self.browser.value("document.querySelector('#comparison').textContent"))
        self.assertEqual(self.browser.value("document.querySelectorAll('svg[data-plot=phases]').length"), 2)
        self.browser.screenshot(ARTEFACTS / "report.png")
        self.assertEqual(self.browser.problems, [])


if __name__ == "__main__":
    unittest.main()
