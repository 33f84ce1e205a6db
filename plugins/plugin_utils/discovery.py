# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""From what hosts report to the inventory that is proposed for them: who sees whom, which one is the head, and what it serves."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import combinations
from typing import Any, NamedTuple, TypeGuard

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
OWN_NAME = r"(?!llama_)[A-Za-z][A-Za-z0-9_-]{0,62}"
"""Of a host that says it itself: no port, no pattern, no group of a cluster."""
WORDS = ("all", "ungrouped", "localhost", "y", "n", "yes", "no", "on", "off", "true", "false", "null")
"""That Ansible or YAML read as something else than a host."""
LOCAL = ("localhost", "127.0.0.1")


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
        return sum(device.memory_mib for device in same_device.devices(self.facts))


def named(machines: Sequence[Machine], asked: Collection[str]) -> list[Machine]:
    """The hosts with names for an inventory: one that was asked by its address, or is the controller, by the name that it has itself, where nobody else
    has it. The controller gets the address at which others reach it.

    :param machines: by the names by which they were asked.
    :param asked: all such names.
    """
    said = [machine.found.hostname.partition(".")[0] for machine in machines]
    result: list[Machine] = []
    for machine, itself in zip(machines, said):
        name, variables = machine.name, dict(machine.variables)
        numeric, local = cluster_inputs.is_numeric(name), name in LOCAL
        alone = said.count(itself) == 1 and itself not in asked and itself.lower() not in WORDS
        own = [end.addresses[0] for end in machine.found.interfaces if end.main and end.addresses]
        if local and own and len(machines) > 1:
            variables.setdefault("ansible_host", own[0].partition("/")[0])
        if (numeric or local) and alone and re.fullmatch(OWN_NAME, itself):
            if numeric:
                variables.setdefault("ansible_host", name)
            name = itself
        result.append(machine._replace(name=name, variables=variables))
    return result


class Link(NamedTuple):
    """A network between two hosts that is no slower than the one that reaches them: each interface sees the other's hardware address, which
    no third one claims to have."""

    ends: Mapping[str, tuple[str, str]]
    """Host → interface, and address with the length of its prefix."""
    kind: str
    gbit: float


def links(machines: Sequence[Machine]) -> list[Link]:
    """The fastest first."""
    found, macs = [], [end.mac for machine in machines for end in machine.found.interfaces]
    for one, other in combinations(machines, 2):
        pairs = [
            (mine, theirs)
            for mine in one.found.interfaces
            for theirs in other.found.interfaces
            if theirs.mac in mine.sees
            and mine.mac in theirs.sees
            and macs.count(mine.mac) == macs.count(theirs.mac) == 1
        ]
        common = {end for pair in pairs if pair[0].main and pair[1].main for end in pair}
        for mine, theirs in pairs:
            addresses, gbit = _in_one_network(mine, theirs), min(_gbit(mine), _gbit(theirs))
            if addresses and not common.intersection((mine, theirs)) and gbit >= min(map(_gbit, common), default=0):
                ends = {one.name: (mine.name, addresses[0]), other.name: (theirs.name, addresses[1])}
                found.append(Link(ends, mine.kind, gbit))
    return sorted(found, key=lambda link: -link.gbit)


def _gbit(end: LinkInterface) -> float:
    return end.mbit / 1000 if end.mbit else cost_model.LINKS[end.kind].gbit


def _in_one_network(mine: LinkInterface, theirs: LinkInterface) -> tuple[str, str] | None:
    for own in map(ipaddress.IPv4Interface, mine.addresses):
        for other in map(ipaddress.IPv4Interface, theirs.addresses):
            if own.network == other.network and own != other:
                return str(own), str(other)
    return None


class Proposal(NamedTuple):
    """The hosts of an inventory with their parts, and why."""

    machines: Sequence[Machine]
    """The head first."""
    links: Mapping[str, Link]
    """Worker → the fastest one between it and the head."""
    model: FoundModel | None
    """None for the known-answer model."""
    why: str
    """It is the head."""
    spare: Sequence[Machine] = ()
    """Hosts that the plan would not use, outside the cluster."""

    @property
    def head(self) -> Machine:
        return self.machines[0]

    @property
    def groups(self) -> dict[str, list[str]]:
        """The head is a worker, too, where it has no accelerator: beside workers, its llama-server drives accelerators only."""
        names = [machine.name for machine in self.machines]
        lends = len(names) > 1 and not self.head.devices_mib
        groups = {"llama_cluster": names, "llama_head": names[:1], "llama_workers": names if lends else names[1:]}
        return {**groups, **({"spare": [machine.name for machine in self.spare]} if self.spare else {})}

    @property
    def hosts(self) -> dict[str, dict[str, Any]]:
        """Host → its variables. An interface of ``llama_links`` that leads to several hosts has no peer."""
        machines = (*self.machines, *self.spare)
        peers: dict[str, dict[tuple[str, str], list[str]]] = {machine.name: {} for machine in machines}
        for worker, link in self.links.items():
            for host, other in ((worker, self.head.name), (self.head.name, worker)):
                peers[host].setdefault(link.ends[host], []).append(other)
        hosts = {}
        for machine in machines:
            own = [
                {"interface": interface, "address": address, **({"peer": others[0]} if len(others) == 1 else {})}
                for (interface, address), others in peers[machine.name].items()
            ]
            hosts[machine.name] = {**machine.variables, **({"llama_links": own} if own else {})}
        return hosts

    @property
    def model_variable(self) -> dict[str, Any]:
        return {f"llama_model_{self.model.kind}": self.model.name} if self.model else {"llama_model_known_answer": {}}

    @property
    def task_vars(self) -> dict[str, Any]:
        """What a task sees of the inventory."""
        hostvars = {name: {**self.model_variable, **variables} for name, variables in self.hosts.items()}
        return {"groups": self.groups, "hostvars": hostvars, "inventory_hostname": self.head.name}


def choose(machines: Sequence[Machine], plan: Callable[[Proposal], Plan | Refused]) -> tuple[Proposal, Plan | Refused]:
    """The proposal, and its plan: the largest model that lies on a host and that the plan accepts, where the host with the most memory of those that have
    it is the head, and the hosts are those that the plan uses. Without one, the known-answer model on all of them."""
    found = links(machines)

    def propose(owners: Sequence[Machine], model: FoundModel | None, why: str) -> tuple[Proposal, Plan | Refused]:
        head = _with_most(owners, found)
        others = [each for each in machines if each is not head]
        own = {each.name: link for each in others for link in reversed(found) if {head.name, each.name} == {*link.ends}}
        proposal = Proposal([head, *others], own, model, why)
        return proposal, plan(proposal)

    models = {(model.kind, model.name): model for machine in machines for model in machine.found.models}
    for key, model in sorted(models.items(), key=lambda item: -item[1].layer_bytes):
        owners = [each for each in machines if any((one.kind, one.name) == key for one in each.found.models)]
        why = f"{model.name} lies there, the largest model that lies on a host and fits"
        proposal, planned = propose(owners, model, why)
        if _serves(planned):
            less = _without_spare(proposal, planned, [machine.name for machine in owners])
            planned_less = plan(less) if less else None
            return (less, planned_less) if less and planned_less and _serves(planned_less) else (proposal, planned)
    return propose(machines, None, "no other host has more memory")


def _serves(planned: Plan | Refused) -> TypeGuard[Plan]:
    return isinstance(planned, Plan) and planned.fits and not planned.refused


def _without_spare(proposal: Proposal, planned: Plan, owners: Collection[str]) -> Proposal | None:
    """The hosts that a plan uses: one alone that has the model and is faster, or those with layers and the head; None where that is all of them."""
    best = planned.estimate.best_single_host
    alone = best.faster and best.host in owners
    used = {best.host} if alone else {proposal.head.name, *(entry.host for entry in planned.placement)}
    if not used.issuperset(proposal.groups["llama_cluster"]):
        return proposal._replace(
            machines=[machine for machine in proposal.machines if machine.name in used],
            links={name: link for name, link in proposal.links.items() if used.issuperset(link.ends)},
            spare=[machine for machine in proposal.machines if machine.name not in used],
        )
    return None


def _with_most(machines: Sequence[Machine], found: Sequence[Link]) -> Machine:
    """The host with the most memory, that of devices where there are some; of those that have as much, the one with the most links, or the first."""
    by_device = any(machine.devices_mib for machine in machines)
    sizes = [machine.devices_mib if by_device else machine.facts.memory_mib for machine in machines]
    near = [machine for machine, size in zip(machines, sizes) if size >= ALIKE * max(sizes)]
    return max(near, key=lambda machine: sum(machine.name in link.ends for link in found))
