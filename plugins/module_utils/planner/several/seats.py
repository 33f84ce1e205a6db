# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Workers for models that are loaded at the same time. A worker serves one llama-server at a time, so each declared one runs once for every seat: that of the
models that take turns, then those of the models that are kept."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from ansible_collections.llamacpp.cluster.plugins.module_utils.common.errors import Refusal
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp import backends
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.types import Plan
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner import neighbours
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.inputs import same_device, turns
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.inputs.cluster_inputs import STAGING_DISTANCE
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.types import Device, Host, Seat, Turn, Worker

HEAD_MEMORY = ""
"""Stands for what llama-server keeps in the memory of its host, beside devices."""
DISTANCE = 2 * STAGING_DISTANCE
"""The ports of a seat are so far above those of the one before."""


def numbers(models: Iterable[Turn]) -> dict[str, int]:
    """Name of a model → its seat."""
    kept = [model.name for model in models if model.keep]
    others = [model.name for model in models if not model.keep]
    first = 1 if others else 0
    return {**dict.fromkeys(others, 0), **{name: first + index for index, name in enumerate(kept)}}


def at(worker: Worker, number: int) -> Worker:
    """A worker as it runs for a seat: its folder of cached tensors is that of the declared one."""
    if not number:
        return worker
    above, tunnel = number * DISTANCE, worker.tunnel
    if tunnel and tunnel.begins:
        tunnel = tunnel._replace(port=tunnel.port + above, staging_port=tunnel.staging_port + above)
    return worker._replace(
        name=worker.name + _suffix(number),
        port=worker.port + above,
        staging_port=worker.staging_port + above,
        tunnel=tunnel,
    )


def _suffix(number: int) -> str:
    return f"-{number + 1}" if number else ""


def all_of(declared: Sequence[Worker], seats: int) -> tuple[Worker, ...]:
    """The workers of a host, for each seat.

    :raises Refusal: they cannot have ports or names.
    """
    found = tuple(at(worker, number) for number in range(seats) for worker in declared)
    for worker in found[len(declared) :]:
        alike = [other for other in found if other is not worker]
        taken = {port for other in alike for port in (other.port, other.staging_port)}
        ports = {worker.port, worker.staging_port}
        same_name = worker.name in {other.name for other in alike}
        if not worker.open_at or ports & taken or max(ports) > 65535 or same_name:
            raise Refusal(
                f"{turns.VARIABLE} needs {seats} workers on each device, and {worker.name} of {worker.host} would have the ports {worker.port} and "
                f"{worker.staging_port}: give the workers of {worker.host} ports in llama_worker_endpoints that are free there and {DISTANCE} above "
                "for each further one, other names, and no tunnel, or keep fewer models"
            )
    return found


def _place(hosts: Mapping[str, Host], host: str, device: str, declared: str) -> tuple[str, str]:
    """Stands for a device, whatever backend drives it; of a processor several workers may have parts.

    :param declared: name of the worker that lends it, or again of the device.
    """
    same = same_device.canonical_device_names(hosts[host].facts) if host in hosts else {}
    return host, same.get(device, declared)


def left(offered: Iterable[Device], seat: Seat, hosts: Mapping[str, Host]) -> tuple[Device, ...]:
    """The devices with what other models leave of them: what these hold, and what further processes take that drive them."""
    found = []
    for device in offered:
        runs_once = device.worker is not None and device.worker.external
        further = 0 if runs_once else (seat.seats - 1) * backends.RECORDS[device.backend].process_mib
        lent = device.worker
        known = (lent.device, lent.name.removesuffix(_suffix(seat.number))) if lent else (device.name, device.name)
        taken = math.ceil(seat.held.get(_place(hosts, device.host, *known), 0)) + further
        found.append(device._replace(capacity_mib=max(0, device.capacity_mib - taken)))
    return tuple(found)


def after(seat: Seat, number: int, plan: Plan, hosts: Mapping[str, Host]) -> Seat:
    """What is left for further models, beside the one of this plan.

    :param number: of the seat of its model.
    """
    held = dict(seat.held)
    own = [((plan.head.host, HEAD_MEMORY), sum(plan.head.cpu[1:]))]
    lent = {worker.endpoint: worker.device for host in plan.hosts.values() for worker in host.workers}
    for entry in plan.placement:
        declared = entry.worker.removesuffix(_suffix(number)) if entry.worker else entry.device
        device = lent.get(entry.endpoint or "", entry.device)
        own.append((_place(hosts, entry.host, device, declared), entry.total_mib))
    for place, mib in own:
        held[place] = held.get(place, 0) + mib
    on_head = dict(seat.on_head)
    for device, (mib, _capacity) in neighbours.memory_of(plan, plan.head.host).items():
        on_head[device] = on_head.get(device, 0) + mib
    return seat._replace(held=held, on_head=on_head)
