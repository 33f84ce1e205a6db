# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Throughput and round trip of a link, by iperf3 and ping."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from ansible_collections.llamacpp.cluster.plugins.module_utils.common import commands, reading

Run = Callable[..., str]
COMMAND_SECONDS = 30
"""For a measurement and its connection."""
CONNECT_SECONDS = 5
"""How long iperf3 on the other host may take until it listens."""
LISTENING = {
    "IPAddressDeny": "any",
    "CapabilityBoundingSet": "",
    "NoNewPrivileges": "true",
    "PrivateDevices": "true",
    "PrivateTmp": "true",
    "ProtectHome": "true",
    "ProtectSystem": "strict",
}
"""Properties of the unit in which iperf3 listens."""


class Measurement(NamedTuple):
    mbit_per_second: int | None
    """as received by the other end"""
    round_trip_ms: float | None
    """mean"""
    detail: str = ""
    """what was not measured and why, or nothing"""


def parse(iperf_json: str, ping_text: str) -> Measurement:
    """From ``iperf3 --client … --json`` and the text of ``ping``."""
    try:
        bits = float(reading.parse(iperf_json)["end"]["sum_received"]["bits_per_second"])
    except (ValueError, KeyError, TypeError):
        bits = 0
    mean = re.search(r"^(?:rtt|round-trip) [\w/]+ = [\d.]+/([\d.]+)/", ping_text, re.MULTILINE)
    return Measurement(round(bits / 1e6) if bits else None, float(mean.group(1)) if mean else None)


def listen(
    address: str,
    port: int,
    client: str,
    seconds: int,
    account: str | None,
    unit: bool,
    runner: Run = commands.run,
) -> None:
    """Lets iperf3 listen until one measurement is made, on this address alone and not as root.

    :param client: numeric IPv4 address of the host that measures.
    :param seconds: after which iperf3 ends, whatever happens to this process.
    :param unit: whether systemd runs it, which lets in the client alone.
    """
    server = ["iperf3", "--server", "--one-off", "--bind", address, "--port", str(port)]
    if not unit:
        runner(server, seconds, account=account)
        return
    properties = {**LISTENING, "IPAddressAllow": client, "RuntimeMaxSec": seconds}
    words = [f"--property={name}={value}" for name, value in sorted(properties.items())]
    server[0] = commands.find("iperf3") or server[0]
    runner(["systemd-run", "--quiet", "--wait", "--collect", f"--uid={account}", *words, *server], seconds)


def measure(
    address: str,
    port: int | None,
    seconds: int,
    lacking: Sequence[str],
    account: str | None,
    runner: Run = commands.run,
) -> Measurement:
    """Throughput and round trip from this host to another one.

    :param address: numeric IPv4 address of the other host.
    :param port: where iperf3 listens there, or None to measure the round trip only.
    :param lacking: hosts without iperf3, which is why there is no port.
    :param account: as which root runs iperf3.
    """
    sent = pinged = ""
    missing = [name for name in ("iperf3", "ping") if not commands.find(name) and (port or name == "ping")]
    details = [f"{program} is not installed on {os.uname().nodename}" for program in missing]
    if port and "iperf3" not in missing:
        try:
            sent = _send(address, port, seconds, account, runner)
        except commands.CommandError as error:
            details.append(f"iperf3 to {address}:{port} failed: {_reason(error)}")
    if "ping" not in missing:
        try:
            pinged = runner(["ping", "-n", "-c", "10", "-i", "0.2", "-W", "1", address], COMMAND_SECONDS)
        except commands.CommandError:
            details.append(f"{address} does not answer ping")
    detail = f"iperf3 is not installed on {' and '.join(lacking)}" if lacking else ""
    return parse(sent, pinged)._replace(detail=f"not measured: {', '.join(details)}" if details else detail)


def _send(address: str, port: int, seconds: int, account: str | None, runner: Run) -> str:
    """What iperf3 prints; the other end may need a moment until it listens."""
    argv = ["iperf3", "--client", address, "--port", str(port), "--time", str(seconds), "--json"]
    end = time.monotonic() + CONNECT_SECONDS
    while True:
        try:
            return runner([*argv, "--connect-timeout", "3000"], COMMAND_SECONDS, account=account)
        except commands.CommandError as error:
            if "refused" not in error.reason or time.monotonic() > end:
                raise
        time.sleep(0.5)


def _reason(error: commands.CommandError) -> str:
    """What iperf3 says in its JSON of why it failed."""
    said = re.search(r'"error":\s*"([^"]*)"', error.reason)
    return said.group(1) if said else error.reason
