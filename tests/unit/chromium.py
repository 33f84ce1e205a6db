"""Chromium without a screen, driven by its DevTools protocol over two pipes."""

import base64
import json
import os
import select
import shutil
import subprocess
import time

PROGRAM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
SECONDS = 60


class Page:
    """A page as a person sees it: what it asks for, what it complains of, and how it looks."""

    def __init__(self, browser, session):
        self._browser, self._session = browser, session

    def call(self, method, **parameters):
        return self._browser.call(method, parameters, self._session)

    def open(self, address, width=1400, height=1000, dark=False):
        """Loads a page; what it asked for and complained of stands in ``requests`` and ``complaints`` afterwards."""
        for domain in ("Page", "Network", "Log", "Runtime"):
            self.call(f"{domain}.enable")
        self.call("Network.setCacheDisabled", cacheDisabled=True)
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        features = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.call("Emulation.setEmulatedMedia", media="", features=features)
        before = len(self._browser.events)
        self.call("Page.navigate", url=address)
        self._browser.wait_for("Page.loadEventFired", self._session, before)
        self.evaluate("new Promise(done => setTimeout(done, 200))")
        events = [event for event in self._browser.events[before:] if event.get("sessionId") == self._session]
        self.requests = [
            event["params"]["request"]["url"] for event in events if event["method"] == "Network.requestWillBeSent"
        ]
        self.complaints = [
            event["params"]
            for event in events
            if event["method"] in ("Log.entryAdded", "Runtime.consoleAPICalled", "Runtime.exceptionThrown")
        ]

    def evaluate(self, script):
        """The value of an expression of JavaScript; a promise is waited for."""
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def screenshot(self, path):
        data = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True)["data"]
        path.write_bytes(base64.b64decode(data))

    def pdf(self, path):
        path.write_bytes(base64.b64decode(self.call("Page.printToPDF", printBackground=False)["data"]))


class Browser:
    def __init__(self, folder):
        asked, self._write = os.pipe()
        self._read, answered = os.pipe()

        def pipes():
            first, second = os.dup(asked), os.dup(answered)
            os.dup2(first, 3)
            os.dup2(second, 4)

        quiet = ["--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--hide-scrollbars"]
        options = ["--headless=new", "--no-sandbox", *quiet]
        self._process = subprocess.Popen(
            [PROGRAM, *options, "--remote-debugging-pipe", f"--user-data-dir={folder}", "about:blank"],
            preexec_fn=pipes,
            close_fds=False,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "HOME": str(folder), "XDG_CONFIG_HOME": str(folder), "XDG_CACHE_HOME": str(folder)},
        )
        os.close(asked)
        os.close(answered)
        self.events, self._answers, self._rest, self._number = [], {}, b"", 0

    def __enter__(self):
        return self

    def __exit__(self, *_error):
        self._process.kill()
        self._process.wait()
        os.close(self._write)
        os.close(self._read)

    def _receive(self, deadline):
        ready, _write, _error = select.select([self._read], [], [], max(0, deadline - time.monotonic()))
        data = os.read(self._read, 1 << 20) if ready else b""
        if not data:
            raise TimeoutError("Chromium does not answer")
        *messages, self._rest = (self._rest + data).split(b"\0")
        for message in map(json.loads, messages):
            if "id" in message:
                self._answers[message["id"]] = message
            else:
                self.events.append(message)

    def call(self, method, parameters=None, session=None):
        self._number += 1
        number = self._number
        message = {"id": number, "method": method, "params": parameters or {}}
        message.update({"sessionId": session} if session else {})
        os.write(self._write, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + SECONDS
        while number not in self._answers:
            self._receive(deadline)
        answer = self._answers.pop(number)
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']}")
        return answer["result"]

    def wait_for(self, event, session, first):
        deadline = time.monotonic() + SECONDS
        while not any(each["method"] == event and each.get("sessionId") == session for each in self.events[first:]):
            self._receive(deadline)

    def page(self):
        target = self.call("Target.createTarget", {"url": "about:blank"})["targetId"]
        return Page(self, self.call("Target.attachToTarget", {"targetId": target, "flatten": True})["sessionId"])
