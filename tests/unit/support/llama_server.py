"""A stand-in for llama-server on this machine, of which a test says what it answers."""

import http.server
import json
import threading
import time

import pytest


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.server.looked.append(self.path)
        text = self.server.texts.get(self.path, self.server.metrics if self.path == "/metrics" else "{}")
        time.sleep(self.server.loads if self.path.startswith("/props") else 0)
        self.answer(self.server.health if self.path == "/health" else 200 if text else 501, text)

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append((self.headers.get("Authorization"), body))
        usage = {"usage": {"completion_tokens": 1}, "timings": {"predicted_per_second": 5}}
        self.answer(self.server.status, json.dumps({"choices": [{"text": "hello"}], **usage}))

    def answer(self, status, text):
        self.send_response(status)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_arguments):
        pass


@pytest.fixture
def server():
    """``looked`` are the paths that it was asked for, ``asked`` the keys and questions that it got."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as served:
        served.texts, served.loads = {}, 0
        served.health, served.status, served.metrics, served.looked, served.asked = 200, 200, "", [], []
        threading.Thread(target=served.serve_forever, args=(0.02,), daemon=True).start()
        yield served
        served.shutdown()
