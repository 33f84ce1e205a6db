# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Tunnels between a head and its workers, which stunnel keeps for the launcher: TLS 1.3 with a key that both ends have.

stunnel is a child of the launcher, since the kernel shows the connections of a child. When a file of a key changes, it reads all of them again: what
is connected stays so, and new connections need the new key.
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

PROGRAM = "stunnel"
FOLDERS = ("/usr/bin", "/usr/local/bin", "/opt/homebrew/bin")
"""Where it is looked for, whatever the service's PATH is."""
SHARED_MEMORY = "/dev/shm"
"""Where the configuration is written, if it can: a full disk is no matter there, and nothing tidies up."""
STOP_SECONDS = 2.0
RESTART_SECONDS = 5.0
"""Between two starts of stunnel, which logs some lines each time."""
GLOBAL_OPTIONS = ("foreground = yes", "pid =", "syslog = no", "debug = warning")
TUNNEL_OPTIONS = ("sslVersion = TLSv1.3", "TIMEOUTbusy = 10", "TIMEOUTidle = 31536000")
"""Of a tunnel. A stranger who says nothing is hung up on; an idle cluster keeps its workers: the default, 12 hours, would end their connections at night."""


class Tunnel(NamedTuple):
    """One end of a tunnel."""

    accept: str
    """ADDRESS:PORT at which it listens."""
    connect: str
    """ADDRESS:PORT to which it passes on."""
    key: Path
    """File with lines IDENTITY:KEY. A head uses the first one, a worker takes any."""
    client: bool
    """Whether it is the head's."""


def parse_tunnels(words: list[str], keys: Path, client: bool) -> list[Tunnel]:
    """:param words: ``ACCEPT=CONNECT`` each.
    :param keys: folder; a file there is named for the address of the worker's host, which both ends know.
    """
    ends = [word.split("=", 1) for word in words]
    return [
        Tunnel(accept, connect, keys / (connect if client else accept).rsplit(":", 1)[0], client)
        for accept, connect in ends
    ]


def configuration(tunnels: list[Tunnel]) -> str:
    """As stunnel reads it. There are no certificates: without a key that both ends have the handshake fails."""
    options = {"TCP_NODELAY": 1}
    if progress.ON_LINUX:
        options.update(SO_KEEPALIVE=1, **progress.KEEPALIVE)
    sockets = [f"socket = {side}:{name}={value}" for name, value in options.items() for side in "lr"]
    lines = [*GLOBAL_OPTIONS]
    for tunnel in tunnels:
        lines += [f"[{tunnel.accept}]", f"client = {'yes' if tunnel.client else 'no'}"]
        lines += [f"accept = {tunnel.accept}", f"connect = {tunnel.connect}", f"PSKsecrets = {tunnel.key}"]
        lines += [*TUNNEL_OPTIONS, *sockets]
    return "\n".join(lines) + "\n"


def program() -> str | None:
    """Path of stunnel; None where it is not installed."""
    return shutil.which(PROGRAM, path=os.pathsep.join([*os.get_exec_path(), *FOLDERS]))


class Tunnels:
    """The tunnels of a service, as long as the context lasts; none needs no stunnel."""

    def __init__(self, tunnels: list[Tunnel]) -> None:
        self.tunnels = tunnels
        self.process: subprocess.Popen[bytes] | None = None
        self.key_versions: list[int] = []
        self.started = -RESTART_SECONDS
        self.file = ""
        """Of the configuration."""

    def __enter__(self) -> Tunnels:
        if self.tunnels:
            memory = SHARED_MEMORY if os.access(SHARED_MEMORY, os.W_OK) else None
            descriptor, self.file = tempfile.mkstemp(".conf", "llamacpp-", memory)
            os.close(descriptor)
        self.maintain()
        return self

    def __exit__(self, *_error: object) -> None:
        if self.process:
            progress.stop(self.process, STOP_SECONDS)
        if self.file:
            with suppress(OSError):
                os.unlink(self.file)

    def maintain(self) -> None:
        """Starts stunnel where it does not run, and has it read keys that were changed."""
        if not self.file:
            return
        versions = [_version(tunnel.key) for tunnel in self.tunnels]
        if self.process and self.process.poll() is not None:
            journal.log_once(f"stunnel ended {progress.ended_how(self.process.returncode)}: it is started again")
            self.process = None
        if self.process is None:
            if time.monotonic() - self.started < RESTART_SECONDS:
                return
            self.started = time.monotonic()
            self._start()
        elif versions != self.key_versions:
            journal.log("the keys of the tunnels were changed: stunnel reads them")
            self._write()  # it reads this file too, which what tidies up folders may have removed
            self.process.send_signal(signal.SIGHUP)
        self.key_versions = versions

    def _write(self) -> None:
        Path(self.file).write_text(configuration(self.tunnels))

    def _start(self) -> None:
        missing = [str(tunnel.key) for tunnel in self.tunnels if not tunnel.key.is_file()]
        path = program()
        if missing or not path:
            reason = f"{missing[0]} is missing" if missing else "stunnel is not installed"
            journal.log_once(f"there is no tunnel, since {reason}: run site.yml")
            return
        self._write()
        self.process = subprocess.Popen(
            [path, self.file], stdin=subprocess.DEVNULL, preexec_fn=progress.end_with_parent
        )

    def with_outer_connections(self, sample: progress.ProcessSample) -> progress.ProcessSample:
        """What the kernel says of a program, with its connections to workers as they are on the network: the program's own end at stunnel, which takes
        and acknowledges everything at once."""
        if not self.process:
            return sample
        stunnel = progress.sample_process(self.process.pid, set(), set())
        links, traffic = list(sample.links), dict(sample.traffic)
        for tunnel in self.tunnels:
            for local, outer in zip(_connections(sample, tunnel.accept), _connections(stunnel, tunnel.connect)):
                links[links.index(local)] = local._replace(retransmissions=outer.retransmissions)
                if outer.inode in stunnel.traffic:
                    traffic[local.inode] = stunnel.traffic[outer.inode]
        return sample._replace(links=links, traffic=traffic)

    def explain(self, endpoint: str, detail: str) -> str:
        """What is known of a worker that does not answer: stunnel accepts every connection on this host."""
        for tunnel in self.tunnels:
            if tunnel.accept == endpoint:
                return f"its tunnel ends at {tunnel.connect}, which is away, has another key, or no worker behind it ({detail})"
        return detail


NO_TUNNELS = Tunnels([])


def run(argv: list[str], tunnels: Tunnels) -> int:
    """Runs a program that needs the tunnels of a head, to its end; returns its exit status."""
    progress.exit_on_signals()
    process = subprocess.Popen(argv, preexec_fn=progress.end_with_parent)
    try:
        while process.poll() is None:
            tunnels.maintain()
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeout=1.0)
    except SystemExit:
        progress.stop(process, STOP_SECONDS)
        raise
    return process.returncode


def _connections(sample: progress.ProcessSample, remote: str) -> list[progress.TcpSocket]:
    """Those to an endpoint that stand, the one with the most bytes first: behind a tunnel they have the same order."""
    links = [link for link in sample.links if link.remote == remote and link.state == progress.ESTABLISHED]
    sent = {link.inode: sample.traffic[link.inode].sent for link in links if link.inode in sample.traffic}
    return sorted(links, key=lambda link: sent.get(link.inode, 0), reverse=True)


def _version(path: Path) -> int:
    """Of a file's content; 0 where it is missing."""
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0
