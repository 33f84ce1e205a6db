"""A client that requests the known answer continuously, and its replies."""

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
"""Number of words of the sentence in each request. Each word needs every layer of the model."""


class Reply(NamedTuple):
    """Reply to one request; ``answer`` is None without an answer."""

    began: float
    ended: float
    answer: str | None
    words: int = len(SENTENCE.split())
    """Number of requested words."""
    tokens_per_second: float | None = None

    @property
    def right(self):
        return self.answer is not None and self.answer.split() == SENTENCE.split()[: self.words]


def ask(seconds=60, **more):
    """Ask for the known answer.

    :param more: additional keys of the request.
    """
    question = json.dumps({"prompt": "", "temperature": 0, **more})
    argv = ["podman", "exec", container(HEAD), "curl", "--silent", f"--max-time={seconds}", f"--data={question}", URL]
    began = time.time()
    output = subprocess.run(argv, capture_output=True, text=True, check=False).stdout
    try:
        reply = json.loads(output)
        speed = reply.get("timings", {}).get("predicted_per_second")
        words = more.get("max_tokens", len(SENTENCE.split()))
        return Reply(began, time.time(), reply["choices"][0]["text"], words, speed)
    except (ValueError, KeyError):
        return Reply(began, time.time(), None)


class Asker:
    """Sends requests in a thread until it is closed."""

    def __init__(self):
        self.replies = []
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
            self.replies.append(ask(max_tokens=WORDS))

    @property
    def wrong(self):
        return [reply for reply in self.replies if reply.answer is not None and not reply.right]

    def recovered(self, since, seconds):
        """Return when the first of two consecutive right answers to requests after ``since`` came; None if none came within ``seconds``."""
        deadline = time.time() + seconds
        while time.time() < deadline:
            later_replies = [reply for reply in list(self.replies) if reply.began >= since]
            for index, reply in enumerate(later_replies[:-1]):
                if all(other.right for other in later_replies[index : index + 2]):
                    return reply.ended
            time.sleep(PAUSE)
        return None
