# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The cluster's rules in the host's firewall: which it has, which are planned, and what brings it from one to the other. Changes nothing.

Ours are known by a priority in firewalld, and by a comment in ufw and nftables. Rules of others are left alone.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
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
NOT_LASTING = ", either now or after a restart"
"""Of a rule that is not there at both times."""
RICH_RULE = re.compile(
    r'rule priority="(?:-20050|-20049)" family="ipv4"(?: source address="(?P<source>\S+)")?(?: destination address="(?P<address>\S+)")? '
    r'port port="(?P<port>\d+)" protocol="(?P<protocol>\w+)" (?P<action>accept|drop)'
)
UFW_RULE = re.compile(
    r"ufw (?P<action>allow|deny)(?: from (?P<source>\S+))?(?: to (?P<address>\S+) port (?P<port>\d+) proto (?P<protocol>\w+)"
    r"| (?P<short>\d+)/(?P<short_protocol>\w+))(?: comment '(?P<comment>.*)')?"
)
NFT_COMMENT = re.compile(
    rf'comment "{MARK} (?P<action>accept|drop) (?P<source>\S+) (?P<address>\S+) (?P<protocol>\w+) (?P<port>\d+)"'
)


class Line(NamedTuple):
    """One rule of a manager."""

    action: str
    """accept or drop"""
    source: str
    address: str
    protocol: str
    port: int
    zone: str = ""
    """of firewalld"""

    def __str__(self) -> str:
        zone = f" in zone {self.zone}" if self.zone else ""
        return f"{self.action} {self.source} to {self.address} {self.protocol} port {self.port}{zone}"


class State(NamedTuple):
    """What a manager has of the cluster, and what it is to have."""

    present: list[Line]
    """in order"""
    wanted: list[Line]
    """of each port those that accept before those that drop"""
    partial: frozenset[Line] = frozenset()
    """present, but not both at run time and permanently"""

    @property
    def differs(self) -> bool:
        return bool(self.missing or self.stale)

    @property
    def missing(self) -> list[Line]:
        return [line for line in self.wanted if line not in self.present or line in self.partial]

    @property
    def stale(self) -> list[Line]:
        return [line for line in self.present if line not in self.wanted]


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


def _lines(rules: Iterable[FirewallRule]) -> list[Line]:
    found = []
    for rule in sorted(rules, key=lambda rule: (rule.protocol, rule.address, rule.port)):
        to = (rule.address, rule.protocol, rule.port)
        found += [Line("accept", source, *to) for source in rule.sources]
        if names.EVERYBODY not in rule.sources:
            found.append(Line("drop", names.EVERYBODY, *to))
    return list(dict.fromkeys(found))


def _parsed(found: re.Match[str], zone: str = "") -> Line:
    named = found.groupdict()
    source, address = (
        {None: names.EVERYBODY, "any": names.EVERYBODY}.get(named[key], named[key]) for key in ("source", "address")
    )
    action = {"allow": "accept", "deny": "drop"}.get(named["action"], named["action"])
    address = names.EVERY_ADDRESS if address == names.EVERYBODY else address
    protocol, port = named["protocol"] or named["short_protocol"], named["port"] or named["short"]
    return Line(action, source, address, protocol, int(port), zone)


def _firewalld(rules: Sequence[FirewallRule], system: System) -> State:
    """The same rich rules in each zone that is in use, at run time and permanently."""
    used = {system.run(["firewall-cmd", "--get-default-zone"]).strip()}
    used |= set(re.findall(r"^(\S+)", system.run(["firewall-cmd", "--get-active-zones"]), re.MULTILINE))
    held: list[set[Line]] = []
    for where in ([], ["--permanent"]):
        lines, zone = set(), ""
        for line in system.run(["firewall-cmd", *where, "--list-all-zones"]).splitlines():
            rich = RICH_RULE.fullmatch(line.strip())
            zone = line.split()[0] if line[:1].strip() else zone
            lines |= {_parsed(rich, zone)} if rich else set()
        held.append(lines)
    wanted = [line._replace(zone=zone) for zone in sorted(used) for line in _lines(rules)]
    return State(sorted(held[0] | held[1]), wanted, frozenset(held[0] ^ held[1]))


def _ufw(rules: Sequence[FirewallRule], system: System) -> State:
    """What others have made stays as it is: where one of their rules lets the head in, nothing is closed before it."""
    if not system.program("ufw"):
        return State([], [])
    added = [found for line in system.run(["ufw", "show", "added"]).splitlines() if (found := UFW_RULE.fullmatch(line))]
    present = [_parsed(found) for found in added if found["comment"] == MARK]
    others = {_parsed(found) for found in added if found["comment"] != MARK}
    wanted = [line for line in _lines(rules) if line not in others]
    opened = {line[2:] for line in set(_lines(rules)) & others}
    return State(present, [line for line in wanted if line.action == "accept" or line[2:] not in opened])


def _nftables(rules: Sequence[FirewallRule], system: System) -> State:
    table = system.output("nft", "list", "table", *NFT_TABLE.split())
    running = [_parsed(found) for found in NFT_COMMENT.finditer(table)]
    written = [_parsed(found) for found in NFT_COMMENT.finditer(system.text(NFT_FILE))]
    if foreign_names(system):
        if rules:
            raise Refusal(f"This host has {foreign_names(system)[0]}{names.NOT_OURS}.")
        return State([], [])
    lasting = written if system.path(NFT_AT_BOOT).is_symlink() else []
    partial = frozenset({*running, *written} - set(running).intersection(lasting))
    return State(list(dict.fromkeys([*running, *written])), _lines(rules), partial)


MANAGERS: Mapping[str, Callable[[Sequence[FirewallRule], System], State]] = {
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
    """Whether a rule of the cluster is missing or stale."""
    return MANAGERS[manager](rules, system).differs if manager else False


def steps(manager: str | None, rules: Sequence[FirewallRule], keep: bool, system: System) -> Steps:
    """What brings the active manager to these rules.

    :param keep: leave what is not planned any more: something may still listen there.
    """
    state = MANAGERS[manager](rules, system) if manager else State([], [])
    stale = [] if keep else state.stale
    after = [*state.wanted, *(line for line in state.present if line not in [*state.wanted, *stale])]
    before = [f"{line}{NOT_LASTING if line in state.partial else ''}" for line in set(state.present)]
    changed = bool(state.missing or stale)
    shown = changed, sorted(before), sorted(map(str, set(after)))
    if manager == "nftables":
        text = _table(after) if after and changed else system.text(NFT_FILE) if after else ""
        return Steps(*shown, [], [], text, _closing_chains(system) if after else ())
    if manager == "ufw":
        # Each is put first, so what accepts has to be put again after what drops.
        closed = {line[2:] for line in state.missing if line.action == "drop"}
        moved = [line for line in state.present if line in state.wanted and line[2:] in closed]
        add = [line for line in reversed(state.wanted) if line in [*state.missing, *moved]]
        first = [{**_for_ufw(line), "delete": True} for line in moved]
        return Steps(*shown, first + [_for_ufw(line) for line in add], [_for_ufw(line) for line in stale])
    return Steps(*shown, [_for_firewalld(line) for line in state.missing], [_for_firewalld(line) for line in stale])


def _closing_chains(system: System) -> tuple[str, ...]:
    printed = system.run(["nft", "list", "chains"])
    return tuple(re.findall(r"chain (\S+) {\n\s+type filter hook input [^\n]*policy drop", printed))


def _for_ufw(line: Line) -> dict[str, Any]:
    return {
        "rule": {"accept": "allow", "drop": "deny"}[line.action],
        "from_ip": "any" if line.source == names.EVERYBODY else line.source,
        "to_ip": "any" if line.address == names.EVERY_ADDRESS else line.address,
        "to_port": str(line.port),
        "proto": line.protocol,
    }


def _for_firewalld(line: Line) -> dict[str, Any]:
    source = "" if line.source == names.EVERYBODY else f' source address="{line.source}"'
    to = "" if line.address == names.EVERY_ADDRESS else f' destination address="{line.address}"'
    port = f' port port="{line.port}" protocol="{line.protocol}"'
    rule = f'rule priority="{PRIORITIES[line.action]}" family="ipv4"{source}{to}{port} {line.action}'
    return {"zone": line.zone, "rich_rule": rule}


def _table(lines: Sequence[Line]) -> str:
    """What replaces the table, whether it exists or not."""
    inner = "".join(f"    {_for_nft(line)}\n" for line in sorted(lines, key=lambda line: line.action == "drop"))
    return (
        f"# {names.DEFINITION_MARK}: ports of llama.cpp, open to planned clients and closed to everybody else.\n"
        f"table {NFT_TABLE}\ndelete table {NFT_TABLE}\n"
        f"table {NFT_TABLE} {{\n  chain input {{\n    type filter hook input priority -10; policy accept;\n{inner}  }}\n}}\n"
    )


def _for_nft(line: Line) -> str:
    source = "" if line.source == names.EVERYBODY else f"ip saddr {line.source} "
    to = "ip daddr 0.0.0.0/0" if line.address == names.EVERY_ADDRESS else f"ip daddr {line.address}"
    new = 'iifname != "lo" ' if line.action == "drop" else ""
    flags = " tcp flags & (syn | ack) == syn" if line.action == "drop" and line.protocol == "tcp" else ""
    comment = f"{MARK} {line.action} {line.source} {line.address} {line.protocol} {line.port}"
    return f'{new}{source}{to} {line.protocol} dport {line.port}{flags} {line.action} comment "{comment}"'
