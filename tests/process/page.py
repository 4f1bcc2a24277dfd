# What the live page of a run serves, to whom, for how long; and the same data in a report.
# ctest: TIMEOUT 300 COST 25
# builds: release
import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import unittest
import urllib.error
import urllib.request
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "support"))
from pages import PageCase  # noqa: E402
from ranks import reserved_port  # noqa: E402
from training import LOCKSTEP, TINY, lockstep, rows_of  # noqa: E402


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
        code, output, errors = self.end(run, signal.SIGINT)
        self.assertEqual(code, 128 + signal.SIGINT, errors)
        self.assertEqual(rows_of(out)[-1]["how"], "stopped")

    def test_the_end_is_seen(self):
        """Whoever asks once in a while learns how the run ended before the page goes."""
        for state, code, arguments in (("done", 0, ("--steps", 4)), ("halted", 3, ("--steps", 50, "--workers", 2, "--lr", "1e38", "--warmup", 0))):
            with self.subTest(state):
                run, url = self.start(*arguments, slow=150)
                told = None
                with contextlib.suppress(OSError):
                    while told is None or told["state"] in ("unknown", "running"):
                        told = json.loads(self.get(url, "api/run")[1])
                        time.sleep(0.05)
                self.assertEqual(told["state"], state)
                self.assertEqual(self.end(run, 0)[0], code)

    def test_readers_that_take_nothing_hold_up_no_step(self):
        """More of them than there are places: some never end their request, some never read an answer."""
        run, url = self.start("--steps", 4000)
        step = self.wait_for_step(url, 2)["step"]
        place = ("127.0.0.1", int(url.rstrip("/").rsplit(":", 1)[1]))
        readers = []
        for i in range(80):
            reader = self.enterContext(socket.socket())
            reader.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            reader.settimeout(30)
            reader.connect(place)
            reader.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n" * 20 if i % 2 else b"GET / HTT")
            readers.append(reader)
        self.wait_for_step(url, step + 10)
        readers[-2].setblocking(False)
        with self.assertRaises(BlockingIOError):  # this one is still waited for
            readers[-2].recv(1)
        self.assertEqual(self.end(run, signal.SIGINT)[0], 128 + signal.SIGINT)

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


if __name__ == "__main__":
    unittest.main()
