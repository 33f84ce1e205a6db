# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Which device holds which layers, and the settings of llama-server that follow from that."""

from __future__ import annotations

from typing import NamedTuple

from ansible_collections.llamacpp.cluster.plugins.module_utils.common import names
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner import server_settings
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.builds import releases
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.inputs import model_source
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.placement import (
    device_load,
    estimate,
    layout,
    prompts,
    speculation,
)
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.stages.lending import Workforce
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.stages.programs import Programs
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.types import Cluster, Model, Server


class Placement(NamedTuple):
    """What was placed where."""

    case: layout.Case
    """What was to be placed; its devices are all that could be used, its server has a batch and a micro-batch that suit the placement."""
    placed: device_load.Placed
    requested: Server
    """With the batch and micro-batch that the operator asks for."""


def place(cluster: Cluster, programs: Programs, workforce: Workforce, report: model_source.ModelReport) -> Placement:
    """:raises Refusal: model and settings of the server do not go together."""
    model = _checked_model(cluster, programs, workforce, report)
    case = layout.Case(
        cluster.server, cluster.placement, model, programs.release, workforce.devices, cluster.head, cluster.every_host
    )
    placed = layout.lay_out(case)
    # The known-answer model is there to try workers, however fast.
    if placed.reasons or model.known_answer is not None:
        return Placement(case, placed, cluster.server)
    estimated = estimated_case(cluster, programs, case, placed)
    chosen = prompts.batches_of(estimated, estimate.works_of(estimated))
    with_batches = case._replace(server=cluster.server._replace(batch=chosen.batch, micro_batch=chosen.micro_batch))
    again = layout.lay_out(with_batches)
    # The batches were chosen for the first layout: on other devices they may be wrong.
    if again.reasons or again.devices != placed.devices:
        return Placement(case, placed, cluster.server)
    return Placement(with_batches, again, cluster.server)


def _checked_model(
    cluster: Cluster, programs: Programs, workforce: Workforce, report: model_source.ModelReport
) -> Model:
    """The model that is placed, once it is checked.

    :raises Refusal: it does not go with the settings of the server, or with its release.
    """
    head, server = cluster.hosts[cluster.head], cluster.server
    model = model_source.model_of(cluster.model, report, head.facts, names.ACCOUNT)
    server_settings.check_auxiliary(server, cluster.model)
    server_settings.check(head.name, server, workforce.equipped[head.name].workers, programs.release)
    speculation.check(server, model, programs.release)
    predicting = speculation.with_predicting_layers(model, server)
    variable = releases.variable_of(programs.serves, cluster.releases)
    server_settings.check_types(cluster.model, predicting.summary, programs.release, variable)
    return predicting


def estimated_case(
    cluster: Cluster, programs: Programs, case: layout.Case, placed: device_load.Placed
) -> estimate.Case:
    """What the speed of a placement is predicted from."""
    return estimate.Case(
        release=case.release,
        placed=placed,
        summary=case.model.summary,
        head=cluster.head,
        hosts=cluster.hosts,
        every_host=cluster.every_host,
        fits=not placed.reasons,
        backend_of=programs.servers,
        server=case.server,
    )
