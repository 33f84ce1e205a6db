# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A worker as the launcher runs it: its cache, and what is wrong with it.

A worker serves one client at a time, and has no timeout. So one that hangs keeps the head away until it is ended.
"""

from __future__ import annotations

import os
import stat
import subprocess
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from ansible_collections.llamacpp.cluster.plugins.module_utils.launcher import (
    exporter,
    journal,
    progress,
    tunnel,
)
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp import rpc

PRUNE_SECONDS = 300
WHOLE_SECONDS = 30.0
"""So often files are compared with the sizes of tensors; one that was written to meanwhile may be on its way."""
STOP_SECONDS = 2.0
"""A worker has nothing to put away. As long as llama-server is given."""
GONE_SECONDS = 30.0
NOT_EXPORTED = exporter.Exporter()


def prune(folder: Path, limit: int) -> list[str]:
    """Removes files, those that were used longest ago first, until the folder holds no more than so many bytes; returns their names."""
    files = []
    for place, _folders, inside in os.walk(folder):
        for name in inside:
            path = Path(place, name)
            try:
                found = path.lstat()
            except OSError:
                continue
            if stat.S_ISREG(found.st_mode):
                files.append((max(found.st_atime, found.st_mtime), found.st_size, path))
    held = sum(size for _used, size, _path in files)
    removed, reason = [], None
    for _used, size, path in sorted(files):
        if held <= limit:
            break
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            reason = error.strerror
            continue
        held -= size
        removed.append(path.name)
    if reason:
        journal.say(f"{folder} could not be brought below {limit // rpc.MIB} MiB: {reason}")
    return removed


def _bound(cache: Path, limit: int) -> None:
    removed = prune(cache, limit)
    if removed:
        journal.say(f"removed {len(removed)} files from {cache} to keep it below {limit // rpc.MIB} MiB")


def known_sizes(cache: Path, sizes: Iterable[int]) -> set[int]:
    """These sizes of tensors and those that were known before, which are kept beside the cache: it may hold tensors of other models."""
    path = cache.parent / "sizes.json"
    before = journal.read_back(path, lambda told: {int(size) for size in told["sizes"]}) or set()
    known = before | set(sizes)
    if known != before:
        with suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
        journal.write_state(path, {"sizes": sorted(known)})
    return known


def remove_cut(cache: Path, sizes: Iterable[int], age: float = 0.0) -> list[str]:
    """Removes files of sizes that no tensor has, and returns their names: a full disk or a power failure cut them off, and a worker does
    not notice that when it reads them.

    :param age: seconds for which nobody has written to a file that is removed.
    """
    known, removed = known_sizes(cache, sizes), []
    with suppress(OSError), os.scandir(cache) as entries:
        for entry in entries:
            with suppress(OSError):
                found = entry.stat(follow_symlinks=False)
                if stat.S_ISREG(found.st_mode) and found.st_size not in known and time.time() - found.st_mtime >= age:
                    os.unlink(entry.path)
                    removed.append(entry.name)
    if removed:
        journal.say(
            f"removed {len(removed)} files from {cache}, whose sizes are not those of a tensor: they were cut off"
        )
    return removed


class Guard:
    """What is watched about a worker."""

    def __init__(self, process: int, port: str) -> None:
        self.process = process
        self.port = port
        self.kept_alive: set[str] = set()
        self.lasting = progress.Lasting()

    def fault(self) -> str | None:
        """Why the worker has to be ended."""
        try:
            look = progress.look_at(self.process, self.kept_alive, {self.port})
        except OSError:
            return None
        now = time.monotonic()
        stopped = self.lasting.seconds("stopped", look.activity.state == "T", now)
        if stopped >= progress.STOPPED_SECONDS:
            return f"the worker has been stopped by a signal for {stopped:.0f} s"
        own = [link for link in look.links if progress.port_of(link.local) == self.port]
        gone = [link for link in own if link.state == progress.CLOSE_WAIT]
        ignored = self.lasting.seconds("gone", bool(gone), now)
        if ignored >= GONE_SECONDS:
            return f"the worker has not noticed for {ignored:.0f} s that its client {gone[0].remote} has gone"
        return None


def run(
    argv: list[str],
    cache: Path | None,
    limit: int,
    pause: float = PRUNE_SECONDS,
    port: str = "",
    look: float = 1.0,
    sizes: Sequence[int] = (),
    exports: exporter.Exporter = NOT_EXPORTED,
    tunnels: tunnel.Tunnels = tunnel.NONE,
) -> int:
    """Runs a worker, and keeps its cache below the limit in bytes and whole; returns the exit status of the service.

    :param sizes: bytes of the planned model's tensors; files are not compared with them where there are none.
    :param port: at which the worker listens; empty where nobody watches it.
    :param look: seconds between two looks at it.
    :param exports: what writes its metrics.
    """
    progress.end_when_asked()
    if cache and sizes:
        remove_cut(cache, sizes)
    if cache:
        _bound(cache, limit)
    # A worker has to go on ignoring SIGPIPE, which a connection that was given up would end it with.
    process = subprocess.Popen(
        argv, stdin=subprocess.DEVNULL, preexec_fn=progress.end_with_parent, restore_signals=False
    )
    exports.begins()
    guard = Guard(process.pid, port) if port and progress.ON_LINUX else None
    bounded = compared = time.monotonic()
    try:
        while process.poll() is None:
            journal.alive()
            tunnels.keep()
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeout=min(look, pause) if guard or tunnels.tunnels else pause)
            watched = guard and process.poll() is None
            fault = journal.spared("the worker is not watched", guard.fault) if guard and watched else None
            if fault:
                journal.say(f"{fault}: it is started again")
                process.kill()
                process.wait()
                exports.ended("hung")
                break
            if cache and sizes and time.monotonic() - compared >= WHOLE_SECONDS:
                remove_cut(cache, sizes, WHOLE_SECONDS)
                compared = time.monotonic()
            if cache and process.poll() is None and time.monotonic() - bounded >= pause:
                _bound(cache, limit)
                bounded = time.monotonic()
            exports.of_worker()
        else:
            journal.say(f"the worker ended {progress.ended_how(process.returncode)}")
            exports.ended("ended")
        exports.of_worker()
    except SystemExit:
        exports.stop()
        progress.stop(process, STOP_SECONDS)
        raise
    return 1
