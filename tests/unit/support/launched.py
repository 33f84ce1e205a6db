"""The launcher as it is installed on a host, but hasty, with stand-ins for the programs: real processes with real connections."""

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
import urllib.request

import pytest
from ansible_collections.llamacpp.cluster.plugins.action.plan import LAUNCHER_FILES
from ansible_collections.llamacpp.cluster.plugins.module_utils.launcher import server as llama_server
from ansible_collections.llamacpp.cluster.plugins.module_utils.launcher import serving
from test_rpc import Server, worker

from support.hosts import free_port

SILENCE = 3.0
HASTY = """
import os, runtime
from ansible_collections.llamacpp.cluster.plugins.module_utils.launcher import exporter, progress, server, serving, tunnel, worker
tunnel.SHARED_MEMORY_FOLDER = os.path.dirname(__file__)
progress.MAX_SUSPENDED_SECONDS = 0.5
progress.BUSY_SHARE = 1 / 15  # /health is asked for fifty times as often as else, and answered by Python
server.HEALTH_POLL_SECONDS, server.MAX_UNHEALTHY_SECONDS = 0.2, 1.0
worker.MAX_HALF_CLOSED_SECONDS = 1.0
serving.WRITE_SECONDS, serving.LOADING_WRITE_SECONDS = 0.2, 0.2
exporter.EXPORT_INTERVAL_SECONDS = 0.2
runtime.RETURN_POLL_SECONDS, runtime.MIN_STABLE_SECONDS, runtime.HANDSHAKE_TIMEOUT_SECONDS = 0.1, 1.0, 0.5
runtime.SAMPLE_SECONDS = worker.SAMPLE_SECONDS = 0.1
raise SystemExit(runtime.main())
"""
SERVER = """
import http.server, os, socket, stat, sys, threading, time
port, how = int(sys.argv[1]), sys.argv[2]
endpoints = [one for word in sys.argv[3:] if word[0].isdigit() and ":" in word for one in word.split(",")]
if "--alias" in sys.argv and stat.S_ISFIFO(os.fstat(0).st_mode):
    threading.Thread(target=lambda: (sys.stdin.read(), os._exit(1)), daemon=True).start()
if how == "loads for ever":
    time.sleep(600)
def load():
    held[:] = [socket.create_connection((e.split(":")[0], int(e.split(":")[1]))) for e in endpoints]
    print("model buffer size", how, *endpoints, flush=True)

counted = 0
held, queue, asleep, asked = [], threading.Lock(), False, time.monotonic()
idle = [float(after) for word, after in zip(sys.argv, sys.argv[1:]) if word == "--sleep-idle-seconds"]
load()

def fall_asleep():
    global asleep
    while idle:
        time.sleep(0.1)
        with queue:
            if not asleep and time.monotonic() - asked > idle[0]:
                asleep = True
                held.clear()

def wake():
    global asleep, asked
    with queue:
        if asleep:
            load()
            until = time.monotonic() + 3
            while time.monotonic() < until:
                pass
        asleep, asked = False, time.monotonic()

threading.Thread(target=fall_asleep, daemon=True).start()
for part in range(8 if how == "loads slowly" else 0):
    held[0].sendall(b"compute")
    held[0].recv(100)

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        if self.path == "/metrics":
            global counted
            counted += 1
            self.wfile.write(b"# TYPE llamacpp:prompt_tokens_total counter\\nllamacpp:prompt_tokens_total %d\\n" % counted)
            self.wfile.write(b"llamacpp:requests_processing 2\\nllamacpp:predicted_tokens_seconds 9.5\\nllamacpp:tokens_predicted_total nan\\n")
        if self.path == "/props" and self.headers["Authorization"] == (sys.argv[-1] == "keys" and "Bearer secret" or None):
            with queue:
                self.wfile.write(b'{"is_sleeping":true}' if asleep else b'{"is_sleeping":false}')
    def do_POST(self):
        wake()
        asked = self.rfile.read(int(self.headers["Content-Length"]))
        print("asked", asked, self.headers["Authorization"], flush=True)
        if how == "hangs":
            time.sleep(600)
        if how == "asks its worker":
            held[0].sendall(b"compute")
            held[0].recv(100)
        if how == "computes":
            until = time.monotonic() + 5
            while time.monotonic() < until:
                pass
        if how == "is slow":
            for token in range(8):
                held[0].sendall(b"compute")
                held[0].recv(100)
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"the answer")
    def log_message(self, *a):
        pass

http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""
"""A stand-in for llama-server that behaves in one way: ``hangs``, ``is slow`` …"""
ROUTER = """
import http.server, itertools, json, pathlib, subprocess, sys, threading, time, urllib.request
port, models, lock, child, loaded, place = int(sys.argv[1]), json.loads(sys.argv[2]), threading.Lock(), None, None, None
places = itertools.count(port + 1)

def forward(lines, place):
    for line in lines:
        print("[%5s] %s" % (place, line), end="", flush=True)

def load(name):
    global child, loaded, place
    if child and loaded == name and child.poll() is None:
        return
    if child:
        child.kill()
        child.wait()
    loaded, place = name, str(next(places))
    print("spawning server instance with name=%s on port %s" % (name, place), flush=True)
    program = str(pathlib.Path(sys.argv[0]).with_name("llama_server.py"))
    argv = [sys.executable, program, place, *models[name], "--port", place, "--rpc", models[name][1], "--alias", name]
    child = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    threading.Thread(target=forward, args=(child.stdout, place), daemon=True).start()
    while child.poll() is None:
        try:
            return urllib.request.urlopen("http://127.0.0.1:" + place + "/health").close()
        except OSError:
            time.sleep(0.02)

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        said, status = b"no model", 400
        if "model" in json.loads(body):
            with lock:
                load(json.loads(body)["model"])
            try:
                said, status = urllib.request.urlopen("http://127.0.0.1:" + place + self.path, body).read(), 200
            except OSError as error:
                said, status = str(error).encode(), 500
        self.send_response(status)
        self.end_headers()
        self.wfile.write(said)
    def log_message(self, *a):
        pass

http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""
"""A stand-in for llama-server as a router: model → how its process behaves, and its workers, as one word."""
WORKER = """
import socket, sys, time
listener = socket.create_server(("127.0.0.1", int(sys.argv[1])), backlog=1)
print("listens", flush=True)
while True:
    client, _ = listener.accept()
    print("serves", flush=True)
    if sys.argv[2] == "hangs":
        time.sleep(600)
    while client.recv(4096):
        client.sendall(b"answer")
    client.close()
    print("client gone", flush=True)
"""


class Cluster:
    """A folder with the launcher, and what was started of it."""

    def __init__(self, folder):
        self.folder, self.state, self.started = folder, folder / "state", []
        self.state.mkdir()
        for file in LAUNCHER_FILES:
            (folder / file.name).write_bytes(file.content)
        for name, text in (
            ("hasty.py", HASTY),
            ("llama_server.py", SERVER),
            ("rpc_server.py", WORKER),
            ("router.py", ROUTER),
        ):
            (folder / name).write_text(text)
        self.port = free_port()

    def start(self, *argv):
        """Starts the launcher as a service would, without the collection on its path."""
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        argv = [sys.executable, str(self.folder / "hasty.py"), *map(str, argv)]
        process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment)
        self.started.append(process)
        return process

    def words(self, endpoints):
        own = ["--url", f"http://127.0.0.1:{self.port}", "--state", self.state, "--silence", SILENCE]
        return [*own, *(word for endpoint in endpoints for word in ("--worker", endpoint))]

    def argv(self, how, endpoints):
        return [sys.executable, str(self.folder / "llama_server.py"), str(self.port), how, *endpoints]

    def head(self, how, endpoints=(), extra=(), more=(), until_it_is=None):
        """Starts the launcher of a head.

        :param more: arguments of llama-server.
        :param until_it_is: the state for which this waits.
        """
        process = self.start("head", *self.words(endpoints), *extra, "--", *self.argv(how, endpoints), *more)
        if until_it_is:
            until(lambda: self.is_now(until_it_is))
        return process

    def router(self, models, endpoints, extra=()):
        """Starts the launcher of a head that serves several models.

        :param models: name → how it behaves, and its workers.
        """
        program = [sys.executable, self.folder / "router.py", self.port, json.dumps(models)]
        return self.start("head", "--router", *self.words(endpoints), *extra, "--", *program)

    def worker(self, how="answers"):
        port = free_port()
        program = [sys.executable, self.folder / "rpc_server.py", port, how]
        process = self.start("worker", "--port", port, "--", *program)
        lines_until(process, "listens")
        return process, port

    def ask(self, seconds=60, **question):
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}/completion", json.dumps(question).encode())
        with urllib.request.urlopen(request, timeout=seconds) as answer:
            return answer.read()

    def client(self, text=b"POST /completion HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}"):
        until(lambda: llama_server.is_healthy(f"http://127.0.0.1:{self.port}"))
        connection = socket.create_connection(("127.0.0.1", self.port))
        connection.sendall(text)
        return connection

    def record(self):
        return json.loads((self.state / serving.RECORD_FILE).read_text())

    def is_now(self, state):
        with contextlib.suppress(OSError, ValueError):
            return self.record()["state"] == state


@pytest.fixture
def cluster(tmp_path):
    made = Cluster(tmp_path)
    yield made
    while WORKERS:
        WORKERS.pop().listener.close()
    for process in made.started:
        process.kill()
        process.wait()
        os.set_blocking(process.stdout.fileno(), False)
        print((process.stdout.read() or b"").decode("utf-8", "replace"))
        process.stdout.close()


def healed(process, text):
    """Whether the launcher says this in one line, and ends for the service manager to start it anew."""
    said = lines_until(process, text)
    assert process.wait(50) == 1
    return said[-1]


WORKERS = []
"""What the running test has of them; the fixture ``cluster`` closes them."""


def a_worker(pause=0.0, port=0):
    """A worker of protocol 7 that answers everything else after a pause."""
    shake = worker((7, 0, 0))

    def script(client):
        first = client.recv(1, socket.MSG_PEEK)
        if first == b"c":
            while client.recv(100):
                time.sleep(pause)
                client.sendall(b"computed")
        else:
            shake(client)

    server = Server(script, port)
    WORKERS.append(server)
    return server, f"127.0.0.1:{server.port}"


def until(condition, seconds=50):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        found = condition()
        if found:
            return found
        time.sleep(0.05)
    raise AssertionError("it did not happen in time")


def lines_until(process, text):
    seen = []
    while True:
        line = process.stdout.readline().decode()
        assert line, f"it ended: {seen}"
        seen.append(line)
        if text in line:
            return seen


def children(process):
    found = subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True, check=False)
    return [*map(int, found.stdout.split())]
