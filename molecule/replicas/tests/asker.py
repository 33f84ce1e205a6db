"""Repeats a request until it is stopped, and writes time, duration and text of each answer."""

import json
import sys
import time
import urllib.request

URL, KEY, NUMBER = sys.argv[1:]
QUESTION = {
    "messages": [{"role": "user", "content": f"Count from {NUMBER}."}],
    "max_tokens": 8,
    "temperature": 0,
    "cache_prompt": False,
}


def ask():
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}"}
    request = urllib.request.Request(f"{URL}/v1/chat/completions", json.dumps(QUESTION).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=300) as reply:
            return json.load(reply)["choices"][0]["message"]["content"].strip()
    except (OSError, ValueError, KeyError) as error:
        return f"failed: {error!r}"


while True:
    started = time.monotonic()
    answer = ask()
    print(json.dumps([time.time(), time.monotonic() - started, answer]), flush=True)
