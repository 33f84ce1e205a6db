"""A server of models and releases that sends whole files and ranges, and breaks off or refuses as tests ask it to."""

import hashlib
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from ansible_collections.llamacpp.cluster.plugins.module_utils.common import typed_json
from ansible_collections.llamacpp.cluster.plugins.module_utils.models import download
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.host_types import ModelFilePlan

SIZE = 3_000_000
DATA = bytes(range(256)) * (SIZE // 256)
SIZE = len(DATA)
SHA = hashlib.sha256(DATA).hexdigest()


class Server:
    """Sends ``files`` by ranges, and at most ``cut`` bytes for a connection. ``faults`` answer in its place, once for each entry."""

    def __init__(self, tls=None):
        """:param tls: an SSLContext."""
        self.files, self.faults, self.asked, self.sent, self.cut = {}, {}, [], 0, None
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                path = self.path.partition("?")[0]
                outer.asked.append((self.path, dict(self.headers)))
                faults = outer.faults.get(path)
                if faults:
                    (faults.pop(0) if isinstance(faults, list) else faults)(self)
                elif path in outer.files:
                    outer.send(self, outer.files[path])
                else:
                    self.send_error(404)

            def log_message(self, *arguments):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        if tls:
            self.server.socket = tls.wrap_socket(self.server.socket, server_side=True)
        self.url = f"{'https' if tls else 'http'}://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()

    def send(self, handler, data):
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", handler.headers["Range"] or "")
        first, last = (int(asked[1]), int(asked[2] or len(data))) if asked else (0, len(data))
        if first >= len(data):
            answer(416)(handler)
            return
        last = min(last, len(data) - 1)
        part = {"Content_Range": f"bytes {first}-{last}/{len(data)}"} if asked else {}
        answer(206 if asked else 200, Content_Length=last - first + 1, **part)(handler)
        end = last + 1 if self.cut is None else min(last + 1, first + self.cut)
        while first < end:
            piece = data[first : min(end, first + (1 << 16))]
            self.sent += len(piece)  # before the client has it and looks
            handler.wfile.write(piece)
            first += len(piece)
        handler.close_connection = True

    def stop(self):
        self.server.shutdown()
        self.server.server_close()


def answer(status, body=b"", **headers):
    """A fault: this reply, whatever is asked for."""

    def send(handler):
        handler.send_response(status)
        common = {"Content_Length": len(body), "Content_Type": "application/octet-stream"}
        for name, value in {**common, **headers}.items():
            handler.send_header(name.replace("_", "-"), str(value))
        handler.end_headers()
        handler.wfile.write(body)

    return send


def planned(server, models, name="m.gguf", data=DATA, **more):
    """A file of the server, as the plan has it."""
    path, digest = str(models / "source" / name), hashlib.sha256(data).hexdigest()
    file = {"name": name, "path": path, "url": f"{server.url}/{name}", "bytes": len(data), "sha256": digest}
    return {**file, "role": "model", **more}


def parsed(*files):
    """Files as a module takes them."""
    return [typed_json.parse(ModelFilePlan, file) for file in files]


def below(models):
    return sorted(str(path.relative_to(models)) for path in models.rglob("*") if path.is_file())


def serve(monkeypatch):
    """A server, until the test that uses it is over."""
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(download, "RETRY_PAUSES_SECONDS", (0.0, 0.01, 0.01))
    made = Server()
    made.files["/m.gguf"] = DATA
    yield made
    made.stop()
