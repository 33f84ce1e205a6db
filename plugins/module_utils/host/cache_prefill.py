# Copyright (c) 2026 the llamacpp.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Fills the caches of workers before a head loads, from a copy of the model on their own host.

A worker of the same release receives the tensors over its protocol, because Python is too slow for the hash that names its cache files. The cache itself
shows what it contains (rpc_upload.fingerprint), so nothing is recorded. A truncated file has no tensor's fingerprint, so the tensor is written again.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from ansible_collections.llamacpp.cluster.plugins.module_utils.common import commands, reading
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.errors import Refusal
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.files import existing_ancestor
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.names import LOOPBACK
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.units import MIB
from ansible_collections.llamacpp.cluster.plugins.module_utils.launcher import worker as launcher
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp import rpc, rpc_upload
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp.model import gguf
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.host_types import CachePrefill, PrefillTensor

CACHE_FILE_PATTERN = re.compile(r"[0-9a-f]{16}")
"""Pattern for names of files in a worker's cache."""
START_TIMEOUT_SECONDS = 60.0
COMPARISON_TIMEOUT_SECONDS = 600.0
"""Time limit for sampling the model and the files in the cache."""
MIN_BYTES_PER_S = 5 * MIB
"""Lowest expected rate: that of a slow disk that other programs use, too."""
MIN_FREE_BYTES = 1024 * MIB
"""Space that must stay free on a disk."""


class WorkerCache(NamedTuple):
    name: str
    environment: Mapping[str, str]
    prefill: CachePrefill

    @property
    def folder(self) -> Path:
        return Path(rpc_upload.cache_path(self.environment))


def fill_cache(worker: WorkerCache, check_mode: bool = False) -> int:
    """Send a worker's cache the missing tensors that this host's models contain; return their total size.

    :raises Refusal: a model cannot be read, or the worker does not accept a tensor.
    """
    tensors = reading.run_disk_work(worker.folder, lambda: missing_tensors(worker), COMPARISON_TIMEOUT_SECONDS)
    missing_bytes = sum(tensor.bytes for tensor in tensors)
    if tensors and not check_mode:
        # The launcher that bounds the cache may serve another model, and removes files of unknown sizes.
        launcher.record_tensor_sizes(worker.folder, {tensor.bytes for tensor in worker.prefill.tensors})
        _check_free_space(worker.folder, missing_bytes)
        _send_tensors(worker, tensors)
    return missing_bytes


def missing_tensors(worker: WorkerCache) -> list[gguf.TensorLocation]:
    """Return the worker's tensors that this host's models contain but its cache lacks; a single tensor of each group of equal tensors.

    :raises Refusal: a model cannot be read.
    """
    cached_fingerprints = _cached_fingerprints(worker.folder)
    tensors = {}
    for path in dict.fromkeys(tensor.model for tensor in worker.prefill.tensors if os.path.exists(tensor.model)):
        sizes = tensor_sizes(tensor for tensor in worker.prefill.tensors if tensor.model == path)
        with _refuse_errors(path):
            for name, tensor in gguf.locate_tensors(path).items():
                if sizes.get(name) == tensor.bytes:
                    with reading.open_file(tensor.path, follows_links=True) as stream:
                        tensors[rpc_upload.fingerprint(stream, tensor.offset, tensor.bytes)] = tensor
    return [tensor for fingerprint, tensor in tensors.items() if fingerprint not in cached_fingerprints]


def tensor_sizes(tensors: Iterable[PrefillTensor]) -> dict[str, int]:
    """Return the size in bytes of each planned tensor, by name."""
    return {
        tensor.name.replace("*", str(layer), 1): tensor.bytes
        for tensor in tensors
        for layer in (("",) if tensor.layers is None else tensor.layers)
    }


@contextmanager
def _refuse_errors(path: str) -> Iterator[None]:
    try:
        yield
    except gguf.GGUFError as error:
        raise Refusal(f"{path} {error}") from error
    except (EOFError, OSError) as error:
        raise Refusal(f"{path} cannot be read: {error}") from error


def _cached_fingerprints(folder: Path) -> set[str]:
    """Return the fingerprints of the tensors in a cache, whose folder may be missing."""
    fingerprints = set()
    with suppress(FileNotFoundError, NotADirectoryError), os.scandir(folder) as entries:
        for entry in entries:
            with suppress(OSError, EOFError):
                size = entry.stat(follow_symlinks=False).st_size
                if CACHE_FILE_PATTERN.fullmatch(entry.name) and size > rpc_upload.CACHE_THRESHOLD:
                    with reading.open_file(entry.path) as stream:
                        fingerprints.add(rpc_upload.fingerprint(stream, 0, size))
    return fingerprints


def _check_free_space(folder: Path, needed_bytes: int) -> None:
    free_bytes = shutil.disk_usage(existing_ancestor(folder)).free
    if free_bytes < needed_bytes + MIN_FREE_BYTES:
        raise Refusal(
            f"{folder} has no space for {needed_bytes // MIB} MiB of tensors: {free_bytes // MIB} MiB are free, and {MIN_FREE_BYTES // MIB} MiB must stay "
            "free. Free space on this disk, then run the playbook again"
        )


def _send_tensors(worker: WorkerCache, tensors: Sequence[gguf.TensorLocation]) -> None:
    """Send the tensors to an instance of the worker's program on loopback, which shares its cache.

    :raises Refusal: the program does not run, or does not accept a tensor.
    """
    with socket.create_server((LOOPBACK, 0)) as listener:
        port = listener.getsockname()[1]
    argv = [*worker.prefill.argv, str(port)]
    environment = {"PATH": commands.SEARCH_PATH, "HOME": str(worker.folder.parent), "LC_ALL": "C", **worker.environment}
    devnull = subprocess.DEVNULL
    try:
        process = subprocess.Popen(argv, stdin=devnull, stdout=devnull, stderr=devnull, cwd="/", env=environment)
    except OSError as error:
        raise Refusal(f"{argv[0]} does not run: {error.strerror}") from error
    seconds = START_TIMEOUT_SECONDS + sum(tensor.bytes for tensor in tensors) / MIN_BYTES_PER_S
    max_bytes = max(tensor.bytes for tensor in tensors)
    try:
        wait_for_worker(port, process)
        with rpc_upload.UploadConnection(LOOPBACK, port, max_bytes, seconds) as connection:
            for tensor in tensors:
                with _refuse_errors(tensor.path), reading.open_file(tensor.path, follows_links=True) as stream:
                    connection.upload_tensor(stream, tensor.offset, tensor.bytes)
    except rpc_upload.TransferError as error:
        raise Refusal(f"the worker program on port {port} {error}") from error
    finally:
        process.kill()
        process.wait()


def wait_for_worker(port: int, process: subprocess.Popen[bytes]) -> None:
    """Wait until the worker answers.

    :raises Refusal: the worker does not answer, or its protocol is unknown.
    """
    deadline = time.monotonic() + START_TIMEOUT_SECONDS
    while (answer := rpc.probe(LOOPBACK, port)).state != "ok":
        if process.poll() is not None or time.monotonic() > deadline:
            raise Refusal(f"the worker program on port {port} did not start: {answer.detail}")
        time.sleep(0.2)
    if str(answer.protocol).partition(".")[0] not in rpc_upload.SUPPORTED_MAJORS:
        raise Refusal(f"the worker program on port {port} uses protocol {answer.protocol}, which is unknown")
