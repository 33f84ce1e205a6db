# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A proposed inventory as a person would write it. What hosts say stands in comments as one line each, and among variables only where its form leaves
nothing for templates."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping
from typing import Any

import yaml
from ansible_collections.llamacpp.cluster.plugins.module_utils.common import units, validation
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.types import Plan, Refused
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.inputs import same_device
from ansible_collections.llamacpp.cluster.plugins.plugin_utils.discovery import Link, Machine, Proposal

WIDTH = 120


class _Indented(yaml.SafeDumper):
    """Writes lists as people do, further in than their name."""

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        return super().increase_indent(flow, False)


def inventory(proposal: Proposal, lost: Mapping[str, str], plan: Plan | Refused) -> str:
    """YAML of the inventory, with the reasons.

    :param lost: host that is left out → why.
    """
    head, *others = proposal.machines
    first, *rest = [proposal.variables_of(machine) for machine in proposal.machines]
    shared = {
        name: value
        for name, value in first.items()
        if rest and name != "ansible_host" and all(other.get(name) == value for other in rest)
    }
    lines = [
        "---",
        *_comment(
            0, "Written by playbooks/discover.yml from what the hosts said. It is yours now: nothing writes it again."
        ),
        *_comment(0, f"{head.name} is the head: {proposal.why}."),
        *("llama_cluster:", "  children:", "    llama_head:", "      hosts:"),
        *_host(proposal, head, shared),
        *("    llama_workers:", "      hosts:" if others else "      hosts: {}"),
    ]
    if proposal.lends_its_processor:
        lines += [*_comment(8, "It has no accelerator, and lends its processor."), f"        {head.name}:"]
    lines += [line for machine in others for line in _host(proposal, machine, shared)]
    lines += [line for name, why in lost.items() for line in _comment(8, f"{name} is left out: {why}")]
    lines += ["  vars:", *_variables(4, shared)]
    if not proposal.model:
        why = "No model that fits lies there. This generated one proves the cluster; then take yours in its place."
        lines += _comment(4, why)
    lines += _variables(4, proposal.model_variable)
    if proposal.model and isinstance(plan, Plan):
        speed = plan.estimate.generation_range
        lines += _comment(4, f"{units.amount(proposal.model.bytes)}; {speed} tokens per second are predicted")
    return "\n".join(lines) + "\n"


def _host(proposal: Proposal, machine: Machine, shared: Mapping[str, Any]) -> list[str]:
    own = {name: value for name, value in proposal.variables_of(machine).items() if name not in shared}
    lines = _comment(8, f"{_devices(machine)}; {_gib(machine.facts.memory_mib)} of memory")
    for link in proposal.links:
        if link.ends[1].host == machine.name:
            lines += _comment(8, f"{_link(link)}: {_state(proposal, link)}.")
    return [*lines, f"        {machine.name}:", *_variables(10, own)]


def _comment(indent: int, text: str) -> list[str]:
    start = " " * indent + "# "
    return textwrap.wrap(
        validation.printable(text),
        WIDTH,
        initial_indent=start,
        subsequent_indent=start,
        break_on_hyphens=False,
        break_long_words=False,
    )


def _variables(indent: int, values: Mapping[str, Any]) -> Iterator[str]:
    """Whatever holds no lists and mappings stands on one line."""
    for name, value in values.items():
        flow = None if isinstance(value, (list, dict)) else False
        text = yaml.dump({name: value}, Dumper=_Indented, default_flow_style=flow, sort_keys=False, width=10 * WIDTH)
        yield from textwrap.indent(text, " " * indent).splitlines()


def _devices(machine: Machine) -> str:
    devices = same_device.named_accelerators(machine.facts)
    return ", ".join(f"{name} {device.name} {_gib(device.memory_mib)}" for name, device in devices) or "no accelerator"


def _gib(mib: int) -> str:
    return f"{mib / 1024:.0f} GiB"


def _link(link: Link) -> str:
    ends = " and ".join(f"{end.interface} of {end.host}" for end in link.ends)
    return f"{ends} see each other, {link.kind}, {link.gbit:g} Gbit/s"


def _state(proposal: Proposal, link: Link) -> str:
    if link in proposal.used.values():
        return "the head uses it"
    if not link.ends[0].address:
        return "not used, since they have no addresses in one network; give both address and manage in llama_links"
    if link.slow:
        return "not used, since the network that reaches both is faster"
    return "not used, since workers talk with the head alone, by its fastest link"
