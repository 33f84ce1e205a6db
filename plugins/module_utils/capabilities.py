# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What a release of llama.cpp understands: names of programs, flags, protocol. The one place for each of them.

By build number when only planning, from the programs' own help when they are there; a test holds the two together.
"""

from __future__ import annotations

import bisect
import re

PYPI_TREES: dict[str, dict] = {
    "0.3.16": {"build": 6170, "commit": "4227c9b", "generation": 6170},
    "0.3.20": {"build": 8643, "commit": "f49e917", "generation": 8643},
    "0.3.36": {"build": None, "commit": "0c1e570", "generation": 11063, "protocol": "7.0.0"},
}
"""llama-cpp-python release → the llama.cpp tree it carries. Where the build number is not known, ``generation`` is that of
an older build which understands the same."""

PACKAGED_TREES: dict[str, dict] = {
    "0.7.0": {"build": 11669, "commit": "unknown", "generation": 11669, "protocol": "8.0.0"},
}
"""Version of a distribution's package → the llama.cpp tree it was built from, oldest first."""

PROTOCOLS = [
    (0, None),
    (5150, "1.0.0"),
    (5187, "2.0.0"),
    (6688, "3.0.0"),
    (7183, "3.5.0"),
    (7287, "3.6.0"),
    (8277, "3.6.1"),
    (8802, "4.0.0"),
    (10176, "5.0.0"),
    (10496, "5.1.0"),
]
"""First build → RPC protocol; None is older than the handshake. From 6.0.0 on (August 2026) the first builds are not known."""

FIT_SEEN = 8643
"""Oldest build in which ``--fit`` was seen; it came after 6170."""

SECURITY_FLOOR = 8492
"""First build without CVE-2026-34159, unauthenticated remote code execution in the RPC server."""


def of_build(build: int, protocol: str | None = None) -> dict:
    """Capabilities of the build with this number.

    :returns: ``worker_binary``, ``worker_flags`` (subset of t, d, m, c), ``server_flags`` (long names without dashes),
        ``protocol`` (None when unknown or when there is no handshake), ``buffer_name`` (how the log names a worker's buffers),
        ``device_name`` (how ``--device`` names a worker).
    """
    worker_flags = {"H", "p"}
    if 2901 <= build < 6790:
        worker_flags.add("m")
    worker_flags |= {flag for flag, since in (("c", 4981), ("t", 5171), ("d", 5279)) if build >= since}
    server_flags = {"no-mmap"} if build < 10105 else {"load-mode"}
    if 7668 <= build < 10105:
        server_flags.add("direct-io")
    if build >= FIT_SEEN:
        server_flags.add("fit")
    known = PROTOCOLS[bisect.bisect_right(PROTOCOLS, (build, "~")) - 1]
    return {
        "worker_binary": "ggml-rpc-server" if build >= 9824 else "rpc-server",
        "worker_flags": sorted(worker_flags),
        "server_flags": sorted(server_flags),
        "protocol": protocol or (known[1] if known is not PROTOCOLS[-1] or build == known[0] else None),
        "buffer_name": "RPC0[{endpoint}]" if build >= 6688 else "RPC[{endpoint}]",
        "device_name": "RPC{index}" if build >= 6688 else "RPC[{endpoint}]",
    }


def from_help(worker_binary: str, worker_help: str, server_help: str) -> dict:
    """Names and flags as in of_build, read from what the programs print when asked for help."""
    worker_flags = set(re.findall(r"^\s+-(\w)(?: \w+)?,\s+--", worker_help, re.MULTILINE)) - {"h"}
    offered = set(re.findall(r"--([a-z][a-z0-9-]+)", server_help))
    return {
        "worker_binary": worker_binary,
        "worker_flags": sorted(worker_flags),
        "server_flags": sorted(offered & {"no-mmap", "load-mode", "fit", "direct-io"}),
    }
