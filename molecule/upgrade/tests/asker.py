"""Asks the beginning of the known answer every 100 ms until it is stopped; writes a line for each question: when it ended, and how.

The first words come from all layers like any others, and take less of the processors that the test's hosts share.
"""

import json
import sys
import time
import urllib.error
import urllib.request

URL, EXPECTED = sys.argv[1:]
QUESTION = {"prompt": "", "temperature": 0, "max_tokens": len(EXPECTED.split()), "cache_prompt": False}
EVERY_SECONDS, PATIENCE_SECONDS = 0.1, 20


def ask():
    request = urllib.request.Request(URL, json.dumps(QUESTION).encode(), {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=PATIENCE_SECONDS) as reply:
            text = json.load(reply)["choices"][0]["text"].strip()
    except (OSError, ValueError, KeyError):
        return "none"
    return "right" if text == EXPECTED else f"wrong {text!r}"


while True:
    started = time.monotonic()
    said = ask()
    print(f"{time.time():.3f} {said}", flush=True)
    time.sleep(max(0.0, EVERY_SECONDS - (time.monotonic() - started)))
