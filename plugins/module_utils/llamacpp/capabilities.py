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
PACKAGED_SINCE = {"debian": 14}
"""Distribution → its first version with a package of llama.cpp that has RPC, as far as that is known."""

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

MAX_ENDPOINTS = 16
"""Workers that one llama-server connects to (GGML_RPC_MAX_SERVERS)."""

FIT_SEEN = 8643
"""Oldest build in which ``--fit`` was seen; it came after 6170."""

FLASH_ATTENTION_VALUE_SINCE = 6325
"""First build whose ``--flash-attn`` takes a value (ggml-org/llama.cpp#15434, 30 August 2025); 6170 was seen to have it as a switch, 8643
with a value."""

SECURITY_FLOOR = 8492
"""First build without CVE-2026-34159, unauthenticated remote code execution in the RPC server."""

MAINLINE = "llama.cpp"
IK_LLAMA = "ik_llama.cpp"
FORKS = {MAINLINE: "https://github.com/ggml-org/llama.cpp", IK_LLAMA: "https://github.com/ikawrakow/ik_llama.cpp"}
"""What ``llama_release`` may name as ``fork`` → its repository."""

IK_LLAMA_PROTOCOLS = [(0, None), (3737, "2.0.1"), (4033, "3.5.1"), (4104, "3.5.2")]
"""The same of ik_llama.cpp, whose numbers count the commits of its own history: 3737 is of 8 June 2025, 4033 of 30 November 2025."""

IK_LLAMA_SEEN = 4840
"""Newest commit of ik_llama.cpp that was looked at, 8337e4cd of 15 August 2026. CVE-2026-34159 is not corrected up to there."""

IK_LLAMA_SEVERAL_DEVICES_SINCE = 4033
"""First commit whose worker takes ``-d`` and, for the processor, ``-cpu``."""

IK_LLAMA_DEVICE_SINCE = 3933
"""First commit with ``--device``. Before it all devices of the head come first, then the workers, in the order of ``--rpc``."""

IK_LLAMA_FLASH_ATTENTION_VALUE_SINCE = 3985
IK_LLAMA_FUSED_BY_DEFAULT_SINCE = 3928
"""First commit that fuses experts by itself and has no ``-fmoe`` any more; flash attention is its default, too."""

FUSED = {"-fmoe", "--fused-moe"}
IK_LLAMA_FLAGS = {
    *FUSED,
    "-no-fmoe",
    "--no-fused-moe",
    "-mla",
    "--mla-use",
    "-amb",
    "--attention-max-batch",
    "-ser",
    "--smart-expert-reduction",
    "-rtr",
    "--run-time-repack",
    "-ger",
    "--grouped-expert-routing",
    "-khad",
    "--k-cache-hadamard",
    "-mqkv",
    "--merge-qkv",
    "-muge",
    "--merge-up-gate-experts",
}
"""Options of llama-server that ik_llama.cpp alone has."""

MAINLINE_FLAGS = {"-lm", "--load-mode", "-dio", "--direct-io", "-fit", "-lv", "--log-verbosity"}
"""Options of llama-server that ik_llama.cpp does not have."""


def of_build(build: int, protocol: str | None = None, fork: str = MAINLINE) -> dict:
    """Capabilities of the build with this number.

    :param fork: whose numbers these are, a key of FORKS.
    :returns: ``worker_binary``, ``worker_flags`` (short names; ``cpu`` where the processor is lent only if asked for), ``server_flags`` (long
        names without dashes; ``fit`` and ``flash-attn`` only where they take a value),
        ``protocol`` (None when unknown or when there is no handshake), ``buffer_name`` (how the log names a worker's buffers),
        ``device_name`` (how ``--device`` names a worker; None where there is no such option).
    """
    if fork == IK_LLAMA:
        return _of_ik_llama(build)
    worker_flags = {"H", "p"}
    if 2901 <= build < 6790:
        worker_flags.add("m")
    worker_flags |= {flag for flag, since in (("c", 4981), ("t", 5171), ("d", 5279)) if build >= since}
    server_flags = {"no-mmap"} if build < 10105 else {"load-mode"}
    if 7668 <= build < 10105:
        server_flags.add("direct-io")
    if build >= FIT_SEEN:
        server_flags.add("fit")
    if build >= FLASH_ATTENTION_VALUE_SINCE:
        server_flags.add("flash-attn")
    known = PROTOCOLS[bisect.bisect_right(PROTOCOLS, (build, "~")) - 1]
    return {
        "worker_binary": "ggml-rpc-server" if build >= 9824 else "rpc-server",
        "worker_flags": sorted(worker_flags),
        "server_flags": sorted(server_flags),
        "protocol": protocol or (known[1] if known is not PROTOCOLS[-1] or build == known[0] else None),
        "buffer_name": "RPC0[{endpoint}]" if build >= 6688 else "RPC[{endpoint}]",
        "device_name": "RPC{index}" if build >= 6688 else "RPC[{endpoint}]",
    }


def _of_ik_llama(commit: int) -> dict:
    several = commit >= IK_LLAMA_SEVERAL_DEVICES_SINCE
    server_flags = {"no-mmap"}
    if commit >= IK_LLAMA_FUSED_BY_DEFAULT_SINCE:
        server_flags.add("no-flash-attn")
    if commit >= IK_LLAMA_FLASH_ATTENTION_VALUE_SINCE:
        server_flags.add("flash-attn")
    return {
        "worker_binary": "rpc-server",
        "worker_flags": ["H", "P", "c", "cpu", "d", "dev", "p", "t"] if several else ["H", "c", "m", "p", "t"],
        "server_flags": sorted(server_flags),
        "protocol": IK_LLAMA_PROTOCOLS[bisect.bisect_right(IK_LLAMA_PROTOCOLS, (commit, "~")) - 1][1],
        "buffer_name": "RPC0[{endpoint}]" if several else "RPC[{endpoint}]",
        "device_name": None if commit < IK_LLAMA_DEVICE_SINCE else "RPC0[{endpoint}]" if several else "RPC[{endpoint}]",
    }


def from_help(worker_binary: str, worker_help: str, server_help: str) -> dict:
    """Names and flags as in of_build, read from what the programs print when asked for help."""
    short = [line.split("--")[0] for line in worker_help.splitlines() if re.match(r"\s+-\w", line)]
    worker_flags = {flag for line in short for flag in re.findall(r"(?<![\w-])-(\w+)", line)} - {"h"}
    offered = set(re.findall(r"--([a-z][a-z0-9-]+)", server_help))
    valued = set(re.findall(r"--(fit|flash-attn) [\[(]", server_help))
    return {
        "worker_binary": worker_binary,
        "worker_flags": sorted(worker_flags),
        "server_flags": sorted((offered & {"no-mmap", "load-mode", "direct-io", "no-flash-attn"}) | valued),
    }
