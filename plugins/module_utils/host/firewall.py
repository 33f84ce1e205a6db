# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The cluster's rules in the host's firewall: which it has, which are planned, and what brings it from one to the other. Changes nothing.

Ours are known by a priority in firewalld, and by a comment in ufw and nftables. Rules of others are left alone.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

from ansible_collections.llamacpp.cluster.plugins.module_utils.common import names
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.errors import Refusal
from ansible_collections.llamacpp.cluster.plugins.module_utils.host.system import System
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.host_types import FirewallRule

MARK = names.ROOT
PRIORITIES = {"accept": -20050, "drop": -20049}
"""Of rich rules."""
NFT_FILE = f"/etc/firewall-{MARK}.nft"
NFT_TABLE = f"inet {MARK}"
NFT_AT_BOOT = f"/etc/systemd/system/nftables.service.wants/firewall-{MARK}.service"
"""Sets the table after each start of nftables."""
NFT_COMMENT = re.compile(rf'comment "{MARK} ([^"]*)"')
UFW_RULE = re.compile(r"ufw (allow|deny)(?: from (\S+))?(?: to (\S+) port (\d+) proto tcp| (\d+)/tcp)")
NOT_LASTING = ", either now or after a restart"
"""Of a rule that is not there at both times."""


class Rule(NamedTuple):
    action: str
    """accept or drop"""
    source: str
    address: str
    port: int


class State(NamedTuple):
    """What a manager has of the cluster, and what it is to have, each rule as the manager writes it."""

    present: Sequence[str]
    """in order"""
    wanted: Mapping[str, dict[str, Any]]
    """with the arguments of the module that drives the manager; of each port those that accept before those that drop"""
    partial: frozenset[str] = frozenset()
    """present, but not both at run time and permanently"""

    @property
    def missing(self) -> list[str]:
        return [rule for rule in self.wanted if rule not in self.present or rule in self.partial]

    @property
    def unplanned(self) -> list[str]:
        return [rule for rule in self.present if rule not in self.wanted]


class Steps(NamedTuple):
    """From one to the other."""

    differs: bool
    before: list[str]
    after: list[str]
    add: list[dict[str, Any]]
    """arguments of the module that drives the manager, in order"""
    remove: list[dict[str, Any]]
    text: str = ""
    """of the file of nftables"""
    closing: tuple[str, ...] = ()
    """chains of others in nftables that drop what they do not accept: our table cannot open a port there"""


def _rules(planned: Iterable[FirewallRule]) -> list[Rule]:
    found = []
    for rule in sorted(planned, key=lambda rule: (rule.address, rule.port)):
        found += [Rule("accept", source, rule.address, rule.port) for source in rule.sources]
        if names.EVERYBODY not in rule.sources:
            found.append(Rule("drop", names.EVERYBODY, rule.address, rule.port))
    return found


def _firewalld(rules: Sequence[Rule], system: System) -> State:
    """The same rich rules in each zone that is in use, at run time and permanently."""
    used = {system.run(["firewall-cmd", "--get-default-zone"]).strip()}
    used |= set(re.findall(r"^(\S+)", system.run(["firewall-cmd", "--get-active-zones"]), re.MULTILINE))
    held: list[set[str]] = []
    for where in ([], ["--permanent"]):
        lines, zone = set(), ""
        for line in system.run(["firewall-cmd", *where, "--list-all-zones"]).splitlines():
            zone = line.split()[0] if line[:1].strip() else zone
            if re.search(r'rule priority="(-20050|-20049)" ', line):
                lines.add(f"{zone}: {line.strip()}")
        held.append(lines)
    wanted = [f"{zone}: {_for_firewalld(rule)}" for zone in sorted(used) for rule in rules]
    partial = frozenset(held[0] ^ held[1])
    return State(sorted(held[0] | held[1]), {rule: _firewalld_arguments(rule) for rule in wanted}, partial)


def _for_firewalld(rule: Rule) -> str:
    source = "" if rule.source == names.EVERYBODY else f' source address="{rule.source}"'
    to = "" if rule.address == names.EVERY_ADDRESS else f' destination address="{rule.address}"'
    port = f' port port="{rule.port}" protocol="tcp"'
    return f'rule priority="{PRIORITIES[rule.action]}" family="ipv4"{source}{to}{port} {rule.action}'


def _firewalld_arguments(rule: str) -> dict[str, Any]:
    return dict(zip(("zone", "rich_rule"), rule.split(": ", 1)))


def _ufw(rules: Sequence[Rule], system: System) -> State:
    """What others have made stays as it is: where one of their rules lets the head in, nothing is closed before it."""
    if not system.program("ufw"):
        return State([], {})
    added = [line.partition(" comment ") for line in system.run(["ufw", "show", "added"]).splitlines()]
    present = [rule for rule, _word, comment in added if comment == f"'{MARK}'" and UFW_RULE.fullmatch(rule)]
    others = {rule for rule, _word, comment in added if comment != f"'{MARK}'"}
    opened = {rule[2:] for rule in rules if _for_ufw(rule) in others}
    texts = [_for_ufw(rule) for rule in rules if rule.action == "accept" or rule[2:] not in opened]
    return State(present, {text: _ufw_arguments(text) for text in texts if text not in others})


def _for_ufw(rule: Rule) -> str:
    action = {"accept": "allow", "drop": "deny"}[rule.action]
    source = "" if rule.source == names.EVERYBODY else f" from {rule.source}"
    if rule.address != names.EVERY_ADDRESS:
        return f"ufw {action}{source} to {rule.address} port {rule.port} proto tcp"
    return f"ufw {action}{source} to any port {rule.port} proto tcp" if source else f"ufw {action} {rule.port}/tcp"


def _ufw_arguments(text: str) -> dict[str, Any]:
    action, source, address, port, short = UFW_RULE.findall(text)[0]
    ends = {"from_ip": source or "any", "to_ip": address or "any", "to_port": port or short}
    return {"rule": action, **ends, "proto": "tcp"}


def _nftables(rules: Sequence[Rule], system: System) -> State:
    running = NFT_COMMENT.findall(system.output("nft", "list", "table", *NFT_TABLE.split()))
    written = NFT_COMMENT.findall(system.text(NFT_FILE))
    if foreign_names(system):
        if rules:
            raise Refusal(f"This host has {foreign_names(system)[0]}{names.NOT_OURS}.")
        return State([], {})
    lasting = written if system.path(NFT_AT_BOOT).is_symlink() else []
    partial = frozenset({*running, *written} - set(running).intersection(lasting))
    return State(list(dict.fromkeys([*running, *written])), {_comment(rule): rule._asdict() for rule in rules}, partial)


def _comment(rule: Rule) -> str:
    return f"{rule.action} {rule.source} to {rule.address} port {rule.port}"


MANAGERS: Mapping[str, Callable[[Sequence[Rule], System], State]] = {
    "firewalld": _firewalld,
    "ufw": _ufw,
    "nftables": _nftables,
}


def foreign_names(system: System) -> list[str]:
    """What others have under the names of our table."""
    text = system.text(NFT_FILE)
    table = system.output("nft", "list", "table", *NFT_TABLE.split()) if system.program("nft") else ""
    theirs = [line for line in table.splitlines() if line.startswith("\t\t") and not NFT_COMMENT.search(line)]
    files = [NFT_FILE] if text and names.DEFINITION_MARK not in text else []
    return files + [f"the table {NFT_TABLE} of nftables"] * any("type filter hook" not in line for line in theirs)


def differs(manager: str | None, rules: Sequence[FirewallRule], system: System) -> bool:
    """Whether a rule of the cluster is missing or unplanned."""
    return steps(manager, rules, False, system).differs


def steps(manager: str | None, planned: Sequence[FirewallRule], keep: bool, system: System) -> Steps:
    """What brings the active manager to these rules.

    :param keep: leave what is not planned any more: something may still listen there.
    """
    if not manager:
        return Steps(False, [], [], [], [])
    state = MANAGERS[manager](_rules(planned), system)
    unplanned = [] if keep else state.unplanned
    after = [*state.wanted, *(rule for rule in state.present if rule not in [*state.wanted, *unplanned])]
    before = [f"{rule}{NOT_LASTING if rule in state.partial else ''}" for rule in set(state.present)]
    changed = bool(state.missing or unplanned)
    shown = changed, sorted(before), sorted(after)
    if manager == "nftables":
        text = _table(after) if after and changed else system.text(NFT_FILE) if after else ""
        return Steps(*shown, [], [], text, _closing_chains(system) if after else ())
    if manager == "ufw":
        # Each is put first, so what accepts has to be put again after what drops.
        to = itemgetter("to_ip", "to_port")
        closed = {to(state.wanted[rule]) for rule in state.missing if " deny " in rule}
        kept = [rule for rule in state.present if rule in state.wanted and " allow " in rule]
        moved = [rule for rule in kept if to(state.wanted[rule]) in closed]
        add = [state.wanted[rule] for rule in reversed([*state.wanted]) if rule in [*state.missing, *moved]]
        first = [{**state.wanted[rule], "delete": True} for rule in moved]
        return Steps(*shown, first + add, [_ufw_arguments(rule) for rule in unplanned])
    added, removed = ([*map(_firewalld_arguments, rules)] for rules in (state.missing, unplanned))
    return Steps(*shown, added, removed)


def _closing_chains(system: System) -> tuple[str, ...]:
    printed = system.run(["nft", "list", "chains"])
    return tuple(re.findall(r"chain (\S+) {\n\s+type filter hook input [^\n]*policy drop", printed))


def _table(comments: Sequence[str]) -> str:
    """What replaces the table, whether it exists or not."""
    inner = "".join(f"    {_for_nft(comment)}\n" for comment in sorted(comments) if len(comment.split()) == 6)
    return (
        f"# {names.DEFINITION_MARK}: ports of llama.cpp, open to planned clients and closed to everybody else.\n"
        f"table {NFT_TABLE}\ndelete table {NFT_TABLE}\n"
        f"table {NFT_TABLE} {{\n  chain input {{\n    type filter hook input priority -10; policy accept;\n{inner}  }}\n}}\n"
    )


def _for_nft(comment: str) -> str:
    action, source, _to, address, _port, port = comment.split()
    client = "" if source == names.EVERYBODY else f"ip saddr {source} "
    to = "ip daddr 0.0.0.0/0" if address == names.EVERY_ADDRESS else f"ip daddr {address}"
    new, flags = ('iifname != "lo" ', " tcp flags & (syn | ack) == syn") if action == "drop" else ("", "")
    return f'{new}{client}{to} tcp dport {port}{flags} {action} comment "{MARK} {comment}"'
