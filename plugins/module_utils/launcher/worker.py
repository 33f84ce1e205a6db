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
NO_EXPORTER = exporter.Exporter()


def known_sizes(cache: Path, sizes: Iterable[int]) -> set[int]:
    """These sizes of tensors and those that were known before, which are kept beside the cache: it may hold tensors of other models."""
    path = cache.parent / "sizes.json"
    recorded_sizes = journal.read_back(path, lambda record: {int(size) for size in record["sizes"]}) or set()
    all_sizes = recorded_sizes | set(sizes)
    if all_sizes != recorded_sizes:
        with suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
        journal.write_state(path, {"sizes": sorted(all_sizes)})
    return all_sizes


def tidy(cache: Path, limit: int, sizes: Sequence[int] = (), age: float = 0.0) -> list[str]:
    """Removes files of sizes that no tensor has, which a full disk or a power failure cut off: a worker does not notice that when it reads them. Then
    those that were used longest ago, until there are no more than so many bytes. Returns the names of all of them.

    :param sizes: bytes of the planned model's tensors; files are not compared with them where there are none.
    :param age: seconds for which nobody has written to a file that was cut off.
    """
    all_sizes = known_sizes(cache, sizes) if sizes else set()
    files, removed = [], []
    for place, _folders, inside in os.walk(cache):
        for path in (Path(place, name) for name in inside):
            with suppress(OSError):
                status = path.lstat()
                if stat.S_ISREG(status.st_mode):
                    cut = all_sizes and status.st_size not in all_sizes and time.time() - status.st_mtime >= age
                    files.append((not cut, max(status.st_atime, status.st_mtime), status.st_size, path))
    total_bytes = sum(size for _whole, _used_at, size, _path in files)
    for whole, _used_at, size, path in sorted(files):
        if whole and total_bytes <= limit:
            break
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            journal.log_once(f"{path} could not be removed: {error.strerror}")
            continue
        total_bytes -= size
        removed.append(path.name)
    if removed:
        journal.log(f"removed {len(removed)} files from {cache}: cut off, or beyond its {limit // rpc.MIB} MiB")
    return removed


class Guard:
    """What is watched about a worker."""

    def __init__(self, process: int, port: str) -> None:
        self.process = process
        self.port = port
        self.keepalive_inodes: set[str] = set()
        self.timers = progress.ConditionTimer()

    def fault(self) -> str | None:
        """Why the worker has to be ended."""
        try:
            sample = progress.sample_process(self.process, self.keepalive_inodes, {self.port})
        except OSError:
            return None
        timestamp = time.monotonic()
        stopped = self.timers.seconds("stopped", sample.activity.state == "T", timestamp)
        if stopped >= progress.STOPPED_SECONDS:
            return f"the worker has been stopped by a signal for {stopped:.0f} s"
        client_links = [link for link in sample.links if progress.port_of(link.local) == self.port]
        gone = [link for link in client_links if link.state == progress.CLOSE_WAIT]
        ignored = self.timers.seconds("gone", bool(gone), timestamp)
        if ignored >= GONE_SECONDS:
            return f"the worker has not noticed for {ignored:.0f} s that its client {gone[0].remote} has gone"
        return None


def run(
    argv: list[str],
    cache: Path | None,
    limit: int,
    tidy_seconds: float = TIDY_SECONDS,
    port: str = "",
    poll_seconds: float = 1.0,
    sizes: Sequence[int] = (),
    exports: exporter.Exporter = NO_EXPORTER,
    tunnels: tunnel.Tunnels = tunnel.NO_TUNNELS,
) -> int:
    """Runs a worker, and keeps its cache below the limit in bytes and whole; returns the exit status of the service.

    :param sizes: as of tidy.
    :param port: at which the worker listens; empty where nobody watches it.
    :param poll_seconds: seconds between two looks at it.
    :param exports: what writes its metrics.
    """
    progress.exit_on_signals()
    if cache:
        tidy(cache, limit, sizes)
    # A worker has to go on ignoring SIGPIPE, which a connection that was given up would end it with.
    process = subprocess.Popen(
        argv, stdin=subprocess.DEVNULL, preexec_fn=progress.end_with_parent, restore_signals=False
    )
    exports.note_start()
    guard = Guard(process.pid, port) if port and progress.ON_LINUX else None
    tidied = time.monotonic()
    try:
        while process.poll() is None:
            journal.notify_watchdog()
            tunnels.maintain()
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeout=min(poll_seconds, tidy_seconds) if guard or tunnels.tunnels else tidy_seconds)
            watched = guard and process.poll() is None
            fault = journal.run_safely("the worker is not watched", guard.fault) if guard and watched else None
            if fault:
                journal.log(f"{fault}: it is started again")
                process.kill()
                process.wait()
                exports.note_end("hung")
                break
            if cache and time.monotonic() - tidied >= tidy_seconds:
                tidy(cache, limit, sizes, tidy_seconds)
                tidied = time.monotonic()
            exports.export_worker()
        else:
            journal.log(f"the worker ended {progress.ended_how(process.returncode)}")
            exports.note_end("ended")
        exports.export_worker()
    except SystemExit:
        exports.stop()
        progress.stop(process, STOP_SECONDS)
        raise
    return 1
