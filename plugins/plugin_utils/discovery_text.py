# Copyright (c) 2026 the llamacpp.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""A proposed inventory as YAML, preceded by comments with its reasons. Free text from hosts appears only in comments."""

import textwrap
from collections.abc import Iterator, Mapping

import yaml
from ansible_collections.llamacpp.cluster.plugins.module_utils.common import units, validation
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp import capabilities
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.types import Plan, Refused
from ansible_collections.llamacpp.cluster.plugins.plugin_utils.discovery import Machine, Proposal

LINE_WIDTH = 120


class _Name(str):
    """Name of a host, dumped in quotes."""


class _Dumper(yaml.SafeDumper):
    """Dumper that indents lists below their key."""

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        return super().increase_indent(flow, False)


_Dumper.add_representer(_Name, lambda dumper, name: dumper.represent_scalar("tag:yaml.org,2002:str", name, style='"'))


def inventory_text(proposal: Proposal, omitted_hosts: Mapping[str, str], plan: Plan | Refused) -> str:
    head, host_variables = proposal.head.name, proposal.host_variables
    workers = {_Name(name): host_variables[name] if name != head else {} for name in proposal.groups["llama_workers"]}
    groups = {"llama_head": {"hosts": {_Name(head): host_variables[head]}}, "llama_workers": {"hosts": workers}}
    cluster_group = {"children": groups, "vars": proposal.model_variable}
    content = {"llama_cluster": cluster_group}
    if "spare" in proposal.groups:
        content["spare"] = {"hosts": {_Name(name): host_variables[name] for name in proposal.groups["spare"]}}
    yaml_text = yaml.dump(content, Dumper=_Dumper, sort_keys=False, width=10 * LINE_WIDTH)
    comments = [line for text in _comments(proposal, omitted_hosts, plan) for line in _comment_lines(text)]
    return "\n".join(["---", *comments, yaml_text])


def _comments(proposal: Proposal, omitted_hosts: Mapping[str, str], plan: Plan | Refused) -> Iterator[str]:
    yield "Written by playbooks/discover.yml from the hosts' reports. You can edit this file: no playbook overwrites it."
    head = proposal.head.name
    yield f"{head} is the head: {proposal.head_reason}."
    if head in proposal.groups["llama_workers"]:
        yield f"{head} has no accelerator, so its processor is a worker."
    yield from (
        f"{machine.name}: {_devices_text(machine)}; {_gib(machine.facts.memory_mib)} of memory"
        for machine in (*proposal.machines, *proposal.spare_hosts)
    )
    for link in proposal.links.values():
        interfaces = " and ".join(f"{interface} of {host}" for host, (interface, _address) in link.endpoints.items())
        yield f"{interfaces} are connected directly ({link.kind}, {link.gbit_per_s:g} Gbit/s): the head uses this link."
    yield from (f"{name} is left out: {reason}" for name, reason in omitted_hosts.items())
    package_versions = {machine.facts.packaged and machine.facts.packaged.version for machine in proposal.machines}
    if len(package_versions) == 1 and package_versions & capabilities.PACKAGED_BUILDS.keys():
        yield "The hosts' distribution has a llama.cpp package. To install it instead of compiling, set:"
        yield "llama_release: {source: package}"
    if not proposal.model:
        yield "No host has a model that fits. Test the cluster with the generated known-answer model, then replace it with your own."
    elif isinstance(plan, Plan):
        speed_range = plan.estimate.generation_range
        size_bytes = int(proposal.model.summary.get("bytes") or proposal.model.layer_bytes)
        yield f"{proposal.model.name}: {units.size_text(size_bytes)}; predicted: {speed_range} tokens per second"
        machines = (*proposal.machines, *proposal.spare_hosts)
        model_names = {
            model.name for machine in machines for model in machine.findings.models if not model.unreadable_path
        }
        other_models = sorted(model_names - {proposal.model.name})
        yield from [f"Other models: {', '.join(other_models)}"] if other_models else []
        if proposal.spare_hosts:
            spare_names = ", ".join(machine.name for machine in proposal.spare_hosts)
            yield f"Spare hosts: {spare_names}. The cluster would not be faster with them. To use them for larger models, add them to llama_workers."


def _comment_lines(text: str) -> list[str]:
    return textwrap.wrap(
        validation.printable(text),
        LINE_WIDTH,
        initial_indent="# ",
        subsequent_indent="#   ",
        break_on_hyphens=False,
        break_long_words=False,
    )


def _devices_text(machine: Machine) -> str:
    devices = machine.facts.named_accelerators
    return ", ".join(f"{name} {device.name} {_gib(device.memory_mib)}" for name, device in devices) or "no accelerator"


def _gib(mib: int) -> str:
    return f"{mib / 1024:.0f} GiB"
