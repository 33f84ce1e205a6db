# Copyright (c) 2026 the llamacpp.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""A candidate: a layout of a workload on a site, with its costs. An attempt answers every question about placement."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ansible_collections.llamacpp.cluster.plugins.module_utils.common.units import MIB
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp import backends
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp.model.summary import ModelSummary
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.types import DevicePlacement, ReleasePlan
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.placement import cost_model, device_load
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.placement.layout import lay_out
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.placement.site import Site
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.types import Worker
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.workload import Workload


class Candidate(NamedTuple):
    """A layout of a workload on a site."""

    workload: Workload
    site: Site
    layout: device_load.Layout
    parts: Sequence[cost_model.ModelPart]
    """Parts of the model with their costs, in the order in which a token visits them; empty unless the model fits."""

    idle_workers: tuple[Worker, ...] = ()
    """Unused workers that are not started, because their ports would be open to others."""

    @property
    def fits(self) -> bool:
        return not self.layout.reasons

    @property
    def summary(self) -> ModelSummary:
        return self.workload.summary

    @property
    def release(self) -> ReleasePlan:
        return self.workload.release

    def placement(self) -> tuple[DevicePlacement, ...]:
        """Return the plan's entry for each device."""
        load_mode, load, workload = self.layout.load_mode, self.layout.load, self.workload
        entries = []
        for share, reason in zip(self.layout.shares(), self.layout.share_reasons):
            device = share.device
            maps_file = backends.BY_NAME[device.backend].maps_model_file and load_mode not in ("none", "mlock")
            has_exact_sizes = not (device.worker.is_external if device.worker else maps_file)
            exactness = {"weights_mib": load.has_exact_weights and has_exact_sizes, "kv_mib": load.has_exact_kv}
            entries.append(
                DevicePlacement(
                    device=device.buffer,
                    host=device.host,
                    worker=device.worker.name if device.worker else None,
                    endpoint=device.endpoint,
                    layers=share.layers,
                    output=share.has_output,
                    weights_mib=share.weights_mib,
                    kv_mib=round(share.kv / MIB, 2),
                    compute_mib=round(share.compute / MIB, 2),
                    auxiliary_mib=round(share.auxiliary_bytes / MIB, 2),
                    total_mib=round(share.total / MIB, 2),
                    capacity_mib=device.capacity_mib,
                    reason=reason,
                    exact=tuple(
                        field
                        for field, is_exact in exactness.items()
                        if is_exact and workload.is_exact and not share.auxiliary_bytes
                    ),
                    without=workload.uncounted_memory,
                )
            )
        return tuple(entries)


def attempt_placement(workload: Workload, site: Site) -> Candidate:
    """Place a workload on a site.

    :raises Refusal: the site cannot meet the operator's settings.
    """
    layout = lay_out(workload, site)
    parts = () if layout.reasons else cost_model.parts_of(layout, site.head, site.rates, site.links)
    return Candidate(workload, site, layout, parts)
