# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Ports of workers are open to their head, that of the server to its networks, and both are closed to everybody else.

The state of a manager is a list of lines for people, one for each rule or file of the cluster; the present and the wanted state are compared as such
lists. They never contain what belongs to somebody else.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from ansible_collections.llamacpp.cluster.plugins.module_utils.common import names
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.errors import Refusal
from ansible_collections.llamacpp.cluster.plugins.module_utils.facts import firewall
from ansible_collections.llamacpp.cluster.plugins.module_utils.host.firewall.firewalld import Firewalld
from ansible_collections.llamacpp.cluster.plugins.module_utils.host.firewall.nftables import Nftables
from ansible_collections.llamacpp.cluster.plugins.module_utils.host.firewall.rules import active, merge_rules
from ansible_collections.llamacpp.cluster.plugins.module_utils.host.firewall.ufw import Ufw
from ansible_collections.llamacpp.cluster.plugins.module_utils.host.system import System
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.host_types import FirewallRule


class Manager(Protocol):
    """A program that filters, and the cluster's rules in it."""

    program: str

    def __init__(self, system: System) -> None: ...

    def state(self, rules: Sequence[FirewallRule]) -> tuple[list[str], list[str]]:
        """The cluster's rules as they are, and as they are with ``rules``: a line for each rule or file."""

    def change(self, rules: Sequence[FirewallRule]) -> None:
        """Replaces the cluster's rules."""


MANAGERS: dict[str, type[Manager]] = {"firewalld": Firewalld, "ufw": Ufw, "nftables": Nftables}
"""In this order the first that is active is the host's manager."""


def active_manager(system: System) -> str | None:
    """The manager that filters on this host."""
    return firewall.manager(active(system), system.text(firewall.UFW_SETTINGS))


def _managers(manager: str | None, system: System) -> dict[str, Manager]:
    """Name → manager, of those that are installed; Refusal if the one that is to be opened does not filter."""
    if manager and manager != active_manager(system):
        raise Refusal(
            f"{manager} is to open ports, but is not the active firewall manager of this host, which is "
            f"{active_manager(system) or 'none'}: start it, or name the active one."
        )
    return {name: kind(system) for name, kind in MANAGERS.items() if system.program(kind.program)}


def _states(
    managers: Mapping[str, Manager], manager: str | None, rules: Sequence[FirewallRule]
) -> dict[str, tuple[list[str], list[str]]]:
    """Name of a manager → its state before and after."""
    return {name: found.state(rules if name == manager else []) for name, found in managers.items()}


def foreign_names(system: System) -> list[str]:
    """What others have under the cluster's names."""
    managers = [kind(system) for kind in (Firewalld, Nftables) if system.program(kind.program)]
    return [name for manager in managers for name in manager.foreign_names()]


def differs(manager: str | None, rules: Sequence[FirewallRule], system: System) -> bool:
    """Whether a rule of the cluster is missing, stale, or left in a manager that is not the active one."""
    states = _states(_managers(manager, system), manager, merge_rules(rules))
    return any(before != after for before, after in states.values())


def _parse_state(lines: Iterable[str], rules: Sequence[FirewallRule]) -> list[FirewallRule]:
    """The rules that lines of a state are, one for each line, without those for a protocol, address and port of ``rules``."""
    planned = {(rule.protocol, rule.address, rule.port) for rule in rules}
    found: list[FirewallRule] = []
    for line in lines:
        words = re.sub(r' address=| port=|"', " ", line.rpartition(": ")[2])
        to = re.search(r"(?:to|destination) +(\d[\d.]+)", words)
        port = re.search(r"(?:port +|tcp |udp )(\d+)|(\d+)/tcp", words)
        protocol = "udp" if re.search(r"\budp\b", words) else "tcp"
        address, number = to[1] if to else names.EVERY_ADDRESS, int(port[1] or port[2]) if port else 0
        if port and (protocol, address, number) not in planned:
            source = re.search(r"(?:from|source) +([\d./]+)", words)
            opens = re.search(r"\b(?:allow|accept)\b", words)
            sources = (source[1] if source else names.EVERYBODY,) if opens else ()
            found.append(FirewallRule(number, protocol, sources, address))
    return found


def apply(
    manager: str | None, rules: Sequence[FirewallRule], check: bool, system: System, keep: bool = False
) -> tuple[list[str], list[str]]:
    """Opens the ports in the active manager, and removes the cluster's rules from the others.

    :param manager: ``active_manager()``; without one, all is removed.
    :param check: change nothing.
    :param keep: something may still listen on other ports: leave the cluster's rules for them, and those in the other managers.
    :returns: the cluster's rules before and after, one line for each.
    """
    rules = merge_rules(rules)
    managers = _managers(manager, system)
    if keep:
        managers = {name: found for name, found in managers.items() if name == manager}
        kept = [rule for found in managers.values() for rule in _parse_state(found.state([])[0], rules)]
        rules = merge_rules([*rules, *kept])
    states = _states(managers, manager, rules)
    for name in sorted(managers, key=lambda name: name != manager):
        wanted = rules if name == manager else []
        if not check and states[name][0] != states[name][1]:
            managers[name].change(wanted)
            before, after = managers[name].state(wanted)
            if before != after:
                raise Refusal(
                    f"{name} holds {before or 'no rule of the cluster'} after the change, planned {after or 'no rule of the cluster'}: check its log."
                )
    return (
        [line for before, _after in states.values() for line in before],
        [line for _before, after in states.values() for line in after],
    )
