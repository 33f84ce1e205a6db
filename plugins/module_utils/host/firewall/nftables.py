# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Rules in nftables."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from typing import NamedTuple

from ansible_collections.llamacpp.cluster.plugins.module_utils.common import names
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.errors import Refusal
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.files import replace_file
from ansible_collections.llamacpp.cluster.plugins.module_utils.host.firewall.rules import (
    PURPOSE,
    active,
    closes,
    holds,
    unit,
)
from ansible_collections.llamacpp.cluster.plugins.module_utils.host.system import System
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.host_types import FirewallRule

LOCKED_IN = (
    "CapabilityBoundingSet=CAP_NET_ADMIN",
    "IPAddressDeny=any",
    "KeyringMode=private",
    "LockPersonality=true",
    "MemoryDenyWriteExecute=true",
    "NoNewPrivileges=true",
    "PrivateDevices=true",
    "PrivateMounts=true",
    "ProtectClock=true",
    "ProtectControlGroups=true",
    "ProtectHome=true",
    "ProtectHostname=true",
    "ProtectKernelLogs=true",
    "ProtectKernelModules=true",
    "ProtectKernelTunables=true",
    "ProtectProc=invisible",
    "ProtectSystem=strict",
    "RestrictAddressFamilies=AF_NETLINK AF_UNIX",
    "RestrictNamespaces=true",
    "RestrictRealtime=true",
    "RestrictSUIDSGID=true",
    "SystemCallArchitectures=native",
    "SystemCallFilter=@system-service",
    "SystemCallFilter=~@privileged @resources",
    "SystemCallErrorNumber=EPERM",
    "UMask=0077",
)
"""What the unit, which runs nft as root, cannot do."""
TABLES = re.compile(rf"{names.ROOT}(-{names.CLUSTER})?")
"""Tables of clusters: a cluster changes no table of another one."""


class InstalledRule(NamedTuple):
    """A rule of the cluster."""

    handle: int
    comment: str


class Ruleset(NamedTuple):
    """What nftables has; a chain is named «family table chain»."""

    rules: dict[str, list[InstalledRule]]
    """of the cluster, by chain"""
    chains: list[str]
    """of others, that need an accept"""
    foreign: list[str]
    """what others have under the cluster's names: its table has one chain, and its mark in the comment of each rule"""


class Nftables:
    """A table of the cluster that closes the ports, and an accept at the top of each other chain that may close them too.

    An accept ends only the chain in which it stands, so that a drop in another one still counts. /etc/nftables.conf stays as it is: a unit sets the
    rules again after each start and reload of nftables.service, which flushes all of them. They are in /etc, which is mounted before the network
    starts, unlike /opt perhaps.
    """

    program = "nft"
    closing = frozenset({"drop", "reject", "jump", "goto", "queue", "vmap", "xt"})

    def __init__(self, system: System):
        self.system = system
        self.table = system.owner.root
        self.file = f"/etc/firewall-{system.owner.root}.nft"
        self.unit_name = unit(system.owner)
        self.unit = f"/etc/systemd/system/{self.unit_name}"
        self.link = f"/etc/systemd/system/nftables.service.wants/{self.unit_name}"

    def _rules(self, rule: FirewallRule, closed: bool) -> list[str]:
        """Rules of nft for the sources, and with ``closed`` one for all others that want to connect.

        The comment says what a rule is, so that nothing else of it has to be read again.
        """
        to = names.EVERYBODY if rule.address == names.EVERY_ADDRESS else rule.address
        to = f"ip daddr {to} {rule.protocol} dport {rule.port}"
        note = f"to/{rule.address}/{rule.protocol}/{rule.port}"
        lines = [
            f"ip saddr {source} {to} accept comment {self.system.owner.mark}/accept/from/{source}/{note}"
            for source in rule.sources
        ]
        if closed and closes(rule):
            lines.append(
                f'iifname != "lo" {to} tcp flags & (syn | ack) == syn drop comment {self.system.owner.mark}/drop/{note}'
            )
        return lines

    def _table(self, rules: Sequence[FirewallRule]) -> str:
        """Text that replaces the table, whether it exists or not."""
        if not rules:
            return ""
        inner = "\n".join(f"\t\t{line}" for rule in rules for line in self._rules(rule, closed=True))
        return (
            f"# {PURPOSE}: {self.system.owner.mark}\ntable inet {self.table}\ndelete table inet {self.table}\n"
            f"table inet {self.table} {{\n\tchain input {{\n\t\ttype filter hook input priority -10; policy accept;\n{inner}\n\t}}\n}}\n"
        )

    def _unit(self, rules: Sequence[FirewallRule], chains: list[str]) -> str:
        """The unit. It inserts a rule into another chain only where a flush has removed it."""
        if not rules:
            return ""
        accepts = [line for rule in rules for line in self._rules(rule, closed=False)]
        nft = self.system.program("nft")
        steps = [f"{nft} -f {self.file}"]
        for chain in chains if accepts else []:
            inserts = "; ".join(f"insert rule {chain} {line}" for line in reversed(accepts))
            steps.append(
                f"-/bin/sh -c \"{nft} list chain {chain} | grep -qF {self.system.owner.mark}/ || {nft} '{inserts}'\""
            )
        return "\n".join(
            [
                f"# {self.system.owner.mark}",
                "[Unit]",
                f"Description={PURPOSE}",
                "DefaultDependencies=no",
                "After=nftables.service",
                "PartOf=nftables.service",
                "ReloadPropagatedFrom=nftables.service",
                "Wants=network-pre.target",
                "Before=network-pre.target shutdown.target",
                "Conflicts=shutdown.target",
                "StartLimitIntervalSec=0",
                "",
                "[Service]",
                "Type=oneshot",
                "RemainAfterExit=true",
                *LOCKED_IN,
                *(f"{moment}={step}" for moment in ("ExecStart", "ExecReload") for step in steps),
                "",
                "[Install]",
                "WantedBy=nftables.service\n",
            ]
        )

    def _read(self) -> Ruleset:
        rules: dict[str, list[InstalledRule]] = {}
        chains, closing, owned = {}, set(), set()
        own, inside = f"inet {self.table}", set()
        for item in json.loads(self.system.run(["nft", "--json", "--terse", "list", "ruleset"]))["nftables"]:
            kind, entry = next(iter(item.items()))
            table = f"{entry.get('family')} {entry.get('table', entry.get('name'))}"
            if table == own:
                marked = kind == "rule" and entry.get("comment", "").startswith(f"{self.system.owner.mark}/")
                frame = kind == "table" or (kind == "chain" and entry["name"] == "input")
                inside.add("marked" if marked else "frame" if frame else "other")
            if kind == "table" and ("owner" in entry.get("flags", "") or TABLES.fullmatch(entry["name"])):
                owned.add(f"{entry['family']} {entry['name']}")
            elif kind == "chain" and entry["family"] in ("ip", "inet"):
                if entry.get("hook") == "input" and entry["type"] == "filter":
                    chains[f"{table} {entry['name']}"] = table
                if entry.get("policy") == "drop":
                    closing.add(f"{table} {entry['name']}")
            elif kind == "rule" and entry.get("comment", "").startswith(f"{self.system.owner.mark}/"):
                installed = InstalledRule(entry["handle"], entry["comment"])
                rules.setdefault(f"{table} {entry['chain']}", []).append(installed)
            elif kind == "rule" and any(self.closing.intersection(expression) for expression in entry["expr"]):
                closing.add(f"{table} {entry['chain']}")
        # Once it has one, a chain keeps it: what closes may come and go, as bans do.
        needing = [
            chain
            for chain, table in chains.items()
            if table not in owned
            and (chain in closing or chain in rules)
            and re.fullmatch(r"(ip|inet)( [a-zA-Z_][a-zA-Z0-9_./-]*){2}", chain)
        ]
        firsts = {name: self.system.text(name).partition("\n")[0] for name in (self.file, self.unit)}
        others = [name for name, first in firsts.items() if first and self.system.owner.mark not in first]
        if "other" in inside or (inside == {"frame"} and (self.file in others or not firsts[self.file])):
            others.append(f"the table {own} of nftables")
        return Ruleset(rules, sorted(needing), others)

    def foreign_names(self) -> list[str]:
        """What others have under the cluster's names."""
        return self._read().foreign if self._is_present() else []

    def _is_present(self) -> bool:
        """Whether anything under the cluster's names is on the host, without reading a ruleset that may be large."""
        if any(os.path.lexists(self.system.path(name)) for name in (self.file, self.unit, self.link)):
            return True
        return bool(self.system.output("nft", "list", "table", "inet", self.table))

    def _planned(self, rules: Sequence[FirewallRule], chains: list[str]) -> dict[str, list[str]]:
        """Chain → its rules."""
        planned = {chain: [line for rule in rules for line in self._rules(rule, closed=False)] for chain in chains}
        planned[f"inet {self.table} input"] = [line for rule in rules for line in self._rules(rule, closed=True)]
        return {chain: lines for chain, lines in planned.items() if lines}

    def _lines(self, chains: dict[str, list[str]]) -> list[str]:
        """From chain → comments of rules."""
        return [
            f"nft list chain {chain}: {self._words(comment)}" for chain in sorted(chains) for comment in chains[chain]
        ]

    @staticmethod
    def _words(comment: str) -> str:
        """What the comment of a rule says, with networks as they are written."""
        return re.sub(r"(?<=from )(\S+) (\d+)(?= to )", r"\1/\2", comment.partition("/")[2].replace("/", " "))

    def state(self, rules: Sequence[FirewallRule]) -> tuple[list[str], list[str]]:
        found = self._read() if rules or self._is_present() else Ruleset({}, [], [])
        if found.foreign and rules:
            raise Refusal(f"This host has {' and '.join(found.foreign)}{names.NOT_OURS}.")
        if found.foreign:
            return [], []
        planned = self._planned(rules, found.chains)
        before = self._lines({chain: [rule.comment for rule in entries] for chain, entries in found.rules.items()})
        after = self._lines({chain: [line.split()[-1] for line in lines] for chain, lines in planned.items()})
        for name, text in ((self.file, self._table(rules)), (self.unit, self._unit(rules, found.chains))):
            current, wanted = holds(name, self.system.text(name), text)
            before += current
            after += wanted
        is_so = {
            "enabled": os.path.lexists(self.system.path(self.link)),
            "active": self.unit_name in active(self.system),
        }
        before += [f"{self.unit_name}: {word}" for word, is_true in is_so.items() if is_true]
        after += [f"{self.unit_name}: {word}" for word in is_so if rules]
        return before, after

    def _transaction(self, rules: Sequence[FirewallRule], found: Ruleset) -> str:
        """What brings the running ruleset to the plan, all of it or nothing."""
        table_chain = f"inet {self.table} input"
        deleted = [
            f"delete rule {chain} handle {rule.handle}"
            for chain, entries in found.rules.items()
            if chain != table_chain
            for rule in entries
        ]
        inserted = [
            f"insert rule {chain} {line}"
            for chain, lines in self._planned(rules, found.chains).items()
            if chain != table_chain
            for line in reversed(lines)
        ]
        table = self._table(rules) or f"table inet {self.table}\ndelete table inet {self.table}"
        return "\n".join([*deleted, table, *inserted, ""])

    def change(self, rules: Sequence[FirewallRule]) -> None:
        found = self._read()
        self.system.run(["nft", "-f", "-"], self._transaction(rules, found))
        if rules:
            for name, text in ((self.file, self._table(rules)), (self.unit, self._unit(rules, found.chains))):
                replace_file(self.system.path(name), text, 0o644)
            self.system.run(["systemctl", "daemon-reload"])
            self.system.run(["systemctl", "enable", "--now", self.unit_name])
        else:
            if self.system.path(self.unit).exists():
                self.system.run(["systemctl", "disable", "--now", self.unit_name])
            for name in (self.file, self.unit, self.link):
                self.system.path(name).unlink(missing_ok=True)
            self.system.run(["systemctl", "daemon-reload"])
