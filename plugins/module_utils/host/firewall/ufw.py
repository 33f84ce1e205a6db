# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Rules in ufw."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence

from ansible_collections.llamacpp.cluster.plugins.module_utils.common import names
from ansible_collections.llamacpp.cluster.plugins.module_utils.host.firewall.rules import closes
from ansible_collections.llamacpp.cluster.plugins.module_utils.host.system import System
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.host_types import FirewallRule


class Ufw:
    """Rules with the cluster's comment, before all other rules: an earlier «deny» of the operator would hide them.

    A rule that the operator has already made stays as it is. Where one of those lets the head in, nothing is closed before it.
    """

    program = "ufw"
    rules_file = "/etc/ufw/user.rules"

    def __init__(self, system: System):
        self.system = system

    def _added(self) -> tuple[list[str], list[str]]:
        """Rules of the cluster and other rules, in order, as ``ufw show added`` writes them, without «ufw» and the comment."""
        marked: list[str] = []
        others: list[str] = []
        for line in self.system.run(["ufw", "show", "added"]).splitlines():
            if line.startswith("ufw "):
                rule, _word, comment = line[4:].partition(" comment ")
                (marked if comment == f"'{self.system.owner.mark}'" else others).append(rule)
        return marked, others

    def _groups(self, lines: list[str]) -> dict[str, list[str]]:
        """Rules by what they are for, in order within it."""
        groups: dict[str, list[str]] = {}
        for line in lines:
            named = re.search(r" to (\S+) port (\S+) proto (\S+)", line) or re.fullmatch(r"\w+( )(\d+)/(\w+)", line)
            key = f"{named[1].strip() or 'any'} {named[2]} {named[3]}" if named else ""
            groups.setdefault(key, []).append(line)
        return {key: groups[key] for key in sorted(groups)}

    def _marked(self) -> list[str]:
        return self._added()[0] if self.system.owner.mark.encode().hex() in self.system.text(self.rules_file) else []

    def state(self, rules: Sequence[FirewallRule]) -> tuple[list[str], list[str]]:
        return (
            [f"ufw {rule}" for group in self._groups(self._marked()).values() for rule in group],
            [f"ufw {rule}" for group in self._wanted(rules).values() for rule in group],
        )

    def _wanted(self, rules: Sequence[FirewallRule]) -> dict[str, list[str]]:
        others = set(self._added()[1] if rules else [])
        lines = []
        for rule in rules:
            group = [self._line("allow", source, rule) for source in rule.sources]
            deny = self._line("deny", names.EVERYBODY, rule)
            lines += [line for line in group if line not in others]
            if closes(rule) and not others.intersection([*group, deny]):
                lines.append(deny)
        return self._groups(lines)

    def _line(self, action: str, source: str, rule: FirewallRule) -> str:
        """One of the rule's, as ``ufw show added`` writes it: short where it names neither end."""
        port, protocol = rule.port, rule.protocol
        if rule.address == names.EVERY_ADDRESS and source == names.EVERYBODY:
            return f"{action} {port}/{protocol}"
        to = "any" if rule.address == names.EVERY_ADDRESS else rule.address
        return f"{action}{'' if source == names.EVERYBODY else f' from {source}'} to {to} port {port} proto {protocol}"

    def change(self, rules: Sequence[FirewallRule]) -> None:
        """New rules come before old ones go, and only a rule that opens is moved: what is to be closed is closed all the time."""
        present, wanted = self._groups(self._marked()), self._wanted(rules)
        keys = [key for key in {**wanted, **present} if present.get(key) != wanted.get(key)]
        current = [rule for key in keys for rule in present.get(key, [])]
        planned = [rule for key in keys for rule in reversed(wanted.get(key, []))]
        for rule in planned:
            if rule in current and rule.startswith("allow"):
                self.system.run(["ufw", "delete", *shlex.split(rule)])
            if rule not in current or rule.startswith("allow"):
                self.system.run(["ufw", "prepend", *shlex.split(rule), "comment", self.system.owner.mark])
        for rule in current:
            if rule not in planned:
                self.system.run(["ufw", "delete", *shlex.split(rule)])
