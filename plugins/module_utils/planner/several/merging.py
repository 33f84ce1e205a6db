# Copyright (c) 2026 the llamacpp.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""The plan of several models, merged from separate plans of each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

from ansible_collections.llamacpp.cluster.plugins.module_utils.common import names
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.errors import Refusal
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan import types
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.host_types import CachePrefill, HostPlan
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.advisories import remedies
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.inputs import turns
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.several import presets
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.types import Cluster, ModelEntry

CACHE_VARIABLE = "LLAMA_CACHE"
"""Environment variable with a folder whose models the router also offers. The plan does not cover these models."""


def single_model_clusters(cluster: Cluster) -> list[Cluster]:
    """Return the cluster once for each model, as if it served only this model, but with worker caches for all models."""
    return [
        cluster._replace(
            server=entry.server,
            model=entry.model,
            model_entries=(),
            has_other_models=True,
            other_summaries=tuple(
                other.model.summary for other in cluster.model_entries if other.model.summary and other != entry
            ),
        )
        for entry in cluster.model_entries
    ]


def merge_plans(cluster: Cluster, plans: Sequence[types.Plan | types.Refused]) -> types.Plan | types.Refused:
    """Return the plan of all models, without services.

    :param plans: plan of each of ``cluster.model_entries``. The plans differ only in what their models need.
    """
    reasons = tuple(
        _sentence(models_text, text) for text, models_text in _merge_texts(cluster, [plan.reasons for plan in plans])
    )
    valid_plans = [plan for plan in plans if isinstance(plan, types.Plan)]
    if len(valid_plans) < len(plans):
        return types.Refused(types.SCHEMA, cluster.name, True, False, reasons)
    first_plan = valid_plans[0]
    try:
        return first_plan._replace(
            refused=any(plan.refused for plan in valid_plans),
            reasons=reasons,
            fits=all(plan.fits for plan in valid_plans),
            advisories=_merge_advisories(cluster, valid_plans),
            external_workers=tuple(
                worker._replace(used=any(plan.external_workers[index].used for plan in valid_plans))
                for index, worker in enumerate(first_plan.external_workers)
            ),
            hosts={name: _merge_host(name, valid_plans) for name in first_plan.hosts},
            head=_merge_heads(valid_plans, tuple(map(_served_model, cluster.model_entries, valid_plans))),
        )
    except Refusal as refusal:
        return types.Refused(types.SCHEMA, cluster.name, True, False, (str(refusal),))


def _merge_host(name: str, plans: Sequence[types.Plan]) -> HostPlan:
    """Return a host whose workers are used if any model uses them."""
    host = plans[0].hosts[name]
    workers = tuple(
        group[0]._replace(
            used=any(worker.used for worker in group), prefill=_merge_prefills([worker.prefill for worker in group])
        )
        for group in zip(*(plan.hosts[name].workers for plan in plans))
    )
    return host._replace(workers=workers)


def _merge_prefills(prefills: Sequence[CachePrefill | None]) -> CachePrefill | None:
    """Return how the cache of a worker that several models use is filled.

    :param prefills: prefill in the plan of each model.
    """
    existing_prefills = [prefill for prefill in prefills if prefill]
    tensors = dict.fromkeys(row for prefill in existing_prefills for row in prefill.tensors)
    return existing_prefills[0]._replace(tensors=tuple(tensors)) if existing_prefills else None


Text = TypeVar("Text", str, types.AdvisoryPlan)


def _merge_texts(cluster: Cluster, texts: Sequence[Sequence[Text]]) -> list[tuple[Text, str]]:
    """Return each text once with the names of its models, first the texts about all models, without names.

    :param texts: those of each of ``cluster.model_entries``. Texts about variables that an entry sets always have names.
    """
    entry_variables = {name for entry in cluster.model_entries for name in entry.server_variables}
    groups: dict[Text, list[str]] = {}
    for entry, model_texts in zip(cluster.model_entries, texts):
        for text in model_texts:
            groups.setdefault(text, []).append(entry.name)

    def is_about_all(text: Text, group: Sequence[str]) -> bool:
        sentences = text if isinstance(text, str) else f"{text.message} {text.remedy}"
        return len(group) == len(texts) and not any(name in sentences for name in entry_variables)

    rows = [(text, "" if is_about_all(text, group) else remedies.join_names(group)) for text, group in groups.items()]
    return sorted(rows, key=lambda row: bool(row[1]))


def _sentence(models_text: str, text: str) -> str:
    return turns.entry_sentence(models_text, text) if models_text else text


def _merge_advisories(cluster: Cluster, plans: Sequence[types.Plan]) -> tuple[types.AdvisoryPlan, ...]:
    return tuple(
        advisory._replace(
            message=_sentence(models_text, advisory.message),
            remedy=turns.with_entry_keys(advisory.remedy) if models_text else advisory.remedy,
        )
        for advisory, models_text in _merge_texts(cluster, [plan.advisories for plan in plans])
    )


def _served_model(entry: ModelEntry, plan: types.Plan) -> types.ServedModel:
    argv = presets.model_argv(plan.head.argv)
    values = {**plan._asdict(), **plan.head._asdict(), **entry._asdict(), "model": plan.model, "argv": argv}
    return types.ServedModel(**{name: values[name] for name in types.ServedModel._fields})


def _merge_heads(plans: Sequence[types.Plan], models: tuple[types.ServedModel, ...]) -> types.HeadPlan:
    """:raises Refusal: the router cannot serve these models together."""
    head = plans[0].head
    presets.check_router(plans[0].release)
    presets.presets_text(models)
    known_endpoints = dict.fromkeys(
        endpoint for endpoint, word in zip(head.launcher[1:], head.launcher) if word == "--worker"
    )
    endpoints = dict.fromkeys(entry.endpoint for plan in plans for entry in plan.placement if entry.endpoint)
    arguments = [word for endpoint in endpoints if endpoint not in known_endpoints for word in ("--worker", endpoint)]
    prefix = plans[0].head_host.prefix
    return head._replace(
        argv=presets.router_argv(plans[0], f"{prefix}/{names.PRESETS_FILE}"),
        launcher=(*head.launcher, *arguments, "--router"),
        environment={**_merge_environments(plans), CACHE_VARIABLE: f"{prefix}/{names.MODELS_FOLDER}/none"},
        start_timeout=max(plan.head.start_timeout for plan in plans),
        devices=tuple(dict.fromkeys(device for plan in plans for device in plan.head.devices)),
        backends=tuple(sorted({backend for plan in plans for backend in plan.head.backends})),
        models=models,
    )


def _merge_environments(plans: Sequence[types.Plan]) -> Mapping[str, str]:
    """Return the environment of the router and its children. A model without devices of the head would hide them from all models, so it does not count.

    :raises Refusal: models need different values of a variable.
    """
    merged_environment: dict[str, str] = {}
    for plan in [plan for plan in plans if plan.head.backends] or plans[:1]:
        for name, value in plan.head.environment.items():
            if merged_environment.setdefault(name, value) != value:
                raise Refusal(
                    f"models in {turns.VARIABLE} need both {name}={merged_environment[name]} and {name}={value}, but all models share one environment: move "
                    "one of these models to another cluster"
                )
    return merged_environment
