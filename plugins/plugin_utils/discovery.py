# Copyright (c) 2026 the llamacpp.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Proposal of an inventory from the hosts' reports: links between hosts, the head, and the model."""

import ipaddress
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import combinations
from typing import Any, NamedTuple, TypeGuard

from ansible_collections.llamacpp.cluster.plugins.module_utils.host import discovery
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.types import Plan, Refused
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.facts import Facts
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.inputs import cluster_inputs
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.placement import cost_model

MIN_MEMORY_SHARE = 0.9
"""Minimum share of the largest memory for another host to be a candidate."""
HOST_NAME_PATTERN = r"(?!llama_)[A-Za-z][A-Za-z0-9_-]{0,62}"
"""Pattern for host names that Ansible does not mistake for a port, a host pattern or a group of the collection."""
RESERVED_NAMES = ("all", "ungrouped", "localhost", "y", "n", "yes", "no", "on", "off", "true", "false", "null")
"""Names that Ansible or YAML would not read as the name of a host."""
LOCAL_NAMES = ("localhost", "127.0.0.1")


class Machine(NamedTuple):
    """A host that answered or that is declared."""

    name: str
    """Name in the inventory."""
    variables: Mapping[str, Any]
    """Variables that the operator has set, including connection variables."""
    facts: Facts
    findings: discovery.Discovery = discovery.Discovery()

    @property
    def device_memory_mib(self) -> int:
        return sum(device.memory_mib for device in self.facts.distinct_accelerators())


def name_machines(machines: Sequence[Machine], tried_hosts: Collection[str]) -> list[Machine]:
    """Return the hosts with names for an inventory. A host that was reached by its address, and the controller, get their own host names if these are
    unique. The controller also gets the address at which others reach it.

    :param machines: hosts with the names under which they were reached.
    :param tried_hosts: names of all hosts that the run tried to reach.
    """
    hostnames = [machine.findings.hostname.partition(".")[0] for machine in machines]
    renamed_machines: list[Machine] = []
    for machine, hostname in zip(machines, hostnames):
        name, variables = machine.name, dict(machine.variables)
        is_address, is_local = cluster_inputs.is_ipv4_address(name), name in LOCAL_NAMES
        is_unique = (
            hostnames.count(hostname) == 1 and hostname not in tried_hosts and hostname.lower() not in RESERVED_NAMES
        )
        addresses = [nic.addresses[0] for nic in machine.findings.interfaces if nic.main and nic.addresses]
        if is_local and addresses and len(machines) > 1:
            variables.setdefault("ansible_host", addresses[0].partition("/")[0])
        if (is_address or is_local) and is_unique and re.fullmatch(HOST_NAME_PATTERN, hostname):
            if is_address:
                variables.setdefault("ansible_host", name)
            name = hostname
        renamed_machines.append(machine._replace(name=name, variables=variables))
    return renamed_machines


class DirectLink(NamedTuple):
    """A network between two hosts, at least as fast as the one that reaches them: each interface sees the other's unique hardware address."""

    endpoints: Mapping[str, tuple[str, str]]
    """Host → its interface, and the address of the interface with the prefix length."""
    kind: str
    gbit_per_s: float


def direct_links(machines: Sequence[Machine]) -> list[DirectLink]:
    """Return the links between hosts, the fastest first."""
    links, macs = [], [interface.mac for machine in machines for interface in machine.findings.interfaces]
    for machine, neighbour in combinations(machines, 2):
        interface_pairs = [
            (near_end, far_end)
            for near_end in machine.findings.interfaces
            for far_end in neighbour.findings.interfaces
            if far_end.mac in near_end.sees
            and near_end.mac in far_end.sees
            and macs.count(near_end.mac) == macs.count(far_end.mac) == 1
        ]
        main_interfaces = {interface for pair in interface_pairs if pair[0].main and pair[1].main for interface in pair}
        for near_end, far_end in interface_pairs:
            addresses, gbit_per_s = _link_addresses(near_end, far_end), min(_gbit_per_s(near_end), _gbit_per_s(far_end))
            if (
                addresses
                and not main_interfaces.intersection((near_end, far_end))
                and gbit_per_s >= min(map(_gbit_per_s, main_interfaces), default=0)
            ):
                endpoints = {machine.name: (near_end.name, addresses[0]), neighbour.name: (far_end.name, addresses[1])}
                links.append(DirectLink(endpoints, near_end.kind, gbit_per_s))
    return sorted(links, key=lambda link: -link.gbit_per_s)


def _gbit_per_s(interface: discovery.LinkInterface) -> float:
    return interface.mbit / 1000 if interface.mbit else cost_model.ASSUMED_LINKS[interface.kind].gbit


def _link_addresses(near_end: discovery.LinkInterface, far_end: discovery.LinkInterface) -> tuple[str, str] | None:
    for near_address in map(ipaddress.IPv4Interface, near_end.addresses):
        for far_address in map(ipaddress.IPv4Interface, far_end.addresses):
            if near_address.network == far_address.network and near_address != far_address:
                return str(near_address), str(far_address)
    return None


class Proposal(NamedTuple):
    """Hosts of an inventory with their roles, and the reason for the choice of the head."""

    machines: Sequence[Machine]
    """Hosts, the head first."""
    links: Mapping[str, DirectLink]
    """Worker → fastest link between it and the head."""
    model: discovery.FoundModel | None
    """Model; None for the known-answer model."""
    head_reason: str
    """Reason for the choice of the head."""
    spare_hosts: Sequence[Machine] = ()
    """Hosts outside the cluster, because the plan would not use them."""

    @property
    def head(self) -> Machine:
        return self.machines[0]

    @property
    def groups(self) -> dict[str, list[str]]:
        """Return the hosts of each group. A head without an accelerator is a worker, too: if it has workers, llama-server uses only accelerators."""
        names = [machine.name for machine in self.machines]
        is_worker = len(names) > 1 and not self.head.device_memory_mib
        groups = {"llama_cluster": names, "llama_head": names[:1], "llama_workers": names if is_worker else names[1:]}
        return {**groups, **({"spare": [machine.name for machine in self.spare_hosts]} if self.spare_hosts else {})}

    @property
    def host_variables(self) -> dict[str, dict[str, Any]]:
        """Return the variables of each host. An interface of ``llama_links`` that leads to several hosts has no peer."""
        machines = (*self.machines, *self.spare_hosts)
        peers: dict[str, dict[tuple[str, str], list[str]]] = {machine.name: {} for machine in machines}
        for worker, link in self.links.items():
            for host, peer in ((worker, self.head.name), (self.head.name, worker)):
                peers[host].setdefault(link.endpoints[host], []).append(peer)
        hosts = {}
        for machine in machines:
            link_entries = [
                {"interface": interface, "address": address, **({"peer": peer_list[0]} if len(peer_list) == 1 else {})}
                for (interface, address), peer_list in peers[machine.name].items()
            ]
            hosts[machine.name] = {**machine.variables, **({"llama_links": link_entries} if link_entries else {})}
        return hosts

    @property
    def model_variable(self) -> dict[str, Any]:
        return {f"llama_model_{self.model.kind}": self.model.name} if self.model else {"llama_model_known_answer": {}}

    @property
    def task_vars(self) -> dict[str, Any]:
        """Return the variables that a task with this inventory sees."""
        hostvars = {name: {**self.model_variable, **variables} for name, variables in self.host_variables.items()}
        return {"groups": self.groups, "hostvars": hostvars, "inventory_hostname": self.head.name}


def choose_proposal(
    machines: Sequence[Machine], make_plan: Callable[[Proposal], Plan | Refused]
) -> tuple[Proposal, Plan | Refused]:
    """Return the proposal with the largest discovered model that fits, or else with the known-answer model on all hosts, and its plan.

    The head is the host with the most memory among the hosts with the model. The plan decides which hosts are used.
    """
    links = direct_links(machines)

    def propose(
        candidates: Sequence[Machine], model: discovery.FoundModel | None, head_reason: str
    ) -> tuple[Proposal, Plan | Refused]:
        head = _choose_head(candidates, links)
        workers = [machine for machine in machines if machine is not head]
        worker_links = {
            machine.name: link
            for machine in workers
            for link in reversed(links)
            if {head.name, machine.name} == {*link.endpoints}
        }
        proposal = Proposal([head, *workers], worker_links, model, head_reason)
        return proposal, make_plan(proposal)

    models = {(model.kind, model.name): model for machine in machines for model in machine.findings.models}
    for key, model in sorted(models.items(), key=lambda item: -item[1].layer_bytes):
        hosts = [host for host in machines if any((entry.kind, entry.name) == key for entry in host.findings.models)]
        head_reason = f"it has {model.name}, the largest discovered model that fits into the cluster's memory"
        proposal, full_plan = propose(hosts, model, head_reason)
        if can_serve(full_plan):
            subset = _drop_spare_hosts(proposal, full_plan, [machine.name for machine in hosts])
            subset_plan = make_plan(subset) if subset else None
            return (subset, subset_plan) if subset and subset_plan and can_serve(subset_plan) else (proposal, full_plan)
    return propose(machines, None, "no other host has significantly more memory")


def can_serve(result: Plan | Refused) -> TypeGuard[Plan]:
    return isinstance(result, Plan) and result.fits and not result.refused


def _drop_spare_hosts(proposal: Proposal, full_plan: Plan, model_hosts: Collection[str]) -> Proposal | None:
    """Return the proposal with only the hosts that a plan uses: one faster host with the model, or the head and hosts with layers. None if it uses all."""
    best_host = full_plan.estimate.best_single_host
    is_enough = best_host.faster and best_host.host in model_hosts
    used_hosts = {best_host.host} if is_enough else {proposal.head.name, *(entry.host for entry in full_plan.placement)}
    if not used_hosts.issuperset(proposal.groups["llama_cluster"]):
        return proposal._replace(
            machines=[machine for machine in proposal.machines if machine.name in used_hosts],
            links={name: link for name, link in proposal.links.items() if used_hosts.issuperset(link.endpoints)},
            spare_hosts=[machine for machine in proposal.machines if machine.name not in used_hosts],
        )
    return None


def _choose_head(machines: Sequence[Machine], links: Sequence[DirectLink]) -> Machine:
    """Return the host with the most memory, or device memory if a host has any; of similar hosts, the one with the most links, or else the first."""
    has_devices = any(machine.device_memory_mib for machine in machines)
    sizes = [machine.device_memory_mib if has_devices else machine.facts.memory_mib for machine in machines]
    candidates = [machine for machine, size in zip(machines, sizes) if size >= MIN_MEMORY_SHARE * max(sizes)]
    return max(candidates, key=lambda machine: sum(machine.name in link.endpoints for link in links))
