# Copyright (c) 2026 the llamacpp.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Runs a worker, bounds its cache and detects its faults.

A worker serves one client at a time, and has no timeout. So a hung worker blocks the head until the launcher kills the worker.
"""

from __future__ import annotations

import os
import stat
import subprocess
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from ansible_collections.llamacpp.cluster.plugins.module_utils.launcher import exporter, journal, progress, tunnel
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp import rpc

SAMPLE_SECONDS, CLEANUP_SECONDS = 1.0, 60.0
"""Seconds between two samples of a worker, and between two inspections of its cache; files written since the last inspection may be incomplete."""
STOP_SECONDS = 2.0
"""Time to exit, as for llama-server, although a worker has nothing to save."""
MAX_HALF_CLOSED_SECONDS = 30.0
NO_EXPORTER = exporter.Exporter()


def record_tensor_sizes(cache_folder: Path, sizes: Iterable[int]) -> set[int]:
    """Add sizes of tensors to the recorded sizes, and return all sizes: the cache may contain tensors of other models."""
    path = cache_folder.parent / "sizes.json"
    recorded_sizes = journal.read_back(path, lambda record: {int(size) for size in record["sizes"]}) or set()
    all_sizes = recorded_sizes | set(sizes)
    if all_sizes != recorded_sizes:
        with suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
        journal.write_state(path, {"sizes": sorted(all_sizes)})
    return all_sizes


def clean_cache(cache_folder: Path, limit_bytes: int, sizes: Sequence[int] = (), min_age_s: float = 0.0) -> list[str]:
    """Remove files whose size matches no tensor, then the least recently used files until the rest fits the limit; return the names of removed files.
    A full disk or a power failure truncates files, and a worker does not notice that.

    :param sizes: bytes of the planned model's tensors; empty to compare none.
    :param min_age_s: seconds for which a truncated file must be unchanged.
    """
    all_sizes = record_tensor_sizes(cache_folder, sizes) if sizes else set()
    files, removed_files = [], []
    for folder, _folders, file_names in os.walk(cache_folder):
        for path in (Path(folder, name) for name in file_names):
            with suppress(OSError):
                status = path.lstat()
                if stat.S_ISREG(status.st_mode):
                    is_truncated = (
                        all_sizes and status.st_size not in all_sizes and time.time() - status.st_mtime >= min_age_s
                    )
                    files.append((not is_truncated, max(status.st_atime, status.st_mtime), status.st_size, path))
    total_bytes = sum(size for _is_complete, _use_time, size, _path in files)
    for is_complete, _use_time, size, path in sorted(files):
        if is_complete and total_bytes <= limit_bytes:
            break
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            journal.log_once(f"{path} could not be removed: {error.strerror}")
            continue
        total_bytes -= size
        removed_files.append(path.name)
    if removed_files:
        reason = f"they were truncated or the cache exceeded {limit_bytes // rpc.MIB} MiB"
        journal.log(f"files removed from {cache_folder}, because {reason}: {len(removed_files)}")
    return removed_files


class WorkerMonitor:
    def __init__(self, pid: int, port: str) -> None:
        self.pid = pid
        self.port = port
        self.keepalive_inodes: set[str] = set()
        self.timers = progress.ConditionTimer()

    def fault(self) -> str | None:
        try:
            sample = progress.sample_process(self.pid, self.keepalive_inodes, {self.port})
        except OSError:
            return None
        clock = time.monotonic()
        suspended_seconds = self.timers.seconds("stopped", sample.activity.state == "T", clock)
        if suspended_seconds >= progress.MAX_SUSPENDED_SECONDS:
            return f"the worker has been suspended (SIGSTOP) for {suspended_seconds:.0f} s"
        connections = [sock for sock in sample.sockets if progress.port_of(sock.address) == self.port]
        half_closed_connections = [sock for sock in connections if sock.state == progress.CLOSE_WAIT]
        half_closed_seconds = self.timers.seconds("client gone", bool(half_closed_connections), clock)
        if half_closed_seconds >= MAX_HALF_CLOSED_SECONDS:
            return f"the worker has not noticed for {half_closed_seconds:.0f} s that its client {half_closed_connections[0].peer} is gone"
        return None


def run_worker(
    argv: list[str],
    cache_folder: Path | None,
    limit_bytes: int,
    port: str = "",
    sizes: Sequence[int] = (),
    metrics_exporter: exporter.Exporter = NO_EXPORTER,
    tunnels: tunnel.Tunnels = tunnel.NO_TUNNELS,
) -> int:
    """Run a worker, and keep its cache intact and within the limit; return the service's exit status.

    :param sizes: as in clean_cache.
    :param port: port of the worker; empty to disable monitoring.
    """
    progress.exit_on_signals()
    if cache_folder:
        clean_cache(cache_folder, limit_bytes, sizes)
    # The worker must ignore SIGPIPE, or an abandoned connection would kill it.
    process = subprocess.Popen(
        argv, stdin=subprocess.DEVNULL, preexec_fn=progress.die_with_parent, restore_signals=False
    )
    metrics_exporter.note_start()
    guard = WorkerMonitor(process.pid, port) if port and progress.ON_LINUX else None
    last_cleanup_time = time.monotonic()
    try:
        while process.poll() is None:
            journal.notify_watchdog()
            tunnels.maintain()
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeout=SAMPLE_SECONDS if guard or tunnels.tunnels else CLEANUP_SECONDS)
            is_running = guard and process.poll() is None
            fault = journal.run_safely("the worker cannot be monitored", guard.fault) if guard and is_running else None
            if fault:
                journal.log(f"{fault}: restarting it")
                process.kill()
                process.wait()
                metrics_exporter.note_exit("hung")
                break
            if cache_folder and time.monotonic() - last_cleanup_time >= CLEANUP_SECONDS:
                clean_cache(cache_folder, limit_bytes, sizes, CLEANUP_SECONDS)
                last_cleanup_time = time.monotonic()
            metrics_exporter.export_worker()
        else:
            journal.log(f"the worker exited {progress.describe_exit(process.returncode)}")
            metrics_exporter.note_exit("ended")
        metrics_exporter.export_worker()
    except SystemExit:
        metrics_exporter.stop()
        progress.stop_process(process, STOP_SECONDS)
        raise
    return 1
