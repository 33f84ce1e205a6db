# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""From inventory and facts to the plan: the whole intended state as data. Reads and writes nothing.

The plan depends on the inventory and on facts that stay the same from run to run; its form is described in docs/plan.md. Each stage is a module of
``stages`` or a package beside it, and decides what its name says.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ansible_collections.llamacpp.cluster.plugins.module_utils.common import validation
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.errors import Refusal
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.types import SCHEMA, Plan, Refused
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner import services
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.builds import automatic, releases
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.inputs import model_source
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.several import merging
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.stages import (
    advice,
    deriving,
    document,
    fallback_plans,
    lending,
    placing,
    programs,
)
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.stages.draft import Draft
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.types import Catalogue, Cluster


def make(cluster: Cluster, model_found: Mapping[str, Any], catalogue: Catalogue, runtime_id: str) -> Plan | Refused:
    """Decides, writes the plan with its fallbacks, then its services, adds the advisories that it meets and the remedies that help, and judges it.

    :param model_found: what the module model_info reports of the model: a model_source.Found; empty when
        nothing is known. Of several models ``models``: name → that of each.
    :param catalogue: of packages.yml.
    :param runtime_id: digest of the launcher's files, which names their folder on the hosts.
    :returns: a Plan, ``refused`` where its model does not fit or an error is not accepted; Refused where planning could not end. Then ``reasons``
        says why, and nothing may be applied.
    """
    if cluster.turns:
        each = deriving.each_alone(cluster, model_found)
        return merging.merged(cluster, [make(alone, found, catalogue, runtime_id) for alone, found in each])
    try:
        resolved = automatic.resolve(cluster, catalogue)
        draft = decide(resolved, model_found, catalogue)
        plan = services.with_services(fallback_plans.with_fallbacks(draft, runtime_id))
        advised = advice.evaluate(draft, plan)
    except Refusal as refusal:
        return refused(cluster.name, refusal)
    helped = advice.with_remedies(
        advised, resolved, lambda changed: make_candidate(changed, model_found, catalogue, runtime_id)
    )
    return advice.judged(helped, cluster.accepted)


def make_candidate(
    cluster: Cluster, model_found: Mapping[str, Any], catalogue: Catalogue, runtime_id: str
) -> Plan | Refused:
    """The plan without fallbacks and remedies: one of many that are compared with each other."""
    try:
        draft = decide(automatic.resolve(cluster, catalogue), model_found, catalogue)
        plan = services.with_services(document.write(draft, (), runtime_id))
        return advice.judged(advice.evaluate(draft, plan).plan, cluster.accepted)
    except Refusal as refusal:
        return refused(cluster.name, refusal)


def decide(given: Cluster, model_found: Mapping[str, Any], catalogue: Catalogue) -> Draft:
    """All decisions, each stage from those before it: which programs, who lends what, who builds, and which layers lie where.

    :raises Refusal: there is no plan.
    """
    report = model_source.report_of(model_found)
    cluster = deriving.derive(given, report)
    chosen = programs.choose(cluster, catalogue)
    workforce = lending.equip(cluster, chosen, catalogue)
    tls_backend = chosen.serves if cluster.server.tls else None
    builds = releases.builds(
        workforce.equipped, chosen.releases, cluster.server, catalogue, tls_backend, cluster.measures
    )
    placement = placing.place(cluster, chosen, workforce, report)
    with_batches = cluster._replace(server=placement.case.server)
    return Draft(with_batches, chosen, workforce.equipped, builds, placement)


def refused(cluster: str, refusal: Refusal) -> Refused:
    """In place of the plan of a cluster that has none: the reason."""
    return Refused(SCHEMA, validation.printable(cluster), refused=True, fits=False, reasons=(str(refusal),))
