"""Whether gguf.read and llama.cpp's own reader accept the same headers: mutated ones, as many as are asked for.

Usage: python tests/benchmarks/gguf_oracle.py /usr/lib/x86_64-linux-gnu/libggml-base.so.0 1000000 [FIRST]

Needs Linux and a libggml-base of any build; it compiles nothing. Header N is always the same one. Prints one JSON object: how many both accept,
both refuse, and only one accepts, with our reasons where we are the stricter ones. Headers that we alone accept are written to wrong-N.gguf.
llama.cpp reads in a child process, which may abort.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import json
import os
import random
import re
import resource
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))
import gguf_files as files
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp.model import gguf, header_summary

BOTH, NEITHER, OURS, THEIRS = range(4)


class Parameters(ctypes.Structure):
    _fields_ = (("no_alloc", ctypes.c_bool), ("context", ctypes.POINTER(ctypes.c_void_p)))


class Oracle:
    def __init__(self, path: str) -> None:
        self.library = ctypes.CDLL(path)
        self.library.gguf_init_from_file.restype = ctypes.c_void_p
        self.library.gguf_init_from_file.argtypes = (ctypes.c_char_p, Parameters)
        self.library.gguf_free.argtypes = self.library.ggml_free.argtypes = (ctypes.c_void_p,)
        self.file = os.memfd_create("header")

    def accepts(self, data: bytes) -> bool:
        os.ftruncate(self.file, 0)
        os.pwrite(self.file, data, 0)
        tensors = ctypes.c_void_p()
        parameters = Parameters(True, ctypes.pointer(tensors))
        header = self.library.gguf_init_from_file(f"/proc/self/fd/{self.file}".encode(), parameters)
        if header:
            self.library.gguf_free(header)
            self.library.ggml_free(tensors)
        return bool(header)


def ours(data: bytes) -> tuple[str | None, float]:
    """Why we refuse it, and the seconds of processor time that this took, with the summary of what is accepted."""
    source, began, reason = files.Source(data), time.process_time(), None
    try:
        model = gguf.read("model.gguf", lambda name: source)
        with contextlib.suppress(gguf.GGUFError):
            header_summary.summarize(model)
    except gguf.GGUFError as error:
        reason = str(error)
    return reason, time.process_time() - began


def data_of(number: int) -> bytes:
    return files.fuzzed(random.Random(number))


def kind_of(reason: str) -> str:
    """A reason without the names and numbers of one header."""
    return re.sub(r"'.*'|'.*\.\.\.|\".*\"|\[.*\]|-?\b[0-9][-0-9.e+]*\b", "X", reason)


def compare(path: str, numbers: range, out: int) -> None:
    """Writes a line for each header: who accepts it, the seconds it took us, and why we refuse."""
    with open(os.devnull, "wb") as nothing:
        os.dup2(nothing.fileno(), 2)
    oracle, stream = Oracle(path), os.fdopen(out, "w", buffering=1)
    for number in numbers:
        data = data_of(number)
        reason, seconds = ours(data)
        accepted = oracle.accepts(data)
        verdict = (BOTH if accepted else OURS) if reason is None else (THEIRS if accepted else NEITHER)
        stream.write(f"{verdict} {seconds:.6f} {kind_of(reason) if verdict == THEIRS else ''}\n")
        if verdict == OURS:
            Path(f"wrong-{number}.gguf").write_bytes(data)
    stream.close()


def main() -> None:
    path, count, first = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]) if len(sys.argv) > 3 else 0
    verdicts: collections.Counter[int] = collections.Counter()
    reasons: collections.Counter[str] = collections.Counter()
    aborted: collections.Counter[str] = collections.Counter()
    slowest, began, number = 0.0, time.monotonic(), first
    while number < first + count:
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(reader)
            compare(path, range(number, first + count), writer)
            os._exit(0)
        os.close(writer)
        with os.fdopen(reader) as lines:
            for line in lines:
                verdict, seconds, reason = line.rstrip("\n").split(" ", 2)
                verdicts[int(verdict)] += 1
                reasons.update([reason] * (int(verdict) == THEIRS))
                slowest, number = max(slowest, float(seconds)), number + 1
        _pid, status = os.waitpid(child, 0)
        if number < first + count:
            reason, _seconds = ours(data_of(number))
            aborted[f"signal {status & 127 or -status}; we {'accept' if reason is None else 'refuse'}"] += 1
            number += 1
    print(
        json.dumps(
            {
                "headers": count,
                "both_accept": verdicts[BOTH],
                "both_refuse": verdicts[NEITHER],
                "only_we_accept": verdicts[OURS],
                "only_llama_cpp_accepts": dict(reasons.most_common()),
                "llama_cpp_aborts": dict(aborted),
                "slowest_s": round(slowest, 3),
                "memory_mib": resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss // 1024,
                "minutes": round((time.monotonic() - began) / 60, 1),
            },
            indent=1,
        )
    )


if __name__ == "__main__":
    main()
