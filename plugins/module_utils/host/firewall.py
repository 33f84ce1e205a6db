# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The second lock: the ports of a worker are open to its head, that of the server to its networks, and both are closed to everybody else.

A *rule* is ``{"address", "port", "protocol", "sources"}``: on ``address``, which is the host's own or every one, ``port`` takes new
connections from ``sources`` only, addresses and networks. A *state* is a list of lines for a person, one for each rule or file of ours that a manager has;
the present and the wanted state are compared as such lists. They never contain what belongs to others.
"""

from __future__ import annotations

import ipaddress
import json
import os
import re
import shlex
from pathlib import Path
from typing import Any

from ansible_collections.llamacpp.cluster.plugins.module_utils.common import commands, names
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.files import replace_file
from ansible_collections.llamacpp.cluster.plugins.module_utils.facts import firewall

PURPOSE = "Ports of llama.cpp, open to those who are planned to connect and closed to all others"
COMMAND_SECONDS = 60
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
"""What our unit, which runs nft as root, cannot do."""
TABLES = re.compile(rf"{names.ROOT}(-{names.CLUSTER})?")
"""Tables of clusters: no cluster changes that of another one."""
Places = dict[tuple[str, ...], list[str]]
"""Arguments of firewall-cmd that name a place → rich rules there."""


class FirewallError(Exception):
    """The message says what failed and what to do."""


class System:
    """The host's files and commands, and the names of the cluster whose rules are looked at. A command that fails raises FirewallError."""

    def __init__(self, root: str = "/", own: names.Names = names.DEFAULT):
        self.root = Path(root)
        self.own = own
        self._active: set[str] | None = None

    @property
    def unit(self) -> str:
        """Our unit. It is not named like a service of the cluster, which would be stopped where it is not in the plan."""
        return f"firewall-{self.own.root}.service"

    def path(self, name: str) -> Path:
        return self.root / name.lstrip("/")

    def text(self, name: str) -> str:
        """Content of a file, nothing if there is none."""
        try:
            return self.path(name).read_text()
        except FileNotFoundError:
            return ""

    def write(self, name: str, text: str) -> None:
        """Replaces a file in one step; everybody may read it."""
        replace_file(self.path(name), text, 0o644)

    def program(self, name: str) -> str | None:
        """Path of a program that is installed."""
        return commands.find(name)

    def run(self, argv: list[str], text: str = "", may_fail: bool = False) -> str:
        """What a command prints, given ``text``."""
        if not self.program(argv[0]):
            raise FirewallError(f"{argv[0]} is needed to set up the firewall and is missing: install it.")
        try:
            return commands.run(argv, COMMAND_SECONDS, text, may_fail)
        except commands.CommandError as error:
            raise FirewallError(f"{error}. Run it on the host as root, and fix what it names.") from error

    def active(self) -> set[str]:
        """Those of the managers, and of our unit, that systemd reports as active. Read once, until ``forget``."""
        if self._active is None:
            units = [*MANAGERS, self.unit]
            # Its status says whether all of them are active.
            printed = self.run(["systemctl", "is-active", *units], may_fail=True) if self.program("systemctl") else ""
            self._active = firewall.active_units(units, printed)
        return self._active

    def forget(self) -> None:
        self._active = None


def _holds(name: str, present: str, planned: str) -> tuple[list[str], list[str]]:
    """A file before and after, as it is shown: whether it exists, and whether it has the planned rules."""
    same = f"{name}: holds these rules"
    other = f"{name}: holds other rules" if planned and present != planned else same
    return [other] if present else [], [same] if planned else []


def _closes(rule: dict) -> bool:
    """Whether there is somebody left to whom the port is closed."""
    return names.EVERYBODY not in rule["sources"]


# -------------------------------------------------------------------------------------------------------------- managers


class Ufw:
    """Rules with our comment, before all others: an earlier «deny» of the operator would hide them.

    A rule that the operator has made already is left as it is. Where one of those lets the head in, nothing is closed
    before it.
    """

    program = "ufw"
    rules_file = "/etc/ufw/user.rules"

    def __init__(self, system: System):
        self.system = system

    def _added(self) -> tuple[list[str], list[str]]:
        """Our rules and those of others, in order, as ``ufw show added`` writes them, without «ufw» and the comment."""
        ours: list[str] = []
        others: list[str] = []
        for line in self.system.run(["ufw", "show", "added"]).splitlines():
            if line.startswith("ufw "):
                rule, _word, comment = line[4:].partition(" comment ")
                (ours if comment == f"'{self.system.own.mark}'" else others).append(rule)
        return ours, others

    def _groups(self, lines: list[str]) -> dict[str, list[str]]:
        """Rules by what they are for, in order within it."""
        groups: dict[str, list[str]] = {}
        for line in lines:
            named = re.search(r" to (\S+) port (\S+) proto (\S+)", line) or re.fullmatch(r"\w+( )(\d+)/(\w+)", line)
            key = f"{named[1].strip() or 'any'} {named[2]} {named[3]}" if named else ""
            groups.setdefault(key, []).append(line)
        return {key: groups[key] for key in sorted(groups)}

    def _ours(self) -> list[str]:
        return self._added()[0] if self.system.own.mark.encode().hex() in self.system.text(self.rules_file) else []

    def state(self, rules: list[dict]) -> tuple[list[str], list[str]]:
        return (
            [f"ufw {rule}" for group in self._groups(self._ours()).values() for rule in group],
            [f"ufw {rule}" for group in self._wanted(rules).values() for rule in group],
        )

    def _wanted(self, rules: list[dict]) -> dict[str, list[str]]:
        others = set(self._added()[1] if rules else [])
        lines = []
        for rule in rules:
            group = [self._line("allow", source, rule) for source in rule["sources"]]
            deny = self._line("deny", names.EVERYBODY, rule)
            lines += [line for line in group if line not in others]
            if _closes(rule) and not others.intersection([*group, deny]):
                lines.append(deny)
        return self._groups(lines)

    def _line(self, action: str, source: str, rule: dict) -> str:
        """One of the rule's, as ``ufw show added`` writes it: short where it names neither end."""
        port, protocol = rule["port"], rule["protocol"]
        if rule["address"] == names.EVERY_ADDRESS and source == names.EVERYBODY:
            return f"{action} {port}/{protocol}"
        to = "any" if rule["address"] == names.EVERY_ADDRESS else rule["address"]
        return f"{action}{'' if source == names.EVERYBODY else f' from {source}'} to {to} port {port} proto {protocol}"

    def change(self, rules: list[dict]) -> None:
        """New rules come before old ones go, and only a rule that opens is moved: what is to be closed is closed all the time."""
        present, wanted = self._groups(self._ours()), self._wanted(rules)
        keys = [key for key in {**wanted, **present} if present.get(key) != wanted.get(key)]
        current = [rule for key in keys for rule in present.get(key, [])]
        planned = [rule for key in keys for rule in reversed(wanted.get(key, []))]
        for rule in planned:
            if rule in current and rule.startswith("allow"):
                self.system.run(["ufw", "delete", *shlex.split(rule)])
            if rule not in current or rule.startswith("allow"):
                self.system.run(["ufw", "prepend", *shlex.split(rule), "comment", self.system.own.mark])
        for rule in current:
            if rule not in planned:
                self.system.run(["ufw", "delete", *shlex.split(rule)])


class Firewalld:
    """Permanently a policy of our own, before the zones; it takes effect when firewalld is next reloaded or started.

    Until then the same rich rules stand in the running zones: reloading it here would drop what others have set at run time
    only. Our rich rules are recognised by their priority. A policy cannot be removed from a running firewalld: it is
    emptied, and leaves neither chain nor rule behind.
    """

    program = "firewall-cmd"
    folder = "/etc/firewalld/policies"
    zones = "/etc/firewalld/zones"

    def __init__(self, system: System):
        self.system = system
        self.policy = system.own.policy
        self.accept, self.drop = system.own.priorities
        self.file = f"{self.folder}/{self.policy}.xml"
        self.former = f"{self.file}.old"  # from firewalld, which keeps one of each file that it writes itself

    def _ours(self, line: str) -> bool:
        return f'priority="{self.accept}"' in line or f'priority="{self.drop}"' in line

    def _rich(self, rule: dict) -> list[str]:
        """The rich rules of one rule, as firewall-cmd prints them."""
        to = "" if rule["address"] == names.EVERY_ADDRESS else f'destination address="{rule["address"]}" '
        to += f'port port="{rule["port"]}" protocol="{rule["protocol"]}"'
        accepts = []
        for source in rule["sources"]:
            origin = "" if source == names.EVERYBODY else f'source address="{source}" '
            accepts.append(f'rule priority="{self.accept}" family="ipv4" {origin}{to} accept')
        return [*accepts, *[f'rule priority="{self.drop}" family="ipv4" {to} drop'] * _closes(rule)]

    def _xml(self, rules: list[dict]) -> str:
        """The policy's file, a line for each rich rule; no file without rules."""
        if not rules:
            return ""
        lines = []
        for rule in rules:
            to = "" if rule["address"] == names.EVERY_ADDRESS else f'<destination address="{rule["address"]}"/>'
            to += f'<port port="{rule["port"]}" protocol="{rule["protocol"]}"/>'
            for source in rule["sources"]:
                origin = "" if source == names.EVERYBODY else f'<source address="{source}"/>'
                lines.append(f'  <rule priority="{self.accept}" family="ipv4">{origin}{to}<accept/></rule>')
            if _closes(rule):
                lines.append(f'  <rule priority="{self.drop}" family="ipv4">{to}<drop/></rule>')
        return "\n".join(
            [
                '<?xml version="1.0" encoding="utf-8"?>',
                f'<policy target="CONTINUE" priority="{self.accept}">',
                f"  <short>{self.system.own.mark}</short>",
                f"  <description>{PURPOSE}.</description>",
                '  <ingress-zone name="ANY"/>',
                '  <egress-zone name="HOST"/>',
                *lines,
                "</policy>\n",
            ]
        )

    def _sections(self, option: str, *where: str) -> dict[str, dict]:
        """Zone or policy → whether it is in use, and our rich rules in it, from one of firewall-cmd's lists."""
        sections: dict[str, dict] = {}
        current: dict = {}
        for line in self.system.run(["firewall-cmd", *where, option]).splitlines():
            if line and not line[0].isspace():
                name, _space, flags = line.partition(" ")
                words = flags.strip("()").split(", ")
                current = sections[name] = {"active": "active" in words, "default": "default" in words, "rules": []}
            elif line.strip().startswith("rule ") and self._ours(line):
                current["rules"].append(line.strip())
        return sections

    def _running(self, rules: list[dict]) -> tuple[Places, Places, bool | None]:
        """Our rich rules that firewalld holds now, those it is to hold, and whether it has our policy in use.

        They are to be in our policy if that is loaded (None: it is not), else in each zone that is in use.
        """
        if "firewalld" not in self.system.active():
            return {}, {}, None
        zones = self._sections("--list-all-zones")
        policy = self._sections("--list-all-policies").get(self.policy)
        current: Places = {(f"--zone={name}",): zone["rules"] for name, zone in zones.items()}
        # --runtime-to-permanent copies what stands in the running zones.
        for path in sorted(self.system.path(self.zones).glob("*.xml")):
            if self._ours(path.read_text()):
                kept = self._sections("--list-all-zones", "--permanent").get(path.stem, {"rules": []})
                current["--permanent", f"--zone={path.stem}"] = kept["rules"]
        if policy:
            current[(f"--policy={self.policy}",)] = policy["rules"]
        used = {name for name, zone in zones.items() if zone["active"] or zone["default"]}
        if rules and not policy and not any(zone["default"] for zone in zones.values()):
            used.add(self.system.run(["firewall-cmd", "--get-default-zone"]).strip())
        places = [(f"--policy={self.policy}",)] if policy else [(f"--zone={name}",) for name in sorted(used)]
        rich = [line for rule in rules for line in self._rich(rule)]
        return (
            {place: lines for place, lines in current.items() if lines},
            {place: rich for place in places if rich},
            policy["active"] if policy else None,
        )

    def _lines(self, places: Places, active: bool) -> list[str]:
        lines = sorted(f"firewall-cmd {' '.join(place)}: {rule}" for place, rules in places.items() for rule in rules)
        return lines + [f"firewall-cmd --policy={self.policy}: from ANY to HOST"] * active

    def state(self, rules: list[dict]) -> tuple[list[str], list[str]]:
        present, planned, policy = self._running(rules)
        before, after = _holds(self.file, self.system.text(self.file), self._xml(rules))
        former, _none = _holds(self.former, self.system.text(self.former), "")
        return (
            before + former + self._lines(present, bool(policy)),
            after + self._lines(planned, policy is not None and bool(rules)),
        )

    def _permanent(self, rules: list[dict]) -> None:
        """Writes or removes the policy's file. firewalld does not start with a broken one: then the former is put back."""
        before, after = self.system.text(self.file), self._xml(rules)
        if not self.system.path(self.folder).is_dir() and after:
            raise FirewallError(f"{self.folder} is missing, since this firewalld is older than 0.9: update firewalld.")
        self._put(after)
        if after:
            try:
                self.system.run(["firewall-cmd", "--check-config"])
            except FirewallError as error:
                # What a killed run has written was not checked.
                unchecked = before == after
                self._put("" if unchecked else before)
                state = "was removed" if unchecked else "is as before"
                raise FirewallError(f"firewalld refuses {self.file}, which {state}: {error}") from error

    def _put(self, text: str) -> None:
        self.system.path(self.former).unlink(missing_ok=True)
        if not text:
            self.system.path(self.file).unlink(missing_ok=True)
        elif text != self.system.text(self.file):
            self.system.write(self.file, text)

    def change(self, rules: list[dict]) -> None:
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


class Nftables:
    """A table of our own that closes the ports, and an accept at the top of each chain of others that may close them too.

    An accept ends only the chain in which it stands, so that a drop in another one still counts. /etc/nftables.conf stays as
    it is: our unit sets the rules again after each start and reload of nftables.service, which flushes all of them. They are
    in /etc, which is mounted before the network starts, unlike /opt perhaps.
    """

    program = "nft"
    closing = frozenset({"drop", "reject", "jump", "goto", "queue", "vmap", "xt"})

    def __init__(self, system: System):
        self.system = system
        self.table = system.own.root
        self.file = f"/etc/firewall-{system.own.root}.nft"
        self.unit = f"/etc/systemd/system/{system.unit}"
        self.link = f"/etc/systemd/system/nftables.service.wants/{system.unit}"

    def _rules(self, rule: dict, closed: bool) -> list[str]:
        """Rules of nft for the sources, and with ``closed`` one for all others that want to connect.

        The comment says what a rule is, so that nothing else of it has to be read again.
        """
        to = names.EVERYBODY if rule["address"] == names.EVERY_ADDRESS else rule["address"]
        to = f"ip daddr {to} {rule['protocol']} dport {rule['port']}"
        note = f"to/{rule['address']}/{rule['protocol']}/{rule['port']}"
        lines = [
            f"ip saddr {source} {to} accept comment {self.system.own.mark}/accept/from/{source}/{note}"
            for source in rule["sources"]
        ]
        if closed and _closes(rule):
            lines.append(
                f'iifname != "lo" {to} tcp flags & (syn | ack) == syn drop comment {self.system.own.mark}/drop/{note}'
            )
        return lines

    def _table(self, rules: list[dict]) -> str:
        """Text that replaces our table, whether it exists or not."""
        if not rules:
            return ""
        inner = "\n".join(f"\t\t{line}" for rule in rules for line in self._rules(rule, closed=True))
        return (
            f"# {PURPOSE}: {self.system.own.mark}\ntable inet {self.table}\ndelete table inet {self.table}\n"
            f"table inet {self.table} {{\n\tchain input {{\n\t\ttype filter hook input priority -10; policy accept;\n{inner}\n\t}}\n}}\n"
        )

    def _unit(self, rules: list[dict], chains: list[str]) -> str:
        """Our unit. What it inserts into chains of others it inserts only where a flush has removed it."""
        if not rules:
            return ""
        accepts = [line for rule in rules for line in self._rules(rule, closed=False)]
        nft = self.system.program("nft")
        steps = [f"{nft} -f {self.file}"]
        for chain in chains if accepts else []:
            inserts = "; ".join(f"insert rule {chain} {line}" for line in reversed(accepts))
            steps.append(
                f"-/bin/sh -c \"{nft} list chain {chain} | grep -qF {self.system.own.mark}/ || {nft} '{inserts}'\""
            )
        return "\n".join(
            [
                f"# {self.system.own.mark}",
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

    def _read(self) -> tuple[dict[str, list[dict]], list[str], list[str]]:
        """Our rules by the chain in which they are («family table chain»), the chains of others that need an accept, and what others have under
        our names: our table has one chain, and our comment on each rule."""
        ours: dict[str, list[dict]] = {}
        chains, closing, owned = {}, set(), set()
        own, inside = f"inet {self.table}", set()
        for item in json.loads(self.system.run(["nft", "--json", "--terse", "list", "ruleset"]))["nftables"]:
            kind, entry = next(iter(item.items()))
            table = f"{entry.get('family')} {entry.get('table', entry.get('name'))}"
            if table == own:
                marked = kind == "rule" and entry.get("comment", "").startswith(f"{self.system.own.mark}/")
                frame = kind == "table" or (kind == "chain" and entry["name"] == "input")
                inside.add("ours" if marked else "frame" if frame else "other")
            if kind == "table" and ("owner" in entry.get("flags", "") or TABLES.fullmatch(entry["name"])):
                owned.add(f"{entry['family']} {entry['name']}")
            elif kind == "chain" and entry["family"] in ("ip", "inet"):
                if entry.get("hook") == "input" and entry["type"] == "filter":
                    chains[f"{table} {entry['name']}"] = table
                if entry.get("policy") == "drop":
                    closing.add(f"{table} {entry['name']}")
            elif kind == "rule" and entry.get("comment", "").startswith(f"{self.system.own.mark}/"):
                ours.setdefault(f"{table} {entry['chain']}", []).append(entry)
            elif kind == "rule" and any(self.closing.intersection(expression) for expression in entry["expr"]):
                closing.add(f"{table} {entry['chain']}")
        # Once it has one, a chain keeps it: what closes may come and go, as bans do.
        needing = [
            chain
            for chain, table in chains.items()
            if table not in owned
            and (chain in closing or chain in ours)
            and re.fullmatch(r"(ip|inet)( [a-zA-Z_][a-zA-Z0-9_./-]*){2}", chain)
        ]
        firsts = {name: self.system.text(name).partition("\n")[0] for name in (self.file, self.unit)}
        others = [name for name, first in firsts.items() if first and self.system.own.mark not in first]
        if "other" in inside or (inside == {"frame"} and (self.file in others or not firsts[self.file])):
            others.append(f"the table {own} of nftables")
        return ours, sorted(needing), others

    def _left(self) -> bool:
        """Whether anything of ours is on the host, without reading a ruleset that may be large."""
        if any(os.path.lexists(self.system.path(name)) for name in (self.file, self.unit, self.link)):
            return True
        try:
            return bool(self.system.run(["nft", "list", "table", "inet", self.table]))
        except FirewallError:
            return False

    def _planned(self, rules: list[dict], chains: list[str]) -> dict[str, list[str]]:
        """Chain → our rules in it."""
        planned = {chain: [line for rule in rules for line in self._rules(rule, closed=False)] for chain in chains}
        planned[f"inet {self.table} input"] = [line for rule in rules for line in self._rules(rule, closed=True)]
        return {chain: lines for chain, lines in planned.items() if lines}

    def _lines(self, chains: dict[str, list[str]]) -> list[str]:
        """From chain → comments of our rules."""
        return [
            f"nft list chain {chain}: {self._words(comment)}" for chain in sorted(chains) for comment in chains[chain]
        ]

    @staticmethod
    def _words(comment: str) -> str:
        """What a comment of ours says, with networks as they are written."""
        return re.sub(r"(?<=from )(\S+) (\d+)(?= to )", r"\1/\2", comment.partition("/")[2].replace("/", " "))

    def state(self, rules: list[dict]) -> tuple[list[str], list[str]]:
        present, chains, others = self._read() if rules or self._left() else ({}, [], [])
        if others and rules:
            raise FirewallError(f"This host has {' and '.join(others)}{names.NOT_OURS}.")
        if others:
            return [], []
        planned = self._planned(rules, chains)
        before = self._lines({chain: [rule["comment"] for rule in entries] for chain, entries in present.items()})
        after = self._lines({chain: [line.split()[-1] for line in lines] for chain, lines in planned.items()})
        for name, text in ((self.file, self._table(rules)), (self.unit, self._unit(rules, chains))):
            current, wanted = _holds(name, self.system.text(name), text)
            before += current
            after += wanted
        is_so = {
            "enabled": os.path.lexists(self.system.path(self.link)),
            "active": self.system.unit in self.system.active(),
        }
        before += [f"{self.system.unit}: {word}" for word, holds in is_so.items() if holds]
        after += [f"{self.system.unit}: {word}" for word in is_so if rules]
        return before, after

    def _transaction(self, rules: list[dict], present: dict[str, list[dict]], chains: list[str]) -> str:
        """What brings the running ruleset to the plan, all of it or nothing."""
        own = f"inet {self.table} input"
        deleted = [
            f"delete rule {chain} handle {rule['handle']}"
            for chain, entries in present.items()
            if chain != own
            for rule in entries
        ]
        inserted = [
            f"insert rule {chain} {line}"
            for chain, lines in self._planned(rules, chains).items()
            if chain != own
            for line in reversed(lines)
        ]
        table = self._table(rules) or f"table inet {self.table}\ndelete table inet {self.table}"
        return "\n".join([*deleted, table, *inserted, ""])

    def change(self, rules: list[dict]) -> None:
        present, chains, _others = self._read()
        self.system.run(["nft", "-f", "-"], self._transaction(rules, present, chains))
        if rules:
            self.system.write(self.file, self._table(rules))
            self.system.write(self.unit, self._unit(rules, chains))
            self.system.run(["systemctl", "daemon-reload"])
            self.system.run(["systemctl", "enable", "--now", self.system.unit])
        else:
            if self.system.path(self.unit).exists():
                self.system.run(["systemctl", "disable", "--now", self.system.unit])
            for name in (self.file, self.unit, self.link):
                self.system.path(name).unlink(missing_ok=True)
            self.system.run(["systemctl", "daemon-reload"])


MANAGERS: dict[str, Any] = {"firewalld": Firewalld, "ufw": Ufw, "nftables": Nftables}
"""In this order the first that is active is the host's manager."""


# ------------------------------------------------------------------------------------------------------------- interface


def active_manager(system: System | None = None) -> str | None:
    """The manager that filters on this host."""
    system = system or System()
    return firewall.manager(system.active(), system.text(firewall.UFW_SETTINGS))


def _is_source(text: str) -> bool:
    """Whether it is the address of a host, or a network."""
    try:
        network = ipaddress.IPv4Network(text)
    except ValueError:
        return False
    return not network.is_multicast and text != names.EVERY_ADDRESS


def _is_address(text: str) -> bool:
    return text == names.EVERY_ADDRESS or ("/" not in text and _is_source(text))


def merge_rules(rules: list[dict]) -> list[dict]:
    """Rules by address and port, each of these once, with sources in order; FirewallError for a rule that no manager accepts."""
    merged: dict[tuple[str, int, str], set[str]] = {}
    for rule in rules:
        if not _is_address(rule["address"]):
            raise FirewallError(
                f"{rule['address']!r} in a firewall rule is not the IPv4 address of a host: give a numeric one."
            )
        for source in rule["sources"]:
            if not _is_source(source):
                raise FirewallError(
                    f"{source!r} in a firewall rule is not an IPv4 address or network: give one like 192.168.1.0/24."
                )
        if not 0 < rule["port"] < 65536:
            raise FirewallError(f"{rule['port']} in a firewall rule is not a port: give one from 1 to 65535.")
        if rule["protocol"] != "tcp":
            raise FirewallError(
                f"{rule['protocol']!r} in a firewall rule is not supported: workers and the server use tcp."
            )
        merged.setdefault((rule["address"], rule["port"], rule["protocol"]), set()).update(rule["sources"])
    return [
        {"address": address, "port": port, "protocol": protocol, "sources": sorted(sources)}
        for (address, port, protocol), sources in sorted(merged.items())
    ]


def _managers(manager: str | None, system: System) -> dict:
    """Name → manager, of those that are installed; FirewallError if the one that is to be opened does not filter."""
    if manager and manager != active_manager(system):
        raise FirewallError(
            f"{manager} is to open ports, but is not the active firewall manager of this host, which is "
            f"{active_manager(system) or 'none'}: start it, or name the active one."
        )
    return {name: kind(system) for name, kind in MANAGERS.items() if system.program(kind.program)}


def _states(managers: dict, manager: str | None, rules: list[dict]) -> dict[str, tuple[list[str], list[str]]]:
    """Name of a manager → our rules as they are, and as they should be."""
    return {name: firewall.state(rules if name == manager else []) for name, firewall in managers.items()}


def strangers(system: System) -> list[str]:
    """What others have under our names in nftables."""
    manager = Nftables(system)
    return manager._read()[2] if system.program(manager.program) and manager._left() else []


def differs(manager: str | None, rules: list[dict], system: System | None = None) -> bool:
    """Whether one of our rules is missing, stale, or left in a manager that is not the active one."""
    system = system or System()
    states = _states(_managers(manager, system), manager, merge_rules(rules))
    return any(before != after for before, after in states.values())


def _left_over(lines: list[str], rules: list[dict]) -> list[dict]:
    """The rules that these lines of a state are, one for each line, without those for an address and port of ``rules``."""
    planned = {(rule["address"], rule["port"]) for rule in rules}
    left = []
    for line in lines:
        words = re.sub(r' address=| port=|"', " ", line.rpartition(": ")[2])
        to = re.search(r"(?:to|destination) +(\d[\d.]+)", words)
        port = re.search(r"(?:port +|tcp )(\d+)|(\d+)/tcp", words)
        place = (to[1] if to else names.EVERY_ADDRESS, int(port[1] or port[2]) if port else None)
        if port and place not in planned:
            source = re.search(r"(?:from|source) +([\d./]+)", words)
            opens = re.search(r"\b(?:allow|accept)\b", words)
            sources = [source[1] if source else names.EVERYBODY] if opens else []
            left.append({"address": place[0], "port": place[1], "protocol": "tcp", "sources": sources})
    return left


def apply(
    manager: str | None, rules: list[dict], check: bool, system: System | None = None, keep: bool = False
) -> tuple[list[str], list[str]]:
    """Opens the ports in the active manager, and removes what is ours from the others.

    :param manager: ``active_manager()``; without one, all is removed.
    :param check: Changes nothing.
    :param keep: Something may still listen on other ports: leaves our rules for them, and those in the other managers.
    :returns: Our rules before and after, one line for each.
    """
    system = system or System()
    rules = merge_rules(rules)
    managers = _managers(manager, system)
    if keep:
        managers = {name: found for name, found in managers.items() if name == manager}
        left = [rule for found in managers.values() for rule in _left_over(found.state([])[0], rules)]
        rules = merge_rules([*rules, *left])
    states = _states(managers, manager, rules)
    for name in sorted(managers, key=lambda name: name != manager):
        own = rules if name == manager else []
        if not check and states[name][0] != states[name][1]:
            managers[name].change(own)
            system.forget()
            current, wanted = managers[name].state(own)
            if current != wanted:
                raise FirewallError(
                    f"{name} holds {current or 'no rule of ours'} after the change, planned {wanted or 'no rule of ours'}: check its log."
                )
    return (
        [line for before, _after in states.values() for line in before],
        [line for _before, after in states.values() for line in after],
    )
