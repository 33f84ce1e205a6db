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

TIDY_SECONDS = 60.0
"""So often the cache is looked through; a file that was written to meanwhile may be on its way."""
STOP_SECONDS = 2.0
"""A worker has nothing to put away. As long as llama-server is given."""
GONE_SECONDS = 30.0
NOT_EXPORTED = exporter.Exporter()


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


def tidy(cache: Path, limit: int, sizes: Sequence[int] = (), age: float = 0.0) -> list[str]:
    """Removes files of sizes that no tensor has, which a full disk or a power failure cut off: a worker does not notice that when it reads them. Then
    those that were used longest ago, until there are no more than so many bytes. Returns the names of all of them.

    :param sizes: bytes of the planned model's tensors; files are not compared with them where there are none.
    :param age: seconds for which nobody has written to a file that was cut off.
    """
    known = known_sizes(cache, sizes) if sizes else set()
    files, removed = [], []
    for place, _folders, inside in os.walk(cache):
        for path in (Path(place, name) for name in inside):
            with suppress(OSError):
                found = path.lstat()
                if stat.S_ISREG(found.st_mode):
                    cut = known and found.st_size not in known and time.time() - found.st_mtime >= age
                    files.append((not cut, max(found.st_atime, found.st_mtime), found.st_size, path))
    held = sum(size for _whole, _used, size, _path in files)
    for whole, _used, size, path in sorted(files):
        if whole and held <= limit:
            break
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            journal.say_once(f"{path} could not be removed: {error.strerror}")
            continue
        held -= size
        removed.append(path.name)
    if removed:
        journal.say(f"removed {len(removed)} files from {cache}: cut off, or beyond its {limit // rpc.MIB} MiB")
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
    pause: float = TIDY_SECONDS,
    port: str = "",
    look: float = 1.0,
    sizes: Sequence[int] = (),
    exports: exporter.Exporter = NOT_EXPORTED,
    tunnels: tunnel.Tunnels = tunnel.NONE,
) -> int:
    """Runs a worker, and keeps its cache below the limit in bytes and whole; returns the exit status of the service.

    :param sizes: as of tidy.
    :param port: at which the worker listens; empty where nobody watches it.
    :param look: seconds between two looks at it.
    :param exports: what writes its metrics.
    """
    progress.end_when_asked()
    if cache:
        tidy(cache, limit, sizes)
    # A worker has to go on ignoring SIGPIPE, which a connection that was given up would end it with.
    process = subprocess.Popen(
        argv, stdin=subprocess.DEVNULL, preexec_fn=progress.end_with_parent, restore_signals=False
    )
    exports.begins()
    guard = Guard(process.pid, port) if port and progress.ON_LINUX else None
    tidied = time.monotonic()
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
            if cache and time.monotonic() - tidied >= pause:
                tidy(cache, limit, sizes, pause)
                tidied = time.monotonic()
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
