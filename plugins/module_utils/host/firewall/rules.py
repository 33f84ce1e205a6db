# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Rules, whatever the manager: on ``address`` (of the host, or every one) ``port`` takes new connections from ``sources`` only."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable

from ansible_collections.llamacpp.cluster.plugins.module_utils.common import names
from ansible_collections.llamacpp.cluster.plugins.module_utils.host.firewall.system import FirewallError
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.host_types import FirewallRule

PURPOSE = "Ports of llama.cpp, open to planned clients and closed to everybody else"


def holds(name: str, present: str, planned: str) -> tuple[list[str], list[str]]:
    """A file before and after, as it is shown: whether it exists, and whether it has the planned rules."""
    same = f"{name}: holds these rules"
    other = f"{name}: holds other rules" if planned and present != planned else same
    return [other] if present else [], [same] if planned else []


def closes(rule: FirewallRule) -> bool:
    """Whether there is somebody left to whom the port is closed."""
    return names.EVERYBODY not in rule.sources


def _is_network(text: str) -> bool:
    """Whether it is the address of a host, or a network."""
    try:
        network = ipaddress.IPv4Network(text)
    except ValueError:
        return False
    return not network.is_multicast and text != names.EVERY_ADDRESS


def _is_address(text: str) -> bool:
    return text == names.EVERY_ADDRESS or ("/" not in text and _is_network(text))


def merge_rules(rules: Iterable[FirewallRule]) -> list[FirewallRule]:
    """Rules by address and port, each of these once, with sources in order; FirewallError for a rule that no manager accepts."""
    merged: dict[tuple[str, int], set[str]] = {}
    for rule in rules:
        if not _is_address(rule.address):
            raise FirewallError(
                f"{rule.address!r} in a firewall rule is not the IPv4 address of a host: give a numeric one."
            )
        for source in rule.sources:
            if not _is_network(source):
                raise FirewallError(
                    f"{source!r} in a firewall rule is not an IPv4 address or network: give one like 192.168.1.0/24."
                )
        if not 0 < rule.port < 65536:
            raise FirewallError(f"{rule.port} in a firewall rule is not a port: give one from 1 to 65535.")
        if rule.protocol != "tcp":
            raise FirewallError(
                f"{rule.protocol!r} in a firewall rule is not supported: workers and the server use tcp."
            )
        merged.setdefault((rule.address, rule.port), set()).update(rule.sources)
    return [
        FirewallRule(port, "tcp", tuple(sorted(sources)), address)
        for (address, port), sources in sorted(merged.items())
    ]
