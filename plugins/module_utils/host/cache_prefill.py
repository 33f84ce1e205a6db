# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Fills the caches of workers with their tensors: from a cache beside them, from a copy of the model on their host, or from the head.

What is there already is read from the folders themselves (rpc_upload.fingerprint), so nothing is written down, and each call goes on where the one before
stopped. A file that a full disk or a power failure cut off is not the tensor that is wanted, and so it is written again.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, NamedTuple

from ansible_collections.llamacpp.cluster.plugins.module_utils.common import commands, errors, reading
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.files import existing
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.units import MIB
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp import rpc, rpc_upload
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp.model import gguf
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.host_types import PrefillTensor

FILE = re.compile(r"[0-9a-f]{16}")
"""How a worker names the files of its cache."""
MOST_FILES = 100_000
MOST_WORKERS = 16
"""To which the head sends at once (GGML_RPC_MAX_SERVERS)."""
STEP_SECONDS = 10.0
"""After which a module returns with what is done so far, for the progress."""
SECONDS_TO_START = 60.0
MOST_SECONDS = 3600.0
"""For one call: a large tensor may take half an hour."""
SLOWEST = 5 * MIB
"""Bytes per second that are waited for. Assumed: a twentieth of a link of 1 Gbit/s."""
ROOM = 1024 * MIB
"""What stays free on a disk."""


class PrefillError(Exception):
    """Tensors cannot be put into a cache; the message is a part of a sentence that says why."""


class Tensor(NamedTuple):
    """A tensor that a worker is to have."""

    name: str
    bytes: int
    fingerprint: str


def by_name(tensors: Iterable[Mapping[str, Any]]) -> dict[str, Tensor]:
    """Tensors that ``describe`` found, as a module returned them."""
    return {value["name"]: Tensor(value["name"], value["bytes"], value["fingerprint"]) for value in tensors}


def run(module: Any, work: Callable[[], dict[str, Any]]) -> Any:
    """What a module's work returns, done as the account that it names."""
    path = module.params["path"]
    try:
        with errors.reported(module):
            return commands.work_as(module.params["account"], lambda: reading.from_disk(path, work, MOST_SECONDS))
    except (RuntimeError, KeyError) as error:
        module.fail_json(msg=f"the caches of workers are not filled: {error}")


def names_of(rows: Iterable[PrefillTensor]) -> dict[str, int]:
    """Names of the tensors of these rows of the plan, and their bytes."""
    names = {}
    for row in rows:
        for layer in ("",) if row.layers is None else row.layers:
            names[row.name.replace("*", str(layer), 1)] = row.bytes
    return names


def describe(path: str, names: Mapping[str, int]) -> list[Tensor]:
    """The tensors of a model that have these names and sizes.

    :raises PrefillError: the model cannot be read.
    """
    with _reading(path):
        places = gguf.places(path)
        wanted = [(name, places[name]) for name, size in names.items() if name in places and places[name].bytes == size]
        with _files({place.path for _name, place in wanted}) as files:
            return [
                Tensor(name, place.bytes, rpc_upload.fingerprint(files[place.path], place.offset, place.bytes))
                for name, place in wanted
            ]


@contextmanager
def _reading(path: str) -> Iterator[None]:
    try:
        yield
    except gguf.GGUFError as error:
        raise PrefillError(f"{path} {error}") from error
    except EOFError:
        raise PrefillError(f"{path} became shorter while it was read") from None
    except OSError as error:
        raise PrefillError(f"{path} cannot be read: {error.strerror or error}") from error


@contextmanager
def _files(paths: set[str]) -> Iterator[dict[str, IO[bytes]]]:
    """These files, open."""
    files: dict[str, IO[bytes]] = {}
    try:
        for path in paths:
            files[path] = reading.open_file(path, follow=True)
        yield files
    finally:
        for file in files.values():
            file.close()


def cached_tensors(folder: Path) -> dict[str, Path]:
    """Fingerprint of each tensor that is in a cache → its file.

    :param folder: ``rpc`` in LLAMA_CACHE; it may be missing.
    """
    found: dict[str, Path] = {}
    with suppress(FileNotFoundError, NotADirectoryError), os.scandir(folder) as entries:
        for count, entry in enumerate(entries):
            if count >= MOST_FILES:
                raise PrefillError(f"{folder} has more than {MOST_FILES} files: remove those that no model uses")
            with suppress(OSError, EOFError):
                size = entry.stat(follow_symlinks=False).st_size
                if FILE.fullmatch(entry.name) and size > rpc_upload.THRESHOLD:
                    with reading.open_file(entry.path) as stream:
                        found[rpc_upload.fingerprint(stream, 0, size)] = Path(entry.path)
    return found


class Worker(NamedTuple):
    """A worker whose cache is filled; the fields are those of the plan."""

    name: str
    folder: Path
    """``rpc`` in its LLAMA_CACHE."""
    argv: Sequence[str]
    """Of an instance on loopback that lends the processor."""
    endpoint: str
    """Of that instance."""
    environment: Mapping[str, str]
    fork: str
    """Whose protocol it speaks."""


def missing(worker: Worker, wanted: Sequence[Tensor]) -> list[Tensor]:
    """Those that are not in its cache; of tensors that are alike one."""
    there = cached_tensors(worker.folder)
    return list({tensor.fingerprint: tensor for tensor in wanted if tensor.fingerprint not in there}.values())


def link(worker: Worker, lacking: Sequence[Tensor], beside: Sequence[Path]) -> list[Tensor]:
    """Links what other caches of this host have into the worker's, and returns those tensors.

    :param beside: folders of the others.
    """
    found: dict[str, Path] = {}
    for folder in beside:
        found.update(cached_tensors(folder))
    linked = []
    for tensor in lacking:
        source = found.get(tensor.fingerprint)
        if source:
            worker.folder.mkdir(parents=True, exist_ok=True)
            target = worker.folder / source.name
            with suppress(OSError):
                target.unlink(missing_ok=True)
                os.link(source, target, follow_symlinks=False)
                linked.append(tensor)
    return linked


def copies(path: str, lacking: Sequence[Tensor]) -> list[Tensor]:
    """Those tensors that the model at this path of this host has, too; none where there is no such file."""
    if not os.path.exists(path):
        return []
    own = {
        (tensor.name, tensor.fingerprint)
        for tensor in describe(path, {tensor.name: tensor.bytes for tensor in lacking})
    }
    return [tensor for tensor in lacking if (tensor.name, tensor.fingerprint) in own]


def check_room(folder: Path, lacking: Sequence[Tensor]) -> None:
    """:raises PrefillError: the disk has no room for them."""
    needed, free = sum(tensor.bytes for tensor in lacking), shutil.disk_usage(existing(folder)).free
    if free < needed + ROOM:
        raise PrefillError(
            f"{needed // MIB} MiB of tensors do not fit into {folder}, where {free // MIB} MiB are free and {ROOM // MIB} MiB stay free"
        )


def give(path: str, endpoint: str, form: rpc_upload.Form, tensors: Sequence[Tensor], until: float) -> list[Tensor]:
    """Gives a worker tensors of the model at ``path``, one at least, and returns them.

    :param endpoint: ADDRESS:PORT.
    :param until: moment of time.monotonic after which no other tensor is begun.
    :raises PrefillError: one does not arrive.
    """
    address, port = endpoint.rsplit(":", 1)
    largest = max(tensor.bytes for tensor in tensors)
    seconds = max(until - time.monotonic(), 0) + SECONDS_TO_START + 2 * largest / SLOWEST
    given: list[Tensor] = []
    with _reading(path):
        places = gguf.places(path)
        with _files({places[tensor.name].path for tensor in tensors if tensor.name in places}) as files:
            try:
                with rpc_upload.Worker(address, int(port), form, largest, seconds) as worker:
                    for tensor in tensors:
                        if given and time.monotonic() >= until:
                            break
                        place = places.get(tensor.name)
                        if not place or place.bytes != tensor.bytes:
                            raise PrefillError(f"{path} has no tensor {tensor.name} of {tensor.bytes} bytes any more")
                        worker.give(files[place.path], place.offset, place.bytes)
                        given.append(tensor)
            except rpc_upload.TransferError as error:
                raise PrefillError(f"the worker at {endpoint} {error}") from error
    return given


def give_here(worker: Worker, path: str, tensors: Sequence[Tensor], until: float) -> list[Tensor]:
    """``give`` to an instance of the worker's program on loopback, which runs meanwhile and shares its cache."""
    with tempfile.TemporaryFile() as log:
        environment = {"PATH": commands.SEARCH, "HOME": str(worker.folder.parent), "LC_ALL": "C", **worker.environment}
        try:
            process = subprocess.Popen(
                worker.argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd="/", env=environment
            )
        except OSError as error:
            raise PrefillError(f"{worker.argv[0]} does not run: {error.strerror}") from error
        try:
            form = wait(worker.endpoint, worker.fork, lambda: process.poll() is None)
            return give(path, worker.endpoint, form, tensors, until)
        finally:
            process.kill()
            process.wait()


def wait(endpoint: str, fork: str, runs: Callable[[], bool] = lambda: True) -> rpc_upload.Form:
    """Waits until a worker that nobody uses answers; returns how messages to it are written.

    :param fork: whose protocol it speaks.
    :param runs: whether it still can answer.
    :raises PrefillError: it does not, or nobody read its generation.
    """
    address, port = endpoint.rsplit(":", 1)
    end = time.monotonic() + SECONDS_TO_START
    while True:
        answer = rpc.probe(address, int(port))
        if not runs():
            raise PrefillError(f"the worker at {endpoint} ended as it started")
        if answer.state == "ok":
            break
        if time.monotonic() > end:
            raise PrefillError(f"the worker at {endpoint} did not start: {answer.detail}")
        time.sleep(0.2)
    form = rpc_upload.form_of(fork, answer.protocol)
    if not form:
        raise PrefillError(
            f"the worker at {endpoint} speaks protocol {answer.protocol} of {fork}, whose messages are not known"
        )
    return form


def send(path: str, targets: Sequence[tuple[str, str, Sequence[Tensor]]], until: float) -> dict[str, Any]:
    """``give`` to several workers at once: endpoint → the tensors that were given, or the PrefillError.

    :param targets: endpoint, fork and tensors of each.
    """

    def one(target: tuple[str, str, Sequence[Tensor]]) -> Any:
        endpoint, fork, tensors = target
        try:
            return give(path, endpoint, wait(endpoint, fork), tensors, until)
        except PrefillError as error:
            return error

    with ThreadPoolExecutor(MOST_WORKERS) as threads:
        return dict(zip((target[0] for target in targets), threads.map(one, targets)))


def worker_of(given: Mapping[str, Any]) -> Worker:
    """A worker of the plan."""
    seed, folder = given["seed"], Path(rpc_upload.cache_of(given["environment"]))
    return Worker(given["name"], folder, seed["argv"], seed["endpoint"], given["environment"], seed["fork"])
