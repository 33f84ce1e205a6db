# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""All decisions of the stages before, from which the plan is written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ansible_collections.llamacpp.cluster.plugins.module_utils.models import download_record
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.host_types import BuildPlan
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.types import DevicePlacement, ReleasePlan
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner import llama_server, server_settings
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.placement import (
    auxiliary_models,
    device_load,
    devices,
    estimate,
    layout,
    speculation,
)
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.stages import placing
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.stages.placing import Placement
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.stages.programs import Programs
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.types import (
    Cluster,
    Equipped,
    Model,
    Server,
)


class Draft(NamedTuple):
    """What was decided."""

    cluster: Cluster
    """With a batch and a micro-batch that suit the placement."""
    programs: Programs
    equipped: Mapping[str, Equipped]
    builds: Mapping[str, Mapping[str, BuildPlan]]
    """Host → backend → build."""
    placement: Placement

    @property
    def head(self) -> Equipped:
        return self.equipped[self.cluster.head]

    @property
    def server(self) -> Server:
        return self.cluster.server

    @property
    def case(self) -> layout.Case:
        return self.placement.case

    @property
    def placed(self) -> device_load.Placed:
        return self.placement.placed

    @property
    def model(self) -> Model:
        return self.case.model

    @property
    def release(self) -> ReleasePlan:
        return self.programs.release

    def estimated(self, placed: device_load.Placed | None = None) -> estimate.Case:
        """What the speed of the placement, or of another one, is predicted from."""
        return placing.estimated_case(self.cluster, self.programs, self.case, placed or self.placed)

    def as_requested(self) -> Draft:
        """The same with the batches that the operator asks for: planned ones suit devices with more room than those of a fallback may have."""
        server = self.placement.requested
        placement = self.placement._replace(case=self.case._replace(server=server))
        return self._replace(cluster=self.cluster._replace(server=server), placement=placement)


class Laid(NamedTuple):
    """A placement as the plan has it, and what its devices hold."""

    placed: device_load.Placed
    entries: tuple[DevicePlacement, ...]
    holders: Sequence[devices.Holder]


def lay(draft: Draft, placed: device_load.Placed) -> Laid:
    cluster = draft.cluster
    uncounted = auxiliary_models.uncounted(draft.model, cluster.server, draft.release)
    drafts = any(one.role == download_record.DRAFT for one in placed.auxiliary)
    sizes = [server_settings.size_of_auxiliary(draft.model, role) for role in uncounted]
    sizes += speculation.uncounted(draft.model, cluster.server, draft.release)
    as_planned = server_settings.as_planned(cluster.server, drafts) and not sizes
    without = [*sizes, *server_settings.uncounted(cluster.server, drafts)]
    exact = as_planned and draft.release.mainline
    load_mode = cluster.server.load_mode
    entries = layout.as_plan(placed, exact, load_mode, without)
    holders = [
        devices.holder(
            device, cluster.every_host[device.host].facts, entry.weights_mib, entry.kv_mib + entry.auxiliary_mib
        )
        for device, entry in zip(placed.devices, entries)
    ]
    read = llama_server.load_mode_of(load_mode, draft.release, holders, cluster.head)
    return Laid(placed, entries if read == load_mode else layout.as_plan(placed, exact, read, without), holders)
