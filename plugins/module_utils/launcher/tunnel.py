# Copyright (c) 2026 the llamacpp.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Tunnels between a head and its workers, run by stunnel: TLS 1.3 with a pre-shared key.

stunnel is a child of the launcher, because the kernel lets a parent inspect its children's connections. When a key file changes, stunnel reads all key
files again: existing connections stay, and new ones need the new key.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from ansible_collections.llamacpp.cluster.plugins.module_utils.launcher import journal, progress

PROGRAM_NAME = "stunnel"
SEARCH_FOLDERS = ("/usr/bin", "/usr/local/bin", "/opt/homebrew/bin")
"""Folders in which to search for stunnel, in addition to the service's PATH."""
SHARED_MEMORY_FOLDER = "/dev/shm"
"""Folder of the configuration, if it is writable: it does not depend on a disk, and nothing removes old files from it."""
STOP_SECONDS = 2.0
RESTART_INTERVAL_SECONDS = 5.0
"""Seconds between two starts of stunnel, which logs some lines each time."""
GLOBAL_OPTIONS = ("foreground = yes", "pid =", "syslog = no", "debug = warning")
TUNNEL_OPTIONS = ("sslVersion = TLSv1.3", "TIMEOUTbusy = 10", "TIMEOUTidle = 31536000")
"""Options of each tunnel. A silent stranger is disconnected. An idle cluster keeps its workers: the default, 12 hours, would close their connections at
night."""


class Tunnel(NamedTuple):
    listen_endpoint: str
    forward_endpoint: str
    key_path: Path
    """File with lines IDENTITY:KEY. A head uses the first one, a worker accepts any."""
    is_head_end: bool


def parse_tunnels(words: list[str], keys_folder: Path, is_head_end: bool) -> list[Tunnel]:
    """:param words: ``ACCEPT=CONNECT`` each.
    :param keys_folder: folder with key files, each named after the address of the worker's host, which both ends know.
    """
    end_pairs = [word.split("=", 1) for word in words]
    return [
        Tunnel(accept, connect, keys_folder / (connect if is_head_end else accept).rsplit(":", 1)[0], is_head_end)
        for accept, connect in end_pairs
    ]


def stunnel_configuration(tunnels: list[Tunnel]) -> str:
    """Return stunnel's configuration. There are no certificates: without a shared key the handshake fails."""
    options = {"TCP_NODELAY": 1}
    if progress.ON_LINUX:
        options.update(SO_KEEPALIVE=1, **progress.KEEPALIVE_OPTIONS)
    sockets = [f"socket = {end}:{name}={value}" for name, value in options.items() for end in "lr"]
    lines = [*GLOBAL_OPTIONS]
    for tunnel in tunnels:
        lines += [f"[{tunnel.listen_endpoint}]", f"client = {'yes' if tunnel.is_head_end else 'no'}"]
        lines += [f"accept = {tunnel.listen_endpoint}", f"connect = {tunnel.forward_endpoint}"]
        lines.append(f"PSKsecrets = {tunnel.key_path}")
        lines += [*TUNNEL_OPTIONS, *sockets]
    return "\n".join(lines) + "\n"


def stunnel_path() -> str | None:
    return shutil.which(PROGRAM_NAME, path=os.pathsep.join([*os.get_exec_path(), *SEARCH_FOLDERS]))


class Tunnels:
    """Context in which the tunnels of a service run; without tunnels, it does not require stunnel."""

    def __init__(self, tunnels: list[Tunnel]) -> None:
        self.tunnels = tunnels
        self.process: subprocess.Popen[bytes] | None = None
        self.key_times_ns: list[int] = []
        self.start_time = -RESTART_INTERVAL_SECONDS
        self.configuration_path = ""

    def __enter__(self) -> Tunnels:
        if self.tunnels:
            folder = SHARED_MEMORY_FOLDER if os.access(SHARED_MEMORY_FOLDER, os.W_OK) else None
            descriptor, self.configuration_path = tempfile.mkstemp(".conf", "llamacpp-", folder)
            os.close(descriptor)
        self.maintain()
        return self

    def __exit__(self, *_error: object) -> None:
        if self.process:
            progress.stop_process(self.process, STOP_SECONDS)
        if self.configuration_path:
            with suppress(OSError):
                os.unlink(self.configuration_path)

    def maintain(self) -> None:
        """Start stunnel if it does not run, and make it read changed keys."""
        if not self.configuration_path:
            return
        times_ns = [_modification_time_ns(tunnel.key_path) for tunnel in self.tunnels]
        if self.process and self.process.poll() is not None:
            journal.log_once(f"stunnel exited {progress.describe_exit(self.process.returncode)}: restarting it")
            self.process = None
        if self.process is None:
            if time.monotonic() - self.start_time < RESTART_INTERVAL_SECONDS:
                return
            self.start_time = time.monotonic()
            self._start()
        elif times_ns != self.key_times_ns:
            journal.log("the tunnel keys have changed: stunnel reloads them")
            self._write_configuration()  # cleaning programs may have removed the configuration
            self.process.send_signal(signal.SIGHUP)
        self.key_times_ns = times_ns

    def _write_configuration(self) -> None:
        Path(self.configuration_path).write_text(stunnel_configuration(self.tunnels))

    def _start(self) -> None:
        missing_paths = [str(tunnel.key_path) for tunnel in self.tunnels if not tunnel.key_path.is_file()]
        path = stunnel_path()
        if missing_paths or not path:
            reason = f"{missing_paths[0]} is missing" if missing_paths else "stunnel is not installed"
            journal.log_once(f"the tunnel cannot start, because {reason}: run site.yml")
            return
        self._write_configuration()
        self.process = subprocess.Popen(
            [path, self.configuration_path], stdin=subprocess.DEVNULL, preexec_fn=progress.die_with_parent
        )

    def with_outer_traffic(self, sample: progress.ProcessSample) -> progress.ProcessSample:
        """Replace a program's connections to stunnel with stunnel's connections to the workers: stunnel accepts and acknowledges everything at once."""
        if not self.process:
            return sample
        stunnel_sample = progress.sample_process(self.process.pid, set(), set())
        sockets, traffic = list(sample.sockets), dict(sample.traffic)
        for tunnel in self.tunnels:
            for sock, outer_sock in zip(
                _connections(sample, tunnel.listen_endpoint), _connections(stunnel_sample, tunnel.forward_endpoint)
            ):
                sockets[sockets.index(sock)] = sock._replace(retransmissions=outer_sock.retransmissions)
                if outer_sock.inode in stunnel_sample.traffic:
                    traffic[sock.inode] = stunnel_sample.traffic[outer_sock.inode]
        return sample._replace(sockets=sockets, traffic=traffic)

    def explain(self, endpoint: str, detail: str) -> str:
        """Explain why a worker does not answer, because stunnel itself accepts every connection on this host."""
        for tunnel in self.tunnels:
            if tunnel.listen_endpoint == endpoint:
                return f"{tunnel.forward_endpoint}, the far end of the tunnel, is unreachable, has another key, or does not forward to a worker ({detail})"
        return detail


NO_TUNNELS = Tunnels([])


def run_through_tunnels(argv: list[str], tunnels: Tunnels) -> int:
    """Run a program that needs a head's tunnels until the program exits; return its exit status."""
    progress.exit_on_signals()
    process = subprocess.Popen(argv, preexec_fn=progress.die_with_parent)
    try:
        while process.poll() is None:
            tunnels.maintain()
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeout=1.0)
    except SystemExit:
        progress.stop_process(process, STOP_SECONDS)
        raise
    return process.returncode


def _connections(sample: progress.ProcessSample, endpoint: str) -> list[progress.TcpSocket]:
    """Return the established connections to an endpoint, the busiest first: both sides of a tunnel have the same order."""
    sockets = [sock for sock in sample.sockets if sock.peer == endpoint and sock.state == progress.ESTABLISHED]
    sent_bytes = {sock.inode: sample.traffic[sock.inode].sent_bytes for sock in sockets if sock.inode in sample.traffic}
    return sorted(sockets, key=lambda sock: sent_bytes.get(sock.inode, 0), reverse=True)


def _modification_time_ns(path: Path) -> int:
    """Return a file's modification time in nanoseconds; 0 if it is missing."""
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0
