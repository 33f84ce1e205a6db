# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Rules, whatever the manager: on ``address`` (of the host, or every one) ``port`` takes new connections from ``sources`` only."""

from __future__ import annotations

from collections.abc import Iterable

from ansible_collections.llamacpp.cluster.plugins.module_utils.common import names, typed_json
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.errors import Refusal
from ansible_collections.llamacpp.cluster.plugins.module_utils.facts import firewall
from ansible_collections.llamacpp.cluster.plugins.module_utils.host.system import System
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.host_types import FirewallRule

PURPOSE = "Ports of llama.cpp, open to planned clients and closed to everybody else"


def holds(name: str, present: str, planned: str) -> tuple[list[str], list[str]]:
    """A file before and after, as it is shown: whether it exists, and whether it has the planned rules."""
    same = f"{name}: holds these rules"
    other = f"{name}: holds other rules" if planned and present != planned else same
    return [other] if present else [], [same] if planned else []


def closes(rule: FirewallRule) -> bool:
    """Whether there is somebody left to whom the port is closed. WireGuard itself answers nobody else."""
    return names.EVERYBODY not in rule.sources and rule.protocol == "tcp"


def unit(owner: names.Names) -> str:
    """The unit that sets rules of nftables. It is not named like a service of the cluster, which would be stopped where it is not in the plan."""
    return f"firewall-{owner.root}.service"


def active(system: System) -> set[str]:
    """Managers, and the cluster's unit, that systemd reports as active."""
    units = [*names.FIREWALLS, unit(system.owner)]
    # Its status says whether all of them are active.
    printed = system.run(["systemctl", "is-active", *units], may_fail=True) if system.program("systemctl") else ""
    return firewall.active_units(units, printed)


def merge_rules(rules: Iterable[FirewallRule]) -> list[FirewallRule]:
    """Rules by protocol, address and port, each of these once, with sources in order; a Refusal for a rule that no manager accepts."""
    merged: dict[tuple[str, str, int], set[str]] = {}
    for rule in rules:
        wrong = typed_json.problem("", typed_json.dump(rule), FirewallRule)
        if wrong:
            raise Refusal(f"{wrong.where} of a firewall rule {wrong.why}: give numeric IPv4 addresses and a port.")
        merged.setdefault((rule.protocol, rule.address, rule.port), set()).update(rule.sources)
    return [
        FirewallRule(port, protocol, tuple(sorted(sources)), address)
        for (protocol, address, port), sources in sorted(merged.items())
    ]
