"""How long it takes to read the header of a model with a vocabulary of 150,000 tokens, with scores, types and merges.

Writes the header of such a model to a temporary folder, and reads it from there and from a web server on this machine. Prints one JSON
object; the figures in docs/performance.md come from it.
"""

from __future__ import annotations

import json
import random
import statistics
import sys
import tempfile
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp.model import gguf, header_summary
from ansible_collections.llamacpp.cluster.plugins.module_utils.models import web
from first_run import ROOT, machine

sys.path.insert(0, str(ROOT / "tests" / "unit"))
import gguf_files as files

TOKENS = 150_000
LAYERS = 80
RUNS = 11


def model() -> bytes:
    """A header, and zeros in place of the tensors. The words have lengths like those of a byte-pair vocabulary."""
    chance = random.Random(1)
    words = ["".join(chance.choices("abcdefgh ", k=chance.randint(1, 12))) for _token in range(TOKENS)]
    keys = [
        ("general.architecture", files.STRING, "llama"),
        ("llama.block_count", files.U32, LAYERS),
        ("llama.embedding_length", files.U32, 256),
        ("llama.attention.head_count", files.U32, 4),
        ("llama.context_length", files.U32, 131072),
        ("tokenizer.ggml.tokens", files.ARRAY, (files.STRING, words)),
        ("tokenizer.ggml.scores", files.ARRAY, (files.F32, [0.0] * TOKENS)),
        ("tokenizer.ggml.token_type", files.ARRAY, (5, [1] * TOKENS)),
        ("tokenizer.ggml.merges", files.ARRAY, (files.STRING, [f"{word[:3]} {word[3:]}" for word in words])),
    ]
    parts = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
    return files.model(keys, [(f"blk.{layer}.{part}.weight", (256,), 12) for layer in range(LAYERS) for part in parts])


class Handler(BaseHTTPRequestHandler):
    data = b""
    sent = 0

    def do_GET(self) -> None:
        first, last = map(int, self.headers["Range"].removeprefix("bytes=").split("-"))
        part = self.data[first : last + 1]
        Handler.sent += len(part)
        self.send_response(206)
        self.send_header("Content-Length", str(len(part)))
        self.send_header("Content-Range", f"bytes {first}-{first + len(part) - 1}/{len(self.data)}")
        self.end_headers()
        self.wfile.write(part)

    def log_message(self, *arguments: object) -> None:
        pass


def median(work) -> float:
    """Milliseconds."""
    found = []
    for _run in range(RUNS):
        started = time.perf_counter()
        summary = header_summary.summarize(work())
        found.append((time.perf_counter() - started) * 1000)
        assert (summary["vocabulary"], summary["layers"]) == (TOKENS, LAYERS)
    return round(statistics.median(found), 1)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.gguf"
        Handler.data = model()
        path.write_bytes(Handler.data)
        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        Thread(target=server.serve_forever, daemon=True).start()
        from_file = median(lambda: gguf.read_path(str(path)))
        from_server = median(lambda: web.read_model([f"http://127.0.0.1:{server.server_port}/model.gguf"]))
        server.shutdown()
    print(
        json.dumps(
            {
                "machine": machine(),
                "tokens": TOKENS,
                "runs": RUNS,
                "header_bytes": len(Handler.data) - LAYERS * 7 * 160,
                "path_ms": from_file,
                "url_ms": from_server,
                "url_bytes": Handler.sent // RUNS,
            }
        )
    )


if __name__ == "__main__":
    main()
