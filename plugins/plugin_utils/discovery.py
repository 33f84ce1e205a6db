# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""From what hosts report to the inventory that is proposed for them: who is asked, who sees whom, which one is the head, and what it serves."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import combinations
from typing import Any, NamedTuple

from ansible_collections.llamacpp.cluster.plugins.module_utils.common import validation
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.errors import Refusal
from ansible_collections.llamacpp.cluster.plugins.module_utils.host.discovery import (
    Discovered,
    FoundModel,
    LinkInterface,
)
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.types import Plan, Refused
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.facts import Facts
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.inputs import cluster_inputs, same_device
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.placement import cost_model

ALIKE = 0.9
"""Hosts whose memory is at least so much of the most are as good as that one."""
USER = r"[A-Za-z_][A-Za-z0-9_.-]*"
LOCAL = ("localhost", "127.0.0.1")


class Candidate(NamedTuple):
    """A host that is asked."""

    name: str
    user: str | None
    local: bool = False


def candidates(given: Iterable[str]) -> list[Candidate]:
    """Whom ``llama_discover_hosts`` names.

    :raises Refusal: an entry names nobody.
    """
    found: dict[str, Candidate] = {}
    for entry in filter(None, map(str.strip, given)):
        user, _at, name = entry.rpartition("@")
        if not re.fullmatch(cluster_inputs.HOST_NAME, name) or (user and not re.fullmatch(USER, user)):
            raise Refusal(f"llama_discover_hosts has {validation.show(entry)}: use names, addresses and user@host")
        found[name] = Candidate(name, user or None, name in LOCAL)
    if not found:
        raise Refusal(
            "no host is named: set llama_discover_hosts to names or addresses, or give -i another inventory than that of ansible.cfg"
        )
    return [*found.values()]


class Machine(NamedTuple):
    """A host that answered, or is declared."""

    name: str
    """In the inventory."""
    variables: Mapping[str, Any]
    """That the operator gave, with those of its connection."""
    facts: Facts
    found: Discovered = Discovered()

    @property
    def devices_mib(self) -> int:
        """Of its accelerators, each one once."""
        same = same_device.canonical_device_names(self.facts)
        devices = same_device.named_accelerators(self.facts)
        return sum(device.memory_mib for name, device in devices if same[name] == name)


def named(machines: Mapping[str, Machine]) -> list[Machine]:
    """The hosts with names for an inventory: one that was asked by its address, or is the controller, by the name that it has itself, where nobody else
    has it. The controller gets the address at which others reach it.

    :param machines: by what they were asked.
    """
    result: list[Machine] = []
    for asked, machine in machines.items():
        name, variables, itself = asked, dict(machine.variables), machine.found.hostname.partition(".")[0]
        taken = {*machines, *LOCAL, *(other.name for other in result)}
        numeric = cluster_inputs.is_numeric(asked)
        if (numeric or asked in LOCAL) and re.fullmatch(cluster_inputs.HOST_NAME, itself) and itself not in taken:
            name = itself
        own = [end.addresses[0] for end in machine.found.interfaces if end.main and end.addresses]
        if asked in LOCAL and own and len(machines) > 1:
            variables.setdefault("ansible_host", own[0].partition("/")[0])
        elif name != asked and numeric:
            variables.setdefault("ansible_host", asked)
        result.append(machine._replace(name=name, variables=variables))
    return result


class End(NamedTuple):
    host: str
    interface: str
    address: str
    """With the length of its network's prefix; empty where both ends have none in one network."""


class Link(NamedTuple):
    """A network between two hosts beside the one that reaches them: each interface sees the other's hardware address."""

    ends: tuple[End, End]
    kind: str
    gbit: float
    slow: bool
    """Whether the network that reaches them is faster."""

    @property
    def usable(self) -> bool:
        return bool(self.ends[0].address) and not self.slow

    @property
    def hosts(self) -> set[str]:
        return {end.host for end in self.ends}


def links(machines: Sequence[Machine]) -> list[Link]:
    found = []
    for one, other in combinations(machines, 2):
        pairs = [
            (mine, theirs)
            for mine in one.found.interfaces
            for theirs in other.found.interfaces
            if theirs.mac in mine.sees and mine.mac in theirs.sees
        ]
        common = {end for pair in pairs if pair[0].main and pair[1].main for end in pair}
        for pair in pairs:
            if not common.intersection(pair):
                first, second = _in_one_network(*pair)
                ends = End(one.name, pair[0].name, first), End(other.name, pair[1].name, second)
                gbit = min(map(_gbit, pair))
                found.append(Link(ends, pair[0].kind, gbit, gbit < min(map(_gbit, common), default=0)))
    return found


def _gbit(end: LinkInterface) -> float:
    return end.mbit / 1000 if end.mbit else cost_model.LINKS[end.kind].gbit


def _in_one_network(mine: LinkInterface, theirs: LinkInterface) -> tuple[str, str]:
    for own in map(ipaddress.IPv4Interface, mine.addresses):
        for other in map(ipaddress.IPv4Interface, theirs.addresses):
            if own.network == other.network and own != other:
                return str(own), str(other)
    return "", ""


class Proposal(NamedTuple):
    """The hosts of an inventory with their parts, and why."""

    machines: Sequence[Machine]
    """The head first."""
    links: Sequence[Link]
    """All that were found."""
    model: FoundModel | None
    """None for the known-answer model."""
    why: str
    """It is the head."""

    @property
    def head(self) -> Machine:
        return self.machines[0]

    @property
    def lends_its_processor(self) -> bool:
        """Whether the head is a worker, too: beside workers, its llama-server drives accelerators only."""
        return len(self.machines) > 1 and not self.head.devices_mib

    @property
    def used(self) -> dict[str, Link]:
        """Worker → the fastest link between it and the head."""
        usable = sorted((link for link in self.links if link.usable), key=lambda link: link.gbit)
        return {
            worker: link for link in usable if self.head.name in link.hosts for worker in link.hosts - {self.head.name}
        }

    def variables_of(self, machine: Machine) -> dict[str, Any]:
        """An interface of ``llama_links`` that leads to several hosts has no peer."""
        peers: dict[End, list[str]] = {}
        for link in self.used.values():
            for end in link.ends:
                if end.host == machine.name:
                    peers.setdefault(end, []).extend(link.hosts - {machine.name})
        own = [
            {"interface": end.interface, "address": end.address, **({"peer": others[0]} if len(others) == 1 else {})}
            for end, others in peers.items()
        ]
        return {**machine.variables, **({"llama_links": own} if own else {})}

    @property
    def model_variable(self) -> dict[str, Any]:
        return {f"llama_model_{self.model.kind}": self.model.name} if self.model else {"llama_model_known_answer": {}}

    @property
    def task_vars(self) -> dict[str, Any]:
        """What a task sees of the inventory."""
        names = [machine.name for machine in self.machines]
        workers = names if self.lends_its_processor else names[1:]
        return {
            "groups": {"llama_cluster": names, "llama_head": names[:1], "llama_workers": workers},
            "hostvars": {each.name: {**self.model_variable, **self.variables_of(each)} for each in self.machines},
            "inventory_hostname": names[0],
        }


def choose(machines: Sequence[Machine], plan: Callable[[Proposal], Plan | Refused]) -> tuple[Proposal, Plan | Refused]:
    """The proposal, and its plan: the largest model that lies on a host and that the plan accepts, where the host with the most memory of those that have
    it is the head. Without one, the known-answer model."""
    found = links(machines)

    def propose(owners: Sequence[Machine], model: FoundModel | None, why: str) -> tuple[Proposal, Plan | Refused]:
        head, most = _with_most(owners, found)
        others = [each for each in machines if each is not head]
        proposal = Proposal([head, *others], found, model, why or most)
        return proposal, plan(proposal)

    models = {(model.kind, model.name): model for machine in machines for model in machine.found.models}
    for key, model in sorted(models.items(), key=lambda item: -item[1].bytes):
        owners = [each for each in machines if any((one.kind, one.name) == key for one in each.found.models)]
        why = f"{model.name} lies there, the largest model that lies on a host and fits"
        proposal, planned = propose(owners, model, why)
        if isinstance(planned, Plan) and planned.fits and not planned.refused:
            return proposal, planned
    return propose(machines, None, "")


def _with_most(machines: Sequence[Machine], found: Sequence[Link]) -> tuple[Machine, str]:
    """The host with the most memory, that of devices where there are some; of those that have as much, the one with the most links, or the first."""
    by_device = any(machine.devices_mib for machine in machines)
    sizes = [machine.devices_mib if by_device else machine.facts.memory_mib for machine in machines]
    near = [machine for machine, size in zip(machines, sizes) if size >= ALIKE * max(sizes)]
    count = {machine.name: sum(link.usable and machine.name in link.hosts for link in found) for machine in near}
    head = max(near, key=lambda machine: count[machine.name])
    why = f"no other host has more memory{' of accelerators' if by_device else ''}"
    return head, f"{why}, and none that has as much has more direct links" if len(near) > 1 else why
