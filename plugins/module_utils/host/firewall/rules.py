# Copyright (c) 2026 the llamacpp.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Present and planned rules of the cluster in the host's firewall. This module changes nothing.

Our rules have their own priority in firewalld, and a comment in ufw and nftables. Foreign rules are left alone.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from ansible_collections.llamacpp.cluster.plugins.module_utils.common import names
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.errors import Refusal
from ansible_collections.llamacpp.cluster.plugins.module_utils.host.system import System
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.host_types import FirewallRule

FIREWALLD_PRIORITIES = {"accept": -20050, "drop": -20049}
NFT_FILE = f"/etc/firewall-{names.PREFIX}.nft"
NFT_TABLE = f"inet {names.PREFIX}"
NFT_BOOT_LINK = f"/etc/systemd/system/nftables.service.wants/firewall-{names.PREFIX}.service"
"""Link that loads the table after each start of nftables."""
NFT_RULE_PATTERN = re.compile(rf'comment "{names.PREFIX} ([^"]*)"')
UFW_PATTERN = re.compile(r"ufw (allow|deny)(?: from (\S+))?(?: to (\S+) port (\d+) proto tcp| (\d+)/tcp)")
PARTIAL_NOTE = " (in effect only until a restart, or only after one)"
"""Note on a rule that is in effect only now, or only after a restart."""


class Rule(NamedTuple):
    action: str
    """accept or drop"""
    source: str
    address: str
    port: int


class RuleState(NamedTuple):
    """Present and planned rules of the cluster, in the manager's form."""

    present_rules: Sequence[str]
    """in order"""
    goals: Mapping[str, dict[str, Any]]
    """planned rules → arguments of the module that configures the manager; for each port, accepting rules come first"""
    partial_rules: frozenset[str] = frozenset()
    """present rules that are missing either at run time or from the permanent configuration"""

    @property
    def missing_rules(self) -> list[str]:
        return [rule for rule in self.goals if rule not in self.present_rules or rule in self.partial_rules]

    @property
    def obsolete_rules(self) -> list[str]:
        return [rule for rule in self.present_rules if rule not in self.goals]


def _rules(rule_plans: Iterable[FirewallRule]) -> list[Rule]:
    rules = []
    for rule in sorted(rule_plans, key=lambda rule: (rule.address, rule.port)):
        rules += [Rule("accept", source, rule.address, rule.port) for source in rule.sources]
        if names.ANY_NETWORK not in rule.sources:
            rules.append(Rule("drop", names.ANY_NETWORK, rule.address, rule.port))
    return rules


def _firewalld_state(rules: Sequence[Rule], system: System) -> RuleState:
    """Return the rich rules. Each zone in use needs all planned rules, both at run time and permanently."""
    zones = {system.run(["firewall-cmd", "--get-default-zone"]).strip()}
    zones |= set(re.findall(r"^(\S+)", system.run(["firewall-cmd", "--get-active-zones"]), re.MULTILINE))
    rule_sets: list[set[str]] = []
    for options in ([], ["--permanent"]):
        lines, zone = set(), ""
        for line in system.run(["firewall-cmd", *options, "--list-all-zones"]).splitlines():
            zone = line.split()[0] if line[:1].strip() else zone
            if re.search(r'rule priority="(-20050|-20049)" ', line):
                lines.add(f"{zone}: {line.strip()}")
        rule_sets.append(lines)
    texts = [f"{zone}: {_rich_rule(rule)}" for zone in sorted(zones) for rule in rules]
    partial_rules = frozenset(rule_sets[0] ^ rule_sets[1])
    return RuleState(
        sorted(rule_sets[0] | rule_sets[1]), {rule: firewalld_arguments(rule) for rule in texts}, partial_rules
    )


def _rich_rule(rule: Rule) -> str:
    source = "" if rule.source == names.ANY_NETWORK else f' source address="{rule.source}"'
    destination = "" if rule.address == names.ANY_ADDRESS else f' destination address="{rule.address}"'
    port = f' port port="{rule.port}" protocol="tcp"'
    return f'rule priority="{FIREWALLD_PRIORITIES[rule.action]}" family="ipv4"{source}{destination}{port} {rule.action}'


def firewalld_arguments(rule: str) -> dict[str, Any]:
    return dict(zip(("zone", "rich_rule"), rule.split(": ", 1)))


def _ufw_state(rules: Sequence[Rule], system: System) -> RuleState:
    """Return the rules of ufw. Foreign rules stay: if a foreign rule already accepts the head, the port is not closed to others."""
    if not system.program("ufw"):
        return RuleState([], {})
    added_lines = [line.partition(" comment ") for line in system.run(["ufw", "show", "added"]).splitlines()]
    present_rules = [
        rule for rule, _word, comment in added_lines if comment == f"'{names.PREFIX}'" and UFW_PATTERN.fullmatch(rule)
    ]
    foreign_rules = {rule for rule, _word, comment in added_lines if comment != f"'{names.PREFIX}'"}
    open_endpoints = {rule[2:] for rule in rules if _ufw_command(rule) in foreign_rules}
    texts = [_ufw_command(rule) for rule in rules if rule.action == "accept" or rule[2:] not in open_endpoints]
    return RuleState(present_rules, {text: ufw_arguments(text) for text in texts if text not in foreign_rules})


def _ufw_command(rule: Rule) -> str:
    action = {"accept": "allow", "drop": "deny"}[rule.action]
    source = "" if rule.source == names.ANY_NETWORK else f" from {rule.source}"
    if rule.address != names.ANY_ADDRESS:
        return f"ufw {action}{source} to {rule.address} port {rule.port} proto tcp"
    return f"ufw {action}{source} to any port {rule.port} proto tcp" if source else f"ufw {action} {rule.port}/tcp"


def ufw_arguments(text: str) -> dict[str, Any]:
    action, source, address, port, any_address_port = UFW_PATTERN.findall(text)[0]
    endpoints = {"from_ip": source or "any", "to_ip": address or "any", "to_port": port or any_address_port}
    return {"rule": action, **endpoints, "proto": "tcp"}


def _nftables_state(rules: Sequence[Rule], system: System) -> RuleState:
    nft_rules = NFT_RULE_PATTERN.findall(system.output("nft", "list", "table", *NFT_TABLE.split()))
    file_rules = NFT_RULE_PATTERN.findall(system.text(NFT_FILE))
    if find_foreign_objects(system):
        if rules:
            raise Refusal(f"This host has {find_foreign_objects(system)[0]}{names.FOREIGN_REMEDY}.")
        return RuleState([], {})
    boot_rules = file_rules if system.path(NFT_BOOT_LINK).is_symlink() else []
    partial_rules = frozenset({*nft_rules, *file_rules} - set(nft_rules).intersection(boot_rules))
    return RuleState(
        list(dict.fromkeys([*nft_rules, *file_rules])),
        {_comment(rule): rule._asdict() for rule in rules},
        partial_rules,
    )


def _comment(rule: Rule) -> str:
    return f"{rule.action} {rule.source} to {rule.address} port {rule.port}"


STATE_FUNCTIONS: Mapping[str, Callable[[Sequence[Rule], System], RuleState]] = {
    "firewalld": _firewalld_state,
    "ufw": _ufw_state,
    "nftables": _nftables_state,
}


def find_foreign_objects(system: System) -> list[str]:
    """Return foreign objects with the name of our table."""
    text = system.text(NFT_FILE)
    table = system.output("nft", "list", "table", *NFT_TABLE.split()) if system.program("nft") else ""
    other_lines = [line for line in table.splitlines() if line.startswith("\t\t") and not NFT_RULE_PATTERN.search(line)]
    files = [NFT_FILE] if text and names.DEFINITION_MARK not in text else []
    return files + [f"the nftables table {NFT_TABLE}"] * any("type filter hook" not in line for line in other_lines)


def state_of(manager: str, rule_plans: Iterable[FirewallRule], system: System) -> RuleState:
    """Return the present and the planned rules of the active manager."""
    return STATE_FUNCTIONS[manager](_rules(rule_plans), system)


def has_differences(manager: str, rule_plans: Iterable[FirewallRule], system: System) -> bool:
    """Return whether a rule of the cluster is missing or no longer planned."""
    state = state_of(manager, rule_plans, system)
    return bool(state.missing_rules or state.obsolete_rules)
