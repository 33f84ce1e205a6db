# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Rules in firewalld."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import NamedTuple

from ansible_collections.llamacpp.cluster.plugins.module_utils.common import names
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.errors import Refusal
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.files import replace_file
from ansible_collections.llamacpp.cluster.plugins.module_utils.host.firewall.rules import PURPOSE, active, closes, holds
from ansible_collections.llamacpp.cluster.plugins.module_utils.host.system import System
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.host_types import FirewallRule

Places = dict[tuple[str, ...], list[str]]
"""Arguments of firewall-cmd that name a place → rich rules there."""


class Section(NamedTuple):
    """A zone or policy."""

    is_active: bool
    is_default: bool
    rules: list[str]
    """rich rules of the cluster"""


class Firewalld:
    """A permanent policy of the cluster, before the zones; it takes effect when firewalld is next reloaded or started.

    Until then the same rich rules stand in the running zones: a reload here would drop what somebody has set at run time only. The cluster's rich
    rules are recognised by their priority. A policy cannot be removed from a running firewalld: it is emptied, and leaves neither chain nor rule behind.
    """

    program = "firewall-cmd"
    folder = "/etc/firewalld/policies"
    zones = "/etc/firewalld/zones"

    def __init__(self, system: System):
        self.system = system
        self.policy = system.owner.policy
        self.accept, self.drop = system.owner.priorities
        self.file = f"{self.folder}/{self.policy}.xml"
        self.former = f"{self.file}.old"  # from firewalld, which keeps one of each file that it writes itself

    def _is_own(self, line: str) -> bool:
        return f'priority="{self.accept}"' in line or f'priority="{self.drop}"' in line

    def _rich(self, rule: FirewallRule) -> list[str]:
        """The rich rules of one rule, as firewall-cmd prints them."""
        to = "" if rule.address == names.EVERY_ADDRESS else f'destination address="{rule.address}" '
        to += f'port port="{rule.port}" protocol="{rule.protocol}"'
        accepts = []
        for source in rule.sources:
            origin = "" if source == names.EVERYBODY else f'source address="{source}" '
            accepts.append(f'rule priority="{self.accept}" family="ipv4" {origin}{to} accept')
        return [*accepts, *[f'rule priority="{self.drop}" family="ipv4" {to} drop'] * closes(rule)]

    def _xml(self, rules: Sequence[FirewallRule]) -> str:
        """The policy's file, a line for each rich rule; no file without rules."""
        if not rules:
            return ""
        lines = []
        for rule in rules:
            to = "" if rule.address == names.EVERY_ADDRESS else f'<destination address="{rule.address}"/>'
            to += f'<port port="{rule.port}" protocol="{rule.protocol}"/>'
            for source in rule.sources:
                origin = "" if source == names.EVERYBODY else f'<source address="{source}"/>'
                lines.append(f'  <rule priority="{self.accept}" family="ipv4">{origin}{to}<accept/></rule>')
            if closes(rule):
                lines.append(f'  <rule priority="{self.drop}" family="ipv4">{to}<drop/></rule>')
        return "\n".join(
            [
                '<?xml version="1.0" encoding="utf-8"?>',
                f'<policy target="CONTINUE" priority="{self.accept}">',
                f"  <short>{self.system.owner.mark}</short>",
                f"  <description>{PURPOSE}.</description>",
                '  <ingress-zone name="ANY"/>',
                '  <egress-zone name="HOST"/>',
                *lines,
                "</policy>\n",
            ]
        )

    def _sections(self, option: str, *where: str) -> dict[str, Section]:
        """Zone or policy → what firewall-cmd lists of it."""
        sections: dict[str, Section] = {}
        for line in self.system.run(["firewall-cmd", *where, option]).splitlines():
            if line and not line[0].isspace():
                name, _space, flags = line.partition(" ")
                words = flags.strip("()").split(", ")
                section = sections[name] = Section("active" in words, "default" in words, [])
            elif line.strip().startswith("rule ") and self._is_own(line):
                section.rules.append(line.strip())
        return sections

    def _running(self, rules: Sequence[FirewallRule]) -> tuple[Places, Places, bool | None]:
        """Rich rules of the cluster that firewalld holds now, those it is to hold, and whether it has the cluster's policy in use.

        They are to be in the policy if that is loaded (None: it is not), else in each zone that is in use.
        """
        if "firewalld" not in active(self.system):
            return {}, {}, None
        zones = self._sections("--list-all-zones")
        policy = self._sections("--list-all-policies").get(self.policy)
        current: Places = {(f"--zone={name}",): zone.rules for name, zone in zones.items()}
        # --runtime-to-permanent copies what stands in the running zones.
        for path in sorted(self.system.path(self.zones).glob("*.xml")):
            if self._is_own(path.read_text()):
                kept = self._sections("--list-all-zones", "--permanent").get(path.stem)
                current["--permanent", f"--zone={path.stem}"] = kept.rules if kept else []
        if policy:
            current[(f"--policy={self.policy}",)] = policy.rules
        used = {name for name, zone in zones.items() if zone.is_active or zone.is_default}
        if rules and not policy and not any(zone.is_default for zone in zones.values()):
            used.add(self.system.run(["firewall-cmd", "--get-default-zone"]).strip())
        places = [(f"--policy={self.policy}",)] if policy else [(f"--zone={name}",) for name in sorted(used)]
        rich = [line for rule in rules for line in self._rich(rule)]
        return (
            {place: lines for place, lines in current.items() if lines},
            {place: rich for place in places if rich},
            policy.is_active if policy else None,
        )

    def _lines(self, places: Places, active: bool) -> list[str]:
        lines = sorted(f"firewall-cmd {' '.join(place)}: {rule}" for place, rules in places.items() for rule in rules)
        return lines + [f"firewall-cmd --policy={self.policy}: from ANY to HOST"] * active

    def foreign_names(self) -> list[str]:
        """The policy's file where others have made it."""
        path = self.system.path(self.file)
        return (
            [self.file] if os.path.lexists(path) and self.system.owner.mark not in self.system.text(self.file) else []
        )

    def state(self, rules: Sequence[FirewallRule]) -> tuple[list[str], list[str]]:
        foreign = self.foreign_names()
        if foreign and rules:
            raise Refusal(f"This host has {foreign[0]}{names.NOT_OURS}.")
        if foreign:
            return [], []
        present, planned, policy = self._running(rules)
        before, after = holds(self.file, self.system.text(self.file), self._xml(rules))
        former, _none = holds(self.former, self.system.text(self.former), "")
        return (
            before + former + self._lines(present, bool(policy)),
            after + self._lines(planned, policy is not None and bool(rules)),
        )

    def _permanent(self, rules: Sequence[FirewallRule]) -> None:
        """Writes or removes the policy's file. firewalld does not start with a broken one: then the former is put back."""
        before, after = self.system.text(self.file), self._xml(rules)
        if not self.system.path(self.folder).is_dir() and after:
            raise Refusal(f"{self.folder} is missing, since this firewalld is older than 0.9: update firewalld.")
        self._put(after)
        if after:
            try:
                self.system.run(["firewall-cmd", "--check-config"])
            except Refusal as error:
                # What a killed run has written was not checked.
                unchecked = before == after
                self._put("" if unchecked else before)
                state = "was removed" if unchecked else "is as before"
                raise Refusal(f"firewalld refuses {self.file}, which {state}: {error}") from error

    def _put(self, text: str) -> None:
        self.system.path(self.former).unlink(missing_ok=True)
        if not text:
            self.system.path(self.file).unlink(missing_ok=True)
        elif text != self.system.text(self.file):
            replace_file(self.system.path(self.file), text, 0o644)

    def change(self, rules: Sequence[FirewallRule]) -> None:
        present, planned, policy = self._running(rules)
        self._permanent(rules)
        if policy is not None and policy != bool(rules):
            verb = "add" if rules else "remove"
            for end in ("ingress-zone=ANY", "egress-zone=HOST"):
                self.system.run(["firewall-cmd", f"--policy={self.policy}", f"--{verb}-{end}"])
        for verb, places, others in (("add", planned, present), ("remove", present, planned)):
            for place, lines in places.items():
                for line in lines:
                    if line not in others.get(place, []):
                        self.system.run(["firewall-cmd", *place, f"--{verb}-rich-rule={line}"])
