# Copyright (c) 2026 the llamacpp.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Processes and sockets of a host."""

from __future__ import annotations

import errno
import os
import pwd
import re
import socket
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from ansible_collections.llamacpp.cluster.plugins.module_utils.common.commands import output
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.files import text_of


def _uid(account: str | None) -> int | None:
    """Return the account's uid, or this process's uid without an account; None if the account does not exist."""
    if account is None:
        return os.geteuid()
    with suppress(KeyError):
        return pwd.getpwnam(account).pw_uid
    return None


def _runs_as(process_folder: Path, uid: int) -> bool:
    """Return whether a process runs as an account. Check this before reading anything else: a foreign process can forge its command line, and
    reading may block forever if its memory maps a FUSE file."""
    uid_match = re.search(r"^Uid:\t(\d+)\t(\d+)", text_of(process_folder / "status"), re.MULTILINE)
    return bool(uid_match and uid_match.groups() == (str(uid), str(uid)))


def account_processes(prefix: str, account: str | None) -> dict[int, list[str]]:
    """Return the account's processes (pid → argv) whose program is below the prefix.

    macOS reports a command as a single line, so an argument with a space becomes two arguments, and the program is unknown.

    :param account: None for the account of this process.
    """
    argv_by_pid: dict[int, list[str]] = {}
    uid = _uid(account)
    if uid is None:
        return argv_by_pid
    if sys.platform == "darwin":
        listing = output(["ps", "-axww", "-o", "pid=,uid=,command="])
        for pid, owner_uid, command in re.findall(r"^ *([0-9]{1,18}) +([0-9]{1,18}) +(.+)$", listing, re.MULTILINE):
            if int(owner_uid) == uid and any(word.startswith(prefix + "/") for word in command.split(" ")[:2]):
                argv_by_pid[int(pid)] = command.split(" ")
        return argv_by_pid
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and _runs_as(entry, uid):
            try:
                argv = (entry / "cmdline").read_bytes().decode("utf-8", "replace").split("\0")[:-1]
            except OSError:
                continue
            if any(word.startswith(prefix + "/") for word in argv[:2]):
                argv_by_pid[int(entry.name)] = argv
    return argv_by_pid


def environment_of(pid: int) -> dict[str, str] | None:
    try:
        text = Path(f"/proc/{pid}/environ").read_bytes().decode("utf-8", "replace")
    except OSError:
        return None
    return dict(entry.split("=", 1) for entry in text.split("\0") if "=" in entry)


def is_occupied(address: str, port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address, port))
        except PermissionError:
            return False
        except OSError as error:
            return error.errno == errno.EADDRINUSE
    return False


class Socket(NamedTuple):
    """An entry of the kernel's tables of TCP sockets, without the remote port."""

    address: str
    port: int
    remote_address: str
    state: str
    inode: str
    uid: int = 0


LISTENING, ESTABLISHED = "0A", "01"
ANY_ADDRESSES = ("0.0.0.0", "::")


class Sockets(NamedTuple):
    """TCP sockets of this host that listen or are connected (Linux only). The kernel takes milliseconds to list them."""

    ipv4: list[Socket]
    ipv6: list[Socket]

    def listeners(self, port: int) -> list[Socket]:
        return [entry for entry in (*self.ipv4, *self.ipv6) if entry.state == LISTENING and entry.port == port]


def _parse_ip(text: str, family: socket.AddressFamily) -> str:
    words = [int(text[start : start + 8], 16).to_bytes(4, sys.byteorder) for start in range(0, len(text), 8)]
    return socket.inet_ntop(family, b"".join(words))


def _sockets(path: str, family: socket.AddressFamily) -> Iterator[Socket]:
    for fields in map(str.split, text_of(Path(path)).splitlines()[1:]):
        with suppress(ValueError, IndexError, OverflowError):
            if fields[3] in (LISTENING, ESTABLISHED):
                address, port = fields[1].split(":")
                local_address, remote_address = _parse_ip(address, family), _parse_ip(fields[2].split(":")[0], family)
                yield Socket(local_address, int(port, 16), remote_address, fields[3], fields[9], int(fields[7]))


def read_sockets() -> Sockets:
    return Sockets(list(_sockets("/proc/net/tcp", socket.AF_INET)), list(_sockets("/proc/net/tcp6", socket.AF_INET6)))


def listener_pids(port: int, pids: Iterable[int], sockets: Sockets) -> list[int]:
    """Return the ids of processes that listen on the port and whose descriptors are readable (Linux)."""
    listener_inodes = {entry.inode for entry in sockets.ipv4 if entry.state == LISTENING and entry.port == port}
    return [pid for pid, inodes in socket_inodes(pids).items() if listener_inodes & inodes]


def socket_inodes(pids: Iterable[int]) -> dict[int, set[str]]:
    """Return the readable socket inodes of each process (Linux)."""
    inodes: dict[int, set[str]] = {pid: set() for pid in pids}
    for pid, process_inodes in inodes.items():
        with suppress(OSError):
            for link in Path(f"/proc/{pid}/fd").iterdir():
                with suppress(OSError):
                    process_inodes.add(os.readlink(link).removeprefix("socket:[").removesuffix("]"))
    return inodes


def listening_addresses(port: int, sockets: Sockets) -> list[str]:
    """Return the addresses at which processes listen on the port (Linux; empty elsewhere)."""
    return sorted({entry.address for entry in sockets.listeners(port)})


def client_addresses(port: int, sockets: Sockets) -> list[str]:
    """Return the addresses of clients of the port, including waiting ones (Linux; empty elsewhere)."""
    return sorted({entry.remote_address for entry in sockets.ipv4 if entry.state == ESTABLISHED and entry.port == port})


def start_time(pid: int | None) -> float | None:
    """Return when a process started, in seconds since 1970 (Linux); None if unknown."""
    try:
        ticks = int(text_of(Path(f"/proc/{pid}/stat")).rsplit(")", 1)[1].split()[19])
    except (ValueError, IndexError):
        return None
    boot_time = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)  # btime in /proc/stat is in whole seconds
    return boot_time + ticks / os.sysconf("SC_CLK_TCK")


def account_of(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)
