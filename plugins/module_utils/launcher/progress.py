# Copyright (c) 2026 the llamacpp.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Checks whether a process makes progress, using what the Linux kernel reports about it and its TCP connections over IPv4.

A slow process and a hung one differ in what moves, not in how long they take. So this module compares processor time, bytes read, and
bytes on connections. To count the latter, it copies the process's sockets (pidfd_getfd, Linux 5.6), which the kernel always allows for children.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from ansible_collections.llamacpp.cluster.plugins.module_utils.launcher import loading

ON_LINUX = sys.platform.startswith("linux")
PR_SET_PDEATHSIG = 1
MAX_SUSPENDED_SECONDS = 5.0
"""Seconds after which a service that SIGSTOP has suspended is restarted; a process in a debugger has another state."""
TCP_TABLE_FILE = Path("/proc/net/tcp")
ESTABLISHED, CLOSE_WAIT, LISTEN = 1, 8, 10
RETRANSMISSION_TIMER = "01"
"""Timer in /proc/net/tcp of a connection with unacknowledged data."""
PIDFD_GETFD = 438
"""Number of the system call, the same on all processors."""
TCP_INFO_BYTES = 220
KEEPALIVE_OPTIONS = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}
"""The kernel closes an idle connection 25 s after the other host's last packet. llama.cpp sets no keepalive (transport.cpp of 0.3.36)."""
RDMA_DEVICE_FOLDER = "/dev/infiniband/"
BUSY_SHARE = 1 / 600
"""Share of a processor above which a process is busy. A /health request takes llama-server 0.7.0 less than 0.5 ms; one per second stays below this."""
MIN_READ_BYTES = 1 << 20
MIN_MAJOR_FAULTS = 16


class TcpSocket(NamedTuple):
    address: str
    peer: str
    """ADDRESS:PORT, like ``address``."""
    state: int
    retransmissions: int
    """Number of times the kernel has sent the same data again without an acknowledgement."""
    inode: str


class Traffic(NamedTuple):
    """Counters of one connection since it was opened."""

    sent_bytes: int
    """Bytes that the other side has acknowledged."""
    received_bytes: int
    ms_since_sent: int
    """Milliseconds since this host last sent data."""
    ms_since_received: int
    """Milliseconds since this host last received data."""
    round_trip_us: int = 0
    """Smoothed round-trip time in microseconds."""
    retransmissions: int = 0
    needless_retransmissions: int = 0
    """Retransmissions of segments that had arrived. While a worker computes, its host acknowledges so late that the kernel sends the last segment again.
    0 before Linux 4.19."""

    @property
    def awaits_answer(self) -> bool:
        return self.ms_since_sent < self.ms_since_received


class Activity(NamedTuple):
    """Counters of a process since it was started."""

    state: str
    """State letter; T means that a signal has suspended it."""
    processor_seconds: float
    """User and system time."""
    read_bytes: int
    """Bytes that it requested, plus bytes read from a disk on its behalf."""
    major_faults: int
    """Major page faults, in which it had to wait for a page of a file."""
    file_bytes: int | None = None
    """Bytes of files: the larger of the two counts. Mapped pages count only as disk reads, cached data only as requests. None if the kernel does not
    report them."""


class ProcessSample(NamedTuple):
    """State of a process at one moment."""

    activity: Activity
    sockets: list[TcpSocket]
    traffic: Mapping[str, Traffic]
    """Inode of a socket → its counters. Empty if the kernel does not share sockets."""
    rdma_connection_count: int = 0
    """Number of RDMA connections. Their sockets carry only the handshake and the close."""


def parse_tcp_table(tcp_table: str) -> list[TcpSocket]:
    """:param tcp_table: text of /proc/net/tcp."""
    sockets = []
    for fields in map(str.split, tcp_table.splitlines()[1:]):
        with suppress(ValueError, IndexError, struct.error):
            timer, timeouts = fields[5].split(":")[0], int(fields[6], 16)
            sockets.append(
                TcpSocket(
                    address=_parse_endpoint(fields[1]),
                    peer=_parse_endpoint(fields[2]),
                    state=int(fields[3], 16),
                    retransmissions=timeouts if timer == RETRANSMISSION_TIMER else 0,
                    inode=fields[9],
                )
            )
    return sockets


def _parse_endpoint(text: str) -> str:
    address, port = text.split(":")
    return f"{socket.inet_ntoa(struct.pack('=I', int(address, 16)))}:{int(port, 16)}"


def _fd_targets(pid: int) -> Iterator[tuple[int, str]]:
    """Yield each descriptor of a process with its target."""
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(OSError):
            yield int(link.name), os.readlink(link)


def socket_descriptors(pid: int) -> dict[str, int]:
    """Return a process's descriptors by inode of their sockets."""
    return {target[8:-1]: descriptor for descriptor, target in _fd_targets(pid) if target.startswith("socket:[")}


def count_rdma_connections(pid: int) -> int:
    """Return the number of RDMA connections; 0 if the process has exited. RPC opens the device once per connection (transport.cpp of 0.3.36)."""
    with suppress(OSError):
        return sum(target.startswith(RDMA_DEVICE_FOLDER) for _descriptor, target in _fd_targets(pid))
    return 0


@contextmanager
def copy_socket(pid: int, descriptor: int) -> Iterator[socket.socket]:
    """Yield a copy of another process's socket.

    :raises OSError: the kernel is too old, or does not allow the copy.
    """
    if not hasattr(os, "pidfd_open"):
        raise OSError("this kernel or Python version cannot share sockets between processes")
    libc = ctypes.CDLL(None, use_errno=True)
    pidfd = os.pidfd_open(pid)
    try:
        copied_descriptor = libc.syscall(PIDFD_GETFD, pidfd, descriptor, 0)
    finally:
        os.close(pidfd)
    if copied_descriptor < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    with socket.socket(fileno=copied_descriptor) as copied_socket:
        yield copied_socket


def read_traffic(connection: socket.socket) -> Traffic:
    """Read struct tcp_info (include/uapi/linux/tcp.h)."""
    tcp_info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, TCP_INFO_BYTES)
    sent_ms, received_ms = struct.unpack_from("=I4xI", tcp_info, 44)
    round_trip_us, retransmissions = struct.unpack_from("=I28xI", tcp_info, 68)
    sent_bytes, received_bytes = struct.unpack_from("=QQ", tcp_info, 120)
    (needless_resends,) = struct.unpack_from("=I", tcp_info.ljust(TCP_INFO_BYTES, b"\0"), 216)
    return Traffic(sent_bytes, received_bytes, sent_ms, received_ms, round_trip_us, retransmissions, needless_resends)


def enable_keepalive(connection: socket.socket) -> None:
    """Make the kernel close the connection when the other host is gone, regardless of the process's own settings."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in KEEPALIVE_OPTIONS.items():
        connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def read_activity(pid: int) -> Activity:
    fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    read_bytes, file_bytes = 0, None
    with suppress(OSError, ValueError, KeyError):
        io_counters = dict(line.split(": ") for line in Path(f"/proc/{pid}/io").read_text().splitlines())
        requested_bytes, disk_bytes = int(io_counters["rchar"]), int(io_counters["read_bytes"])
        read_bytes, file_bytes = requested_bytes + disk_bytes, max(requested_bytes, disk_bytes)
    ticks = int(fields[11]) + int(fields[12])
    return Activity(fields[0], ticks / os.sysconf("SC_CLK_TCK"), read_bytes, int(fields[9]), file_bytes)


def children_of(pid: int) -> dict[int, list[str]]:
    """Return the running children of a process with their argv."""
    children = {}
    for path in Path("/proc").glob(f"{pid}/task/*/children"):
        with suppress(OSError):
            for child in path.read_text().split():
                children[int(child)] = argv_of(int(child))
    return {child: argv for child, argv in children.items() if argv}


def argv_of(pid: int) -> list[str]:
    """Return a process's argv; empty if the process has exited or is hidden."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode("utf-8", "surrogateescape").split("\0")[:-1]
    except OSError:
        return []


def sample_process(pid: int, keepalive_inodes: set[str], ports: set[str]) -> ProcessSample:
    """Return a sample of a process, and enable keepalive on its connections from or to these ports.

    :param keepalive_inodes: inodes of connections with keepalive; new ones are added.
    :raises OSError: the process is gone, or the kernel does not report it.
    """
    descriptors_by_inode = socket_descriptors(pid)
    sockets = [sock for sock in parse_tcp_table(TCP_TABLE_FILE.read_text()) if sock.inode in descriptors_by_inode]
    traffic = {}
    for sock in sockets:
        if sock.state == ESTABLISHED:
            with suppress(OSError), copy_socket(pid, descriptors_by_inode[sock.inode]) as connection:
                if sock.inode not in keepalive_inodes and {port_of(sock.address), port_of(sock.peer)} & ports:
                    enable_keepalive(connection)
                    keepalive_inodes.add(sock.inode)
                traffic[sock.inode] = read_traffic(connection)
    return ProcessSample(read_activity(pid), sockets, traffic, count_rdma_connections(pid))


def port_of(endpoint: str) -> str:
    return endpoint.rsplit(":", 1)[1]


class ConditionTimer:
    """Measures how long conditions have been met without a break."""

    def __init__(self) -> None:
        self.start_times: dict[str, float] = {}

    def seconds(self, name: str, is_met: bool, clock: float) -> float:
        if not is_met:
            self.start_times.pop(name, None)
            return 0.0
        return clock - self.start_times.setdefault(name, clock)


class IdleTimer:
    """Measures how long nothing has moved: no byte on the connections, and almost no processor time or reading."""

    def __init__(self, window_s: float, clock: float) -> None:
        self.window_s = window_s
        """Time over which processor time and reading are counted."""
        self.last_activity_time = clock
        self.window_start: tuple[float, Activity | None] = (clock, None)
        self.byte_counts: dict[str, tuple[int, int]] = {}

    def seconds(self, sample: ProcessSample, peers: list[str], clock: float) -> float:
        """:param peers: remote ends of the connections that count."""
        byte_counts = {
            sock.inode: sample.traffic[sock.inode][:2]
            for sock in sample.sockets
            if sock.peer in peers and sock.inode in sample.traffic
        }
        if byte_counts != self.byte_counts:
            self.byte_counts, self.last_activity_time = byte_counts, clock
        sample_time, previous_activity = self.window_start
        if previous_activity is None or clock - sample_time >= self.window_s:
            if previous_activity is not None and _is_active(previous_activity, sample.activity, clock - sample_time):
                self.last_activity_time = clock
            self.window_start = (clock, sample.activity)
        return clock - self.last_activity_time


def load_of(
    sample: ProcessSample, endpoints: Collection[str], seconds: float, previous_load: loading.LoadCounters | None
) -> loading.LoadCounters:
    """:param previous_load: previous counters, which include the bytes of closed connections."""
    sent_bytes = dict(previous_load.sent) if previous_load else {}
    for endpoint in endpoints:
        counts = [
            sample.traffic[sock.inode].sent_bytes
            for sock in sample.sockets
            if sock.peer == endpoint and sock.inode in sample.traffic
        ]
        if counts and not sample.rdma_connection_count:
            sent_bytes[endpoint] = max(sum(counts), sent_bytes.get(endpoint, 0))
    return loading.LoadCounters(seconds, sample.activity.file_bytes, sent_bytes)


def _is_active(earlier_activity: Activity, later_activity: Activity, seconds: float) -> bool:
    return (
        later_activity.processor_seconds - earlier_activity.processor_seconds > seconds * BUSY_SHARE
        or later_activity.read_bytes - earlier_activity.read_bytes >= MIN_READ_BYTES
        or later_activity.major_faults - earlier_activity.major_faults >= MIN_MAJOR_FAULTS
    )


def die_with_parent() -> None:
    """Make the kernel kill a program with its launcher: otherwise it would keep its port and its workers."""
    if ON_LINUX:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def exit_on_signals() -> None:
    """Make SIGTERM and SIGINT raise SystemExit."""
    for signal_number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signal_number, _exit)


def _exit(_number: int, _frame: object) -> None:
    raise SystemExit(0)


def stop_process(process: subprocess.Popen, timeout_s: float) -> None:
    """Terminate a process, and kill it after this many seconds: a suspended process does not react to SIGTERM."""
    process.terminate()
    try:
        process.wait(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        process.kill()
        # If a signal interrupts a wait, Python may keep the lock of this wait, so an endless wait might never return.
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout=timeout_s)


def describe_exit(status: int) -> str:
    return f"with status {status}" if status >= 0 else f"on signal {-status}"
