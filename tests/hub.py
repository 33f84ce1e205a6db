"""A server that plays Hugging Face and GitHub's releases, from a folder: for tests, and as a program.

    python tests/hub.py --folder FOLDER --port PORT --address ADDRESS

FOLDER/OWNER/NAME/… are the files of the repository OWNER/NAME, and FOLDER/plain/… is
served as it is; /OWNER/NAME/releases/download/TAG/FILE leads to FOLDER/plain/TAG/FILE. ``HF_ENDPOINT`` is the server's address.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import threading
import urllib.parse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

PIECE = 1 << 20
API = re.compile(r"/api/models/(?P<repo>[^/]+/[^/]+)(?:/revision/(?P<revision>.+))?")
RESOLVE = re.compile(r"/(?P<repo>[^/]+/[^/]+)/resolve/(?P<revision>[^/]+)/(?P<file>.+)")
RELEASE = re.compile(r"/[^/]+/[^/]+/releases/download/(?P<path>[^/]+/[^/]+)")


def commit_of(repo, revision="main"):
    """Of a repository at a branch; a commit is its own."""
    if re.fullmatch("[0-9a-f]{40}", revision):
        return revision
    return hashlib.sha1(f"{repo}@{revision}".encode()).hexdigest()


class Hub:
    """The server, on a free port of 127.0.0.1 unless told otherwise.

    ``tokens``: repository → token that it takes; None for one that nobody is given. ``asked``: path, headers and status of each request.
    ``redirect``: address of another Hub that sends the files, as a CDN does. ``faults``: path → function that is given the handler in place of the
    answer; it returns True where the answer is to follow nevertheless. ``revisions``: branches and tags that exist.
    """

    def __init__(self, folder, port=0, address="127.0.0.1"):
        self.folder = Path(folder)
        self.tokens, self.asked, self.faults, self.redirect = {}, [], {}, None
        self.revisions = {"main"}
        self.known = {}
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self):
                path = urllib.parse.unquote(urllib.parse.urlsplit(self.path).path)
                fault = outer.faults.get(path)
                if fault and not fault(self):
                    return
                outer.answer(self, path)

            do_HEAD = do_GET

            def log_request(self, code="-", size="-"):
                outer.asked.append((self.path, dict(self.headers), int(code)))

            def log_message(self, *arguments):
                pass

        self.server = ThreadingHTTPServer((address, port), Handler)
        self.server.daemon_threads = True
        self.port = self.server.server_port
        self.url = f"http://{address}:{self.port}"

    def start(self):
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def stop(self):
        self.server.shutdown()
        self.server.server_close()

    def digest(self, path):
        """sha256 of a file, computed once."""
        status = path.stat()
        key = (path, status.st_size, status.st_mtime_ns)
        if key not in self.known:
            with path.open("rb") as stream:
                self.known[key] = hashlib.file_digest(stream, "sha256").hexdigest()
        return self.known[key]

    def answer(self, handler, path):
        if found := API.fullmatch(path):
            self.repository(handler, found["repo"], found["revision"] or "main")
        elif found := RESOLVE.fullmatch(path):
            self.resolved(handler, found["repo"], found["revision"], found["file"])
        elif found := RELEASE.fullmatch(path):
            self.reply(handler, 302, b"", {"Location": f"{self.url}/{urllib.parse.quote(found['path'])}?sp=r&sig=abc"})
        else:
            self.send(handler, self.folder / "plain" / path.lstrip("/"))

    def allowed(self, handler, repo):
        """Whether the request may see a repository; answers it where it may not, as Hugging Face does."""
        if repo not in self.tokens and (self.folder / repo).is_dir():
            return True
        given = (handler.headers.get("Authorization") or "").removeprefix("Bearer ")
        wanted = self.tokens.get(repo, "")
        if repo in self.tokens and given and given == wanted:
            return True
        if repo in self.tokens and given:
            code, error, text = (
                403,
                "GatedRepo",
                f"Access to model {repo} is restricted and you are not in the authorized list.",
            )
        elif repo in self.tokens:
            code, error, text = 401, "GatedRepo", f"Access to model {repo} is restricted. You must be authenticated."
        else:
            code, error, text = 401 if not given else 404, "RepoNotFound", "Repository not found"
        self.refuse(handler, code, error, text)
        return False

    def refuse(self, handler, code, error, text):
        self.reply(
            handler, code, json.dumps({"error": text}).encode(), {"X-Error-Code": error, "X-Error-Message": text}
        )

    def reply(self, handler, code, data, headers):
        handler.send_response(code)
        for name, value in {"Content-Type": "application/json", **headers}.items():
            handler.send_header(name, value)
        handler.send_header("Content-Length", str(len(data)))
        handler.end_headers()
        if handler.command != "HEAD":
            handler.wfile.write(data)

    def repository(self, handler, repo, revision):
        if not self.allowed(handler, repo):
            return
        commits = {commit_of(repo, name) for name in self.revisions}
        if revision not in self.revisions and revision not in commits:
            self.refuse(handler, 404, "RevisionNotFound", f"Invalid rev id: {revision}")
            return
        files = sorted(path for path in (self.folder / repo).rglob("*") if path.is_file())
        siblings = [
            {
                "rfilename": str(path.relative_to(self.folder / repo)),
                "size": path.stat().st_size,
                "blobId": "0" * 40,
                **(
                    {"lfs": {"sha256": self.digest(path), "size": path.stat().st_size, "pointerSize": 135}}
                    if path.suffix == ".gguf"
                    else {}
                ),
            }
            for path in files
        ]
        about = {"id": repo, "modelId": repo, "sha": commit_of(repo, revision), "siblings": siblings, "private": False}
        self.reply(handler, 200, json.dumps(about).encode(), {})

    def resolved(self, handler, repo, revision, name):
        if not self.allowed(handler, repo):
            return
        path = self.folder / repo / name
        if not path.is_file() or ".." in name.split("/"):
            self.refuse(handler, 404, "EntryNotFound", "Entry not found")
        elif self.redirect:
            self.reply(
                handler,
                302,
                b"",
                {"Location": f"{self.redirect}/{urllib.parse.quote(f'{repo}/{name}')}?X-Amz-Signature=abc"},
            )
        else:
            self.send(handler, path)

    def send(self, handler, path):
        """A file, or the part of it that a range asks for."""
        if not path.is_file():
            self.reply(handler, 404, b"not found", {"Content-Type": "text/plain"})
            return
        size = path.stat().st_size
        first, last, code = 0, size - 1, 200
        wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", handler.headers.get("Range", ""))
        if wanted:
            first, last, code = int(wanted[1]), min(int(wanted[2] or size), size - 1), 206
        if first > last:
            self.reply(handler, 416, b"", {"Content-Range": f"bytes */{size}"})
            return
        handler.send_response(code)
        handler.send_header("Content-Type", "application/octet-stream")
        handler.send_header("Content-Length", str(last - first + 1))
        handler.send_header("Accept-Ranges", "bytes")
        handler.send_header("ETag", f'"{self.digest(path)}"')
        if code == 206:
            handler.send_header("Content-Range", f"bytes {first}-{last}/{size}")
        handler.end_headers()
        if handler.command != "HEAD":
            self.write(handler, path, first, last + 1 - first)

    def write(self, handler, path, offset, count):
        """The body: the place for faults of transfers."""
        with path.open("rb") as stream:
            stream.seek(offset)
            while count:
                piece = stream.read(min(count, PIECE))
                try:
                    handler.wfile.write(piece)
                except OSError:
                    return
                count -= len(piece)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", required=True, type=Path)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--address", default="127.0.0.1")
    arguments = parser.parse_args()
    hub = Hub(arguments.folder, arguments.port, arguments.address)
    print(hub.url, flush=True)
    hub.server.serve_forever()
