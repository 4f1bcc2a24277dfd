# The live page in a real browser: it loads, draws, goes on drawing, keeps what one points at, survives a reload and the loss of
# rank 0, and tells how the run ended. The screenshots stay in the build's folder.
# ctest: TIMEOUT 300
# builds: release
import json
import math
import os
import re
import signal
import sys
import unittest
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "support"))
from browser import Browser, find_browser  # noqa: E402
from pages import PageCase  # noqa: E402
from ranks import skip  # noqa: E402
from training import TINY, lockstep, rows_of  # noqa: E402

ARTEFACTS = Path(os.environ["LOCKSTEP_BUILD_DIR"])


class InABrowser(PageCase):
    def setUp(self):
        super().setUp()
        self.browser = Browser()
        self.addCleanup(self.browser.close)

    def step(self):
        return int(self.browser.value("document.documentElement.dataset.step") or 0)

    def wait_beyond(self, step):
        self.browser.wait_for(f"Number(document.documentElement.dataset.step) > {step}")

    def words(self, selector):
        return self.browser.value(f"document.querySelector({json.dumps(selector)}).textContent")

    def wait_for_news(self):
        """Until the page has drawn once more, with other numbers."""
        self.wait_beyond(self.step() + 1)

    def place_in(self, plot, share):
        """Coordinates within a plot of curves."""
        box = self.browser.value(f"""(() => {{ const box = document.querySelector('svg[data-plot={plot}]').getBoundingClientRect();
            return [box.left, box.top, box.width, box.height]; }})()""")
        return box[0] + box[2] * share, box[1] + box[3] / 2

    def range_of(self, plot):
        label = self.browser.value(f"document.querySelector('svg[data-plot={plot}]').getAttribute('aria-label')")
        return [float(step) for step in re.search(r"from step (\S+) to (\S+):", label).groups()]

    def ticks(self, plot):
        """Values and heights of the labels at the left."""
        return self.browser.value(f"""[...document.querySelectorAll('svg[data-plot={plot}] > text[text-anchor=end]')]
            .map(label => [Number(label.textContent), Number(label.getAttribute('y'))])""")

    def check_what_stays(self):
        """A drag that lasts longer than it takes for news to come, what is pointed at, and what is selected."""
        browser = self.browser
        before = self.range_of("loss")
        browser.mouse("Moved", *self.place_in("loss", 0.3))
        browser.mouse("Pressed", *self.place_in("loss", 0.3))
        browser.mouse("Moved", *self.place_in("loss", 0.5))
        self.wait_for_news()
        self.assertTrue(browser.value("document.querySelector('svg[data-plot=loss] .chosen') !== null"))
        browser.mouse("Moved", *self.place_in("loss", 0.6))
        browser.mouse("Released", *self.place_in("loss", 0.6))
        self.assertFalse(browser.value("document.querySelector('#zoom-out').hidden"))
        chosen = self.range_of("loss")
        self.assertGreater(chosen[0], before[0])
        self.wait_for_news()
        self.assertEqual(self.range_of("loss"), chosen)
        self.assertEqual(self.range_of("speed"), chosen)
        browser.value("document.querySelector('#zoom-out').click()")
        self.assertEqual(self.range_of("loss")[0], before[0])
        browser.mouse("Moved", *self.place_in("speed", 0.5))
        browser.wait_for("document.querySelector('svg[data-plot=speed] .tip') !== null")
        self.wait_for_news()
        self.assertTrue(browser.value("document.querySelector('svg[data-plot=speed] .tip') !== null"))
        browser.mouse("Moved", 1, 1)
        browser.value("getSelection().selectAllChildren(document.querySelector('#checkpoints code'))")
        selected = browser.value("getSelection().toString()")
        self.wait_for_news()
        self.assertRegex(selected, "^blake3:[0-9a-f]{64}$")
        self.assertEqual(browser.value("getSelection().toString()"), selected)
        browser.value("getSelection().removeAllRanges()")

    def check_log_scale(self):
        """Heights go with values, and after a click with their logarithms."""
        for scale in (lambda value: value, math.log):
            ticks = self.ticks("loss")
            self.assertGreater(len(ticks), 2)
            slopes = [(y - ticks[0][1]) / (scale(value) - scale(ticks[0][0])) for value, y in ticks[1:]]
            self.assertLess(max(slopes) - min(slopes), 1e-3 * abs(slopes[0]))
            self.browser.value("document.querySelector('#log').click()")

    def check_content(self, out):
        """What stands in tiles and tables is what the run told."""
        tiles = dict(self.browser.value("[...document.querySelectorAll('#figures div')].map(each => [...each.children].map(part => part.textContent))"))
        for name in ("step", "loss", "validation", "correct tokens", "tokens/s", "time left", "workers", "tokens", "passes over the data"):
            self.assertIn(name, tiles)
        self.assertRegex(tiles["time left"], r"^[0-9.]+ (ms|s)$|^\d+m\d\ds$|^\d+h\d\dm$")
        self.assertRegex(tiles["communication hidden"], r"^\d+ %$")
        self.assertRegex(tiles["step"], r"^\d+ of 2000$")
        saved = next(row for row in rows_of(out) if row.get("event") == "saved")
        self.assertIn(saved["name"] + saved["hash"], self.words("#checkpoints"))
        self.assertRegex(self.words("#phases table"), r"rank 2 \(.*pid \d+\)")
        self.assertIn("save-every25", self.words("#settings"))
        # Not every step hides a part of its communication.
        self.browser.wait_for("document.querySelector('svg[data-plot=phases]').textContent.includes('hidden')")

    def test_a_slow_rank_and_a_run_that_is_cut_off(self):
        browser = self.browser
        run, url = self.start("--steps", 4000, "--workers", 3, "--no-balance", LOCKSTEP_FAULT="rank=1 step=1 at=lane do=slow ms=100")
        browser.open(url)
        marked = "document.querySelector('svg[data-plot=phases]').textContent.includes('slow')"
        # Ranks look for one in every tenth step; the mark stays in those between.
        browser.wait_for(f"Number(document.documentElement.dataset.step) > 15 && Number(document.documentElement.dataset.step) % 10 > 0 && {marked}")
        self.assertIn("rank 1 takes", self.words("#phases p"))
        run.kill()
        browser.wait_for("document.querySelector('#state').textContent === 'no answer'")
        self.assertIn("does not answer", self.words("#note"))

    def test_many_runs_can_be_told_apart(self):
        runs = self.folder / "runs"
        for i in range(4):
            (runs / f"other-{i}").mkdir(parents=True)
            (runs / f"other-{i}" / "metrics.jsonl").write_text("".join(
                json.dumps({"step": step, "loss": 6 - i - step / 10, "tokens": 1, "seconds": 1, "val_loss": 5}) + "\n" for step in range(1, 10)))
        run, url = self.start("--steps", 4000, "--out", runs / "own", "--eval-every", 2)
        self.browser.open(url)
        self.wait_beyond(2)
        self.browser.wait_for("document.querySelectorAll('#runs input').length === 5")
        self.browser.value("document.querySelectorAll('#runs input:not(:checked)').forEach(box => box.click())")
        self.browser.wait_for("document.querySelectorAll('svg[data-plot=loss] path[data-points]').length === 10")
        looks = self.browser.value("""[...document.querySelectorAll('#runs label')].map(label => {
            const mark = label.querySelector('.mark');
            return [label.querySelector('.curve').getAttribute('stroke-dasharray'), mark.getAttribute('d') + mark.getAttribute('fill').includes('paper')]; })""")
        for kind in zip(*looks):
            self.assertEqual(len(set(kind)), 5, looks)
        # The curves have the looks of the samples.
        dashes = self.browser.value("[...document.querySelectorAll('svg[data-plot=loss] path[data-points]')].map(path => path.getAttribute('stroke-dasharray'))")
        self.assertEqual(set(dashes), {dash for dash, _ in looks})
        self.assertIn("training", self.words("#plots .legend"))
        self.end(run)

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
        self.assertEqual(browser.value("document.querySelectorAll('#plots svg[data-plot]').length"), 4)
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
        self.check_log_scale()
        browser.wait_for("document.querySelectorAll('#checkpoints code').length > 0")
        self.check_what_stays()
        self.check_content(out)
        # Rank 0 is lost: the page is still there, tells of it, and goes on.
        first = int(re.search(r"pid (\d+)", json.loads(self.get(url, "api/run")[1])["ranks"][0]["name"])[1])
        os.kill(first, signal.SIGKILL)
        browser.wait_for("[...document.querySelectorAll('#events td')].some(cell => cell.textContent === 'lost')")
        self.wait_beyond(self.step() + 3)
        browser.wait_for("[...document.querySelectorAll('#events td')].some(cell => cell.textContent === 'joined')")
        self.wait_beyond(self.step() + 30)
        self.assertIn("lost", browser.value("document.querySelector('svg[data-plot=loss] text.event').textContent"))
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
        self.assertEqual(self.words("#state"), "stopped")
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
    if not find_browser():
        skip("no chromium")
    unittest.main()
