"""A headless Chromium, driven over its debugging pipe; needs nothing but the browser."""

import base64
import json
import os
import select
import shutil
import subprocess
import tempfile
import time

NAMES = ("chromium", "chromium-browser", "google-chrome")


def find_browser():
    return next(filter(None, map(shutil.which, NAMES)), None)


class Browser:
    """One page. Every wait has a limit. `problems` are what the page's scripts have thrown or logged as errors."""

    def __init__(self, limit=60):
        self.limit = limit
        self.problems = []
        self._number = 0
        self._pending = b""
        self._folder = tempfile.TemporaryDirectory()
        to_browser, from_us = os.pipe()
        from_browser, to_us = os.pipe()
        self._write, self._read = from_us, from_browser

        def give_pipes():  # it reads from 3 and writes to 4
            copies = [os.dup(to_browser), os.dup(to_us)]
            os.dup2(copies[0], 3)
            os.dup2(copies[1], 4)

        self._process = subprocess.Popen(
            [find_browser(), "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
             "--hide-scrollbars", "--remote-debugging-pipe", f"--user-data-dir={self._folder.name}", "about:blank"],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, preexec_fn=give_pipes, close_fds=False)
        os.close(to_browser)
        os.close(to_us)
        self._session = None
        targets = self._call("Target.getTargets")["targetInfos"]
        target = next(each["targetId"] for each in targets if each["type"] == "page")
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self._call(f"{domain}.enable")

    def close(self):
        os.close(self._write)  # it ends when nobody drives it any more
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._read)
        for _ in range(50):  # its helpers may still write there
            try:
                self._folder.cleanup()
                return
            except OSError:
                time.sleep(0.1)

    def _call(self, method, **parameters):
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        end = time.monotonic() + self.limit
        while True:
            answer = self._next(end)
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise AssertionError(f"{method}: {answer['error']}")
                return answer["result"]
            self._hear(answer)

    def _hear(self, event):
        parameters = event.get("params", {})
        if event.get("method") == "Runtime.exceptionThrown":
            self.problems.append(str(parameters["exceptionDetails"].get("exception", {}).get("description", parameters)))
        if event.get("method") == "Log.entryAdded" and parameters["entry"]["level"] == "error":
            self.problems.append(parameters["entry"]["text"])

    def _next(self, end):
        while b"\0" not in self._pending:
            if not select.select([self._read], [], [], max(0, end - time.monotonic()))[0]:
                raise AssertionError("the browser does not answer")
            piece = os.read(self._read, 1 << 16)
            if not piece:
                raise AssertionError("the browser has gone")
            self._pending += piece
        message, self._pending = self._pending.split(b"\0", 1)
        return json.loads(message)

    def open(self, url):
        result = self._call("Page.navigate", url=url)
        if "errorText" in result:
            raise AssertionError(f"{url}: {result['errorText']}")

    def reload(self):
        self._call("Page.reload", ignoreCache=True)

    def value(self, expression):
        result = self._call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in result:
            raise AssertionError(f"{expression}: {result['exceptionDetails']}")
        return result["result"].get("value")

    def wait_for(self, expression):
        """Until it is true; returns its value."""
        end = time.monotonic() + self.limit
        while True:
            try:
                value = self.value(expression)
            except AssertionError:  # the document may be going or coming
                value = None
            if value:
                return value
            if time.monotonic() > end:
                raise AssertionError(f"never came true: {expression}\n{self.value('document.body.innerText')[:2000]}\n{self.problems}")
            time.sleep(0.05)

    def resize(self, width, height, mobile=False):
        self._call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=mobile)

    def colour_scheme(self, name):
        self._call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": name}])

    def mouse(self, kind, x, y):
        """A real one: kind is Moved, Pressed or Released; of the left button."""
        pressed = {"button": "left", "clickCount": 1} if kind != "Moved" else {}
        self._call("Input.dispatchMouseEvent", type=f"mouse{kind}", x=x, y=y, **pressed)

    def screenshot(self, path):
        picture = base64.b64decode(self._call("Page.captureScreenshot", format="png")["data"])
        path.write_bytes(picture)
        return picture
