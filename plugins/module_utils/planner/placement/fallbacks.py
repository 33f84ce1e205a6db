# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What the head can serve on while a worker is away: the same model on the devices that are left, or why that is not possible."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from ansible_collections.llamacpp.cluster.plugins.module_utils.common.errors import Refusal
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.types import NoFallback
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.placement import device_load, layout
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.types import Worker


class Absence(NamedTuple):
    """Workers that are away together: one, or all of a host that lends several devices."""

    name: str
    """``HOST:WORKER``, or ``HOST``."""
    workers: tuple[Worker, ...]


class Fallback(NamedTuple):
    """What the head serves on meanwhile; ``placed`` is None where there is nothing."""

    absence: Absence
    placed: device_load.Placed | None
    missing_mib: int | None = None
    """By how much the model does not fit; None where that is not the reason."""
    reason: str = ""
    """Why there is no fallback."""

    def as_plan(self) -> NoFallback:
        """What the plan says of an absence in which nothing is served."""
        return NoFallback(self.absence.name, self.absence.workers[0].endpoint, self.missing_mib, self.reason)


def absences(case: layout.Case, placed: device_load.Placed) -> Iterator[Absence]:
    """Each used worker in the order of the plan's hosts, then each host with several of them, since it may lose power."""
    used = {worker.endpoint for worker in placed.lent()}
    by_host: dict[str, list[Worker]] = {}
    for device in case.devices:
        if device.worker and device.endpoint in used:
            by_host.setdefault(device.host, []).append(device.worker)
            yield Absence(f"{device.host}:{device.worker.name}", (device.worker,))
    for host, own in by_host.items():
        if len(own) > 1 and host != case.head:
            yield Absence(host, tuple(own))


def of_plan(case: layout.Case, placed: device_load.Placed) -> list[Fallback]:
    """What is served in each absence.

    :param placed: the plan's own placement, in which the model fits.
    """
    return [_without(case, absence) for absence in absences(case, placed)]


def _without(case: layout.Case, absence: Absence) -> Fallback:
    if case.server.tensor_split:
        return Fallback(absence, None, reason="llama_server_tensor_split says what each device gets")
    gone = {worker.endpoint for worker in absence.workers}
    left = [device for device in case.devices if device.endpoint not in gone]
    lost = [device.buffer for device in case.devices if device.endpoint in gone]
    if any(entry.endswith(f"={buffer}") for entry in case.server.override_tensor for buffer in lost):
        return Fallback(absence, None, reason="llama_server_override_tensor puts tensors there")
    try:
        placed = layout.lay_out(case._replace(devices=left))
    except Refusal as refusal:
        return Fallback(absence, None, reason=str(refusal))
    if placed.reasons:
        return Fallback(absence, None, placed.missing_mib, f"{placed.missing_mib} MiB are missing")
    return Fallback(absence, placed)
