# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The head's part of the plan: its environment, and llama-server's command line."""

from __future__ import annotations

from collections.abc import Sequence

from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp import backends
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.types import HeadPlan
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner import llama_server
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.placement import auxiliary_models, devices
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.placement.candidate import Candidate
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.stages.programs import Installation
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.types import Device


def plan_of_head(installation: Installation, candidates: Sequence[Candidate], load_s: float | None) -> HeadPlan:
    """Return the head's part of the plan.

    :param candidates: the planned one, then those of fallbacks: one environment serves all that may run.
    """
    server, facts, serving_backend = (
        installation.cluster.server,
        installation.head.host.facts,
        installation.programs.serves,
    )
    build = installation.builds[installation.cluster.head][serving_backend]
    driven = [device for candidate in candidates for device in _driven(candidate)]
    auxiliary = (auxiliary_models.environment(candidate.layout.auxiliary) for candidate in candidates)
    holders = [holder for candidate in candidates for holder in candidate.holders()]
    environment = {
        **backends.service_environment(build.backend, build.environment, not build.archives),
        **devices.environment_of_head(
            facts,
            [worker.device for worker in installation.head.workers],
            serving_backend,
            {device.name for device in driven},
            any(candidate.layout.workers() for candidate in candidates),
        ),
        **next(filter(None, auxiliary), {}),
        **devices.heap_of_head(holders, facts, server.environment),
    }
    used_backends = sorted({device.backend for device in driven})
    folder = installation.runtime_folder(facts.prefix)
    return llama_server.plan_of(candidates[0], build.id, folder, environment, used_backends, load_s)


def _driven(candidate: Candidate) -> list[Device]:
    """Return the head's own devices that hold something."""
    auxiliary = [model.device for model in candidate.layout.auxiliary if model.device]
    return [*candidate.layout.head_devices(), *auxiliary]
