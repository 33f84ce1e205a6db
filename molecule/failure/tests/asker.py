"""A client that asks the known question all the time, and what it has got."""

import json
import subprocess
import threading
import time
from typing import NamedTuple

from faults import HEAD, PLAN, container

SENTENCE = (
    "every layer of this model lives on some worker of your cluster and each one must move the answer one word forward so if you can "
    "read this sentence then all of them computed it right"
)
URL = f"http://127.0.0.1:{PLAN['head']['port']}/v1/completions"
PAUSE = 0.2
WORDS = 8
"""Of the sentence, that are asked for again and again: every layer of the model is needed for each of them."""


class Asked(NamedTuple):
    """One question; ``answer`` is None where none came."""

    began: float
    ended: float
    answer: str | None
    words: int = len(SENTENCE.split())
    """That were asked for."""
    tokens_per_second: float | None = None

    @property
    def right(self):
        return self.answer is not None and self.answer.split() == SENTENCE.split()[: self.words]


def ask(seconds=60, **more):
    """:param more: further keys of the question."""
    question = json.dumps({"prompt": "", "temperature": 0, **more})
    argv = ["podman", "exec", container(HEAD), "curl", "--silent", f"--max-time={seconds}", f"--data={question}", URL]
    began = time.time()
    said = subprocess.run(argv, capture_output=True, text=True, check=False).stdout
    try:
        reply = json.loads(said)
        speed = reply.get("timings", {}).get("predicted_per_second")
        words = more.get("max_tokens", len(SENTENCE.split()))
        return Asked(began, time.time(), reply["choices"][0]["text"], words, speed)
    except (ValueError, KeyError):
        return Asked(began, time.time(), None)


class Asker:
    """Asks in a thread until it is closed."""

    def __init__(self):
        self.all = []
        self.closing = threading.Event()
        self.thread = threading.Thread(target=self._run)

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, *_error):
        self.closing.set()
        self.thread.join()

    def _run(self):
        while not self.closing.wait(PAUSE):
            self.all.append(ask(max_tokens=WORDS))

    @property
    def wrong(self):
        return [asked for asked in self.all if asked.answer is not None and not asked.right]

    def recovered(self, since, seconds):
        """When the first of two right answers in a row came that were asked for after ``since``; None if none did in so many seconds."""
        deadline = time.time() + seconds
        while time.time() < deadline:
            later = [asked for asked in list(self.all) if asked.began >= since]
            for index, asked in enumerate(later[:-1]):
                if all(other.right for other in later[index : index + 2]):
                    return asked.ended
            time.sleep(PAUSE)
        return None
