"""Requests the beginning of the known answer every 100 ms until it is stopped, and writes the time and outcome of each request.

The first words need all layers, like the other words, but less of the processors that the test's hosts share.
"""

import json
import sys
import time
import urllib.error
import urllib.request

URL, EXPECTED = sys.argv[1:]
QUESTION = {"prompt": "", "temperature": 0, "max_tokens": len(EXPECTED.split()), "cache_prompt": False}
INTERVAL_SECONDS, TIMEOUT_SECONDS = 0.1, 20


def ask():
    request = urllib.request.Request(URL, json.dumps(QUESTION).encode(), {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS) as reply:
            text = json.load(reply)["choices"][0]["text"].strip()
    except (OSError, ValueError, KeyError):
        return "none"
    return "right" if text == EXPECTED else f"wrong {text!r}"


while True:
    started = time.monotonic()
    outcome = ask()
    print(f"{time.time():.3f} {outcome}", flush=True)
    time.sleep(max(0.0, INTERVAL_SECONDS - (time.monotonic() - started)))
