# Copyright (c) 2026 the llamacpp.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""The models that a cluster could serve, each with the quantisation, context and speed of its plan."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, NamedTuple

from ansible_collections.llamacpp.cluster.plugins.module_utils.common import typed_json
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.errors import Refusal
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.units import MIB
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.validation import Number
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp.model import gguf, shapes
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp.model.summary import ModelSummary
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan import host_types
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.types import (
    Plan,
    Refused,
    SpeedRange,
    UsersEstimate,
)
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner import planner, types
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.inputs import model_inputs
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.placement.cost_model import EXPERT_PATTERN

ANY_MODEL = types.ModelRequest(None, None, None)
"""Placeholder for cluster_inputs.read_cluster if the cluster has no model yet."""
GIB = 1024 * MIB
LONGER_CONTEXTS = (32768, 65536, 131072, 262144)
"""Contexts in tokens that are tried if they are longer than the requested context."""
ACCESS_IDS = {"rpc-remote-code-execution", "unprotected-worker", "external-worker"}
ACCESS_IDS |= {"open-server", "server-for-everybody", "unlimited-server"}
"""Ids of errors about access, which do not depend on the model."""
MIN_FAST_QUANTISATION = "Q4_K_M"
"""Smallest quantisation that is chosen for speed alone."""
SMALL_QUANTISATIONS = frozenset([*shapes.TYPE_MIXTURES][[*shapes.TYPE_MIXTURES].index(MIN_FAST_QUANTISATION) :])


class FitQuery(NamedTuple):
    """The variable ``llama_what_fits``."""

    context: Annotated[int, Number(1, gguf.MAX_INT32)] = 32768
    """Tokens; a model gets at most as many as it was trained for."""
    speed: Annotated[float, Number(allows_fractions=True)] = 10.0
    """Generated tokens per second and user that are fast enough."""
    models: tuple[Mapping[str, Any], ...] = ()
    """The operator's models for offers_of, in addition to published models."""


class Offer(NamedTuple):
    """A model that might be served."""

    name: str
    repo: str
    shape: shapes.ModelShape | None = None
    summary: ModelSummary | None = None
    """Summary of the model's only quantisation, in place of a shape."""

    def quantisations(self) -> Iterator[tuple[str, ModelSummary]]:
        """Yield the name and the summary of each quantisation, the largest first."""
        if self.summary:
            yield "as given", self.summary
        elif self.shape:
            for name in shapes.quantisations(self.shape):
                yield name, shapes.summary_of(self.shape, name)


class FitResult(NamedTuple):
    """The quantisation, context and speed with which a cluster could serve a model."""

    model: str
    repo: str
    """Repository on Hugging Face; empty if unknown."""
    quantisation: str
    """The largest quantisation that is fast enough, otherwise the largest that fits; the smallest if none fits."""
    bytes: int
    parameters: int
    active_parameters: int
    """Parameters that a token uses."""
    refusal_reason: str = ""
    """Why the cluster cannot serve it; then the following fields are not set."""
    context: int = 0
    longest_context: int = 0
    """Longest of LONGER_CONTEXTS that also fits."""
    generation_tokens_per_s: float = 0.0
    generation_range: SpeedRange | None = None
    prompt_tokens_per_s: float = 0.0
    prompt_range: SpeedRange | None = None
    users: UsersEstimate | None = None
    devices: int = 0
    hosts: tuple[str, ...] = ()

    @property
    def speed_per_user(self) -> float:
        """Return generated tokens per second for each user."""
        users = self.users
        if users is None or users.users == 1:
            return self.generation_tokens_per_s
        return (users.generation_tokens_per_s or 0.0) / users.users


def parse_query(place: str, value: Any) -> FitQuery:
    """Parse ``llama_what_fits``: true or a mapping.

    :raises Refusal: the value is invalid.
    """
    data = {} if str(value).lower() == "true" else value
    try:
        query = typed_json.parse(FitQuery, data)
    except typed_json.Mismatch as error:
        raise Refusal(f"{place}{error.path} {error.reason}: correct it (see docs/plan.md)") from None
    fields = [field.name for field in typed_json.fields(FitQuery)]
    unknown_keys = sorted(map(str, {*data} - {*fields}))
    if unknown_keys:
        raise Refusal(f"{place} has unknown keys ({', '.join(unknown_keys)}): use only these: {', '.join(fields)}")
    return query


def offers_of(models: Sequence[Mapping[str, Any]], own_models: Sequence[Mapping[str, Any]] = ()) -> list[Offer]:
    """Return the models to choose from. An operator's model replaces a published model with the same name.

    :param models: published models with the fields of shapes.ModelShape.
    :param own_models: operator's models: ``summary`` as model_info returns it, and optionally ``name`` and ``repo``.
    :raises Refusal: a summary is missing or invalid.
    """
    all_shapes = [typed_json.parse(shapes.ModelShape, entry) for entry in models]
    offers = {shape.name: Offer(shape.name, shape.repo, shape) for shape in all_shapes}
    for index, entry in enumerate(own_models):
        header = model_inputs.summary_of(f"summary in models[{index}] of llama_what_fits", entry.get("summary"))
        offer = Offer(str(entry.get("name") or header.name), str(entry.get("repo") or ""), None, header)
        offers[offer.name] = offer
    return list(offers.values())


def fit_models(
    cluster: types.Cluster, offers: Sequence[Offer], catalogue: types.Catalogue, query: FitQuery
) -> list[FitResult]:
    """Return the result for each model, in the order that ``ORDER_TEXT`` describes.

    :param cluster: cluster with any model; settings that restrict the placement of layers are ignored.
    :raises Refusal: this cluster cannot be planned with any model.
    """
    server = cluster.server._replace(override_tensor=(), tensor_split=(), gpu_layers=None, speculation=None)
    cluster = cluster._replace(server=server, placement="fastest", accepted_ids=cluster.accepted_ids | ACCESS_IDS)
    results = [_fit_model(cluster, offer, catalogue, query) for offer in offers]
    reasons = {result.refusal_reason for result in results}
    if len(results) > 1 and len(reasons) == 1 and reasons != {""}:
        raise Refusal(f"none of the models can be planned: {reasons.pop()}")
    return sorted(results, key=lambda result: _sort_key(result, query.speed))


ORDER_TEXT = (
    "The order is: models that generate at least {:g} tokens/s, the largest first; slower models, the fastest first; models that do not fit. Each is shown "
    f"with its largest quantisation that is fast enough, or else with the largest that fits; none below {MIN_FAST_QUANTISATION} is chosen for speed alone."
)


def _sort_key(result: FitResult, tokens_per_s: float) -> tuple[float, ...]:
    if result.refusal_reason:
        return (2, result.bytes)
    is_fast = result.speed_per_user >= tokens_per_s
    return (0, -result.parameters) if is_fast else (1, -result.speed_per_user)


def _fit_model(cluster: types.Cluster, offer: Offer, catalogue: types.Catalogue, query: FitQuery) -> FitResult:
    attempts = []
    for name, summary in offer.quantisations():
        result = _fit_quantisation(cluster, offer, name, summary, catalogue, query.context)
        attempts.append((result, summary))
        if not result.refusal_reason and (result.speed_per_user >= query.speed or name in SMALL_QUANTISATIONS):
            break
    best_result, summary = attempts[-1]
    if best_result.refusal_reason or best_result.speed_per_user < query.speed:
        best_result, summary = next((attempt for attempt in attempts if not attempt[0].refusal_reason), attempts[-1])
    longest_context = summary.context * cluster.server.parallel
    contexts = sorted(
        {min(context, longest_context) for context in LONGER_CONTEXTS if context > best_result.context}, reverse=True
    )
    longer_contexts = (
        context
        for context in contexts
        if not best_result.refusal_reason and not _plan_model(cluster, summary, context, catalogue).refused
    )
    return best_result._replace(longest_context=next(longer_contexts, best_result.context))


def _fit_quantisation(
    cluster: types.Cluster, offer: Offer, name: str, summary: ModelSummary, catalogue: types.Catalogue, context: int
) -> FitResult:
    expert_parameters = sum(
        row.tensor_count * math.prod(row.shape) for row in summary.tensor_groups if EXPERT_PATTERN.search(row.name)
    )
    active_parameters = (summary.parameters or 0) - int(expert_parameters * (1 - summary.active_expert_share))
    result = FitResult(offer.name, offer.repo, name, summary.size, summary.parameters or 0, active_parameters)
    plan = _plan_model(cluster, summary, context, catalogue)
    if isinstance(plan, Refused) or plan.refused:
        return result._replace(refusal_reason=_refusal_reason(plan))
    return result._replace(
        context=plan.head.context,
        generation_tokens_per_s=plan.estimate.generation_tokens_per_s or 0.0,
        generation_range=plan.estimate.generation_range,
        prompt_tokens_per_s=plan.estimate.prompt_tokens_per_s or 0.0,
        prompt_range=plan.estimate.prompt_range,
        users=plan.estimate.users,
        devices=len(plan.placement),
        hosts=tuple(dict.fromkeys(share.host for share in plan.placement)) or (cluster.head,),
    )


def _plan_model(
    cluster: types.Cluster, summary: ModelSummary, context: int, catalogue: types.Catalogue
) -> Plan | Refused:
    source = types.ModelSource(host_types.MODEL, "llama_model_path", path=f"/{summary.name}.gguf")
    server = cluster.server._replace(context=context)
    cluster = cluster._replace(server=server, model=types.ModelRequest(source, None, summary))
    return planner.make_trial_plan(cluster, catalogue, "")


def _refusal_reason(plan: Plan | Refused) -> str:
    """Return why a plan is refused, in one short sentence."""
    if isinstance(plan, Plan):
        missing_mib = sum(max(0, share.weights_mib + share.kv_mib - share.capacity_mib) for share in plan.placement)
        if not plan.fits and missing_mib:
            return f"needs {missing_mib * MIB / GIB:.1f} GiB more memory"
        errors = [advisory for advisory in plan.advisories if advisory.severity == "error" and not advisory.accepted]
        if plan.fits and errors:
            return f"{errors[0].message} ({errors[0].id})"
    return plan.reasons[0]
