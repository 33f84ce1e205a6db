# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The plan of llama-server on the head."""

from __future__ import annotations

from collections.abc import Sequence

from ansible_collections.llamacpp.cluster.plugins.module_utils.common import names
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp import backends
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.types import HeadPlan
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner import llama_server
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.facts import Facts
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.placement import (
    auxiliary_models,
    devices,
    estimate,
    prompt_cache,
)
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.stages.draft import Draft, Laid
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.types import Device


def serving(draft: Draft, laid: Laid, runtime_id: str) -> llama_server.Serving:
    """What llama-server's command line is made of, for one placement."""
    server, facts, name = draft.cluster.server, draft.head.host.facts, draft.cluster.head
    load_mode = llama_server.load_mode_of(server.load_mode, draft.release, laid.holders, name)
    case = draft.estimated(laid.placed)
    return llama_server.Serving(
        server=server._replace(load_mode=load_mode),
        host=draft.head.host,
        release=draft.release,
        model=draft.model,
        placed=laid.placed,
        build=draft.builds[name][draft.programs.serves].id,
        runtime=runtime_folder(facts, runtime_id),
        state=state_folder(facts),
        metrics=draft.head.host.metrics,
        page=server.page_port,
        service=names.SERVER,
        cache=prompt_cache.of_plan(case, estimate.works_of(case) if case.fits else ()),
        beside=auxiliary_models.arguments(laid.placed.auxiliary, draft.model, server, draft.release),
    )


def plan_of_head(draft: Draft, laid: Sequence[Laid], runtime_id: str, load_s: float | None) -> HeadPlan:
    """:param laid: the placement that is planned, and those of fallbacks: one environment serves all that may be run."""
    server, facts = draft.cluster.server, draft.head.host.facts
    build = draft.builds[draft.cluster.head][draft.programs.serves]
    run = laid if server.fallback else laid[:1]
    own = devices.environment_of_head(
        facts,
        [worker.device for worker in draft.head.workers],
        draft.programs.serves,
        {device.name for other in run for device in _drives(other)},
        any(other.placed.lent() for other in run),
    )
    own.update(next(filter(None, (auxiliary_models.environment(other.placed.auxiliary) for other in run)), {}))
    own.update(devices.heap_of_head([holder for other in run for holder in other.holders], facts, server.environment))
    environment = {**backends.service_environment(build.backend, build.environment, not build.archives), **own}
    used = sorted({device.backend for other in run for device in _drives(other)})
    return llama_server.plan_of(serving(draft, laid[0], runtime_id), environment, used, load_s)


def _drives(laid: Laid) -> list[Device]:
    """The head's own devices that hold something."""
    beside = [one.device for one in laid.placed.auxiliary if one.device]
    return list({device.buffer: device for device in (*laid.placed.own(), *beside)}.values())


def runtime_folder(facts: Facts, runtime_id: str) -> str:
    return f"{facts.prefix}/runtime/{runtime_id}"


def state_folder(facts: Facts) -> str:
    return f"{facts.prefix}/state"
