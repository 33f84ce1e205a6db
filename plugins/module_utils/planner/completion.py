# Copyright (c) 2026 the llamacpp.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""The completion of a plan: the files and definitions that each host gets, and the plan's id."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from ansible_collections.llamacpp.cluster.plugins.module_utils.common import names, typed_json
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.errors import Refusal
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp.model import known_answer_file
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan import host_types
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.types import Estimate, Plan
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner import services
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.several import presets

EXCLUDED_SUFFIXES = (f"/{names.CACHED_FACTS_FILE}", f"/{names.METRICS_FILE}")
"""Suffixes of files that the id of a plan ignores: cached facts, and labels for metrics."""
DefinitionRenderer = Callable[[host_types.HostPlan, host_types.ServicePlan], str]
"""Function that returns the definition of a service.

:raises Refusal: the service manager cannot express a word of the service.
"""


class RuntimeFile(NamedTuple):
    name: str
    content: bytes
    source: str
    """Path on the controller."""


def complete_plan(
    plan: Plan, runtime_files: Sequence[RuntimeFile], render_definition: DefinitionRenderer, facts: Mapping[str, Any]
) -> Plan:
    """Return the plan with files, definitions and its id.

    :param facts: host → facts that the head keeps for a run in which the host does not answer.
    :raises Refusal: a service manager cannot express a word of a service.
    """
    hosts = {name: _complete_host(plan, name, runtime_files, render_definition) for name in plan.hosts}
    head = hosts[plan.head.host]
    files = [*head.files, *_head_files(plan, head.prefix, facts)]
    hosts[plan.head.host] = head._replace(files=tuple(files), model=_downloaded_files(plan))
    plan = plan._replace(hosts=hosts)
    plan_id = compute_plan_id(plan)
    hosts = {name: host._replace(id=plan_id) for name, host in plan.hosts.items()}
    return _with_metrics(plan._replace(id=plan_id, hosts=hosts))


def _with_metrics(plan: Plan) -> Plan:
    hosts = {}
    for name, host in plan.hosts.items():
        file = _file_plan(f"{host.prefix}/{names.METRICS_FILE}", _metrics_text(plan, name).encode())
        has_metrics = host.metrics or (name == plan.head.host and plan.head.page_port)
        hosts[name] = host._replace(files=(*host.files, file)) if has_metrics else host
    return plan._replace(hosts=hosts)


def _complete_host(
    plan: Plan, name: str, runtime_files: Sequence[RuntimeFile], render_definition: DefinitionRenderer
) -> host_types.HostPlan:
    host = plan.hosts[name]
    files = [_file_plan(f"{host.prefix}/{names.CLUSTER_FILE}", json.dumps({"cluster": plan.cluster}).encode())]
    if host.runtime:
        folder = host_types.FolderPlan(host.runtime, "root" if host.account else None, "0755")
        host = host._replace(folders=(*host.folders, folder))
        files += [_file_plan(f"{host.runtime}/{file.name}", file.content, file.source) for file in runtime_files]
    defined_services = []
    for service in host.services:
        try:
            defined_services.append(service._replace(definition=render_definition(host, service)))
        except Refusal as refusal:
            raise Refusal(f"{service.name} on {name}: {refusal}") from None
    return host._replace(files=(*host.files, *files), services=tuple(defined_services))


def _head_files(plan: Plan, prefix: str, facts: Mapping[str, Any]) -> list[host_types.FilePlan]:
    """Return the fallbacks for the launcher, the presets, the known-answer models, and the facts of all hosts."""
    files = []
    if plan.head.fallback_after is not None:
        files.append(_file_plan(f"{prefix}/{names.FALLBACKS_FILE}", _fallbacks_text(plan).encode()))
    if plan.head.models:
        files.append(_file_plan(f"{prefix}/{names.PRESETS_FILE}", presets.presets_text(plan.head.models).encode()))
    known_answer_models = {
        entry.model.path: entry.model.known_answer for entry in plan.per_model() if entry.model.known_answer
    }
    for path, known_answer in known_answer_models.items():
        files.append(host_types.FilePlan(path, known_answer_file.file_bytes(*known_answer)))
    text = json.dumps(facts, indent=1, sort_keys=True) + "\n"
    return [*files, _file_plan(f"{prefix}/{names.CACHED_FACTS_FILE}", text.encode())]


def _fallbacks_text(plan: Plan) -> str:
    """Return the fallbacks for the head's launcher, as JSON."""
    entries = [
        {
            "name": fallback.without,
            "without": fallback.endpoint,
            "workers": list(fallback.workers),
            "argv": list(fallback.head.argv),
        }
        for fallback in plan.fallbacks
    ]
    return json.dumps(entries, indent=1) + "\n"


def _metrics_text(plan: Plan, name: str) -> str:
    """Return the metrics' labels for the launchers of a host, as JSON: service → exporter.Description."""
    host, descriptions = plan.hosts[name], {}
    labels: dict[str, Any] = {"folder": host.metrics or "", "cluster": plan.cluster, "host": name, "plan": plan.id}
    releases = {build.backend: plan.releases[build.release].ref for build in host.builds}
    for worker in host.workers:
        descriptions[names.service_name(f"worker-{worker.name}")] = {
            **labels,
            "kind": "worker",
            "release": releases.get(worker.backend, plan.release.ref),
            "worker": worker.name,
            "driven": [worker.device],
        }
    if name == plan.head.host:
        descriptions[plan.head.service] = {
            **labels,
            "kind": "head",
            "release": plan.release.ref,
            "workers": _worker_names(plan),
            "driven": sorted(
                {entry.device for entries in services.placements_of(plan) for entry in entries if not entry.endpoint}
            ),
            "planned": _predictions(plan),
        }
    return json.dumps({"services": descriptions}, indent=1) + "\n"


def _worker_names(plan: Plan) -> dict[str, tuple[str, str]]:
    """Return endpoint → host and name of each worker that the head may use."""
    return {
        entry.endpoint: (entry.host, entry.worker or "")
        for entries in services.placements_of(plan)
        for entry in entries
        if entry.endpoint
    }


def _predictions(plan: Plan) -> dict[str, Mapping[str, Any]]:
    """Return model → metric in the launcher's table → predicted value."""
    model_names = [model.name for model in plan.head.models or ()] or [plan.model.name]
    return {name: _predicted_metrics(model_plan.estimate) for name, model_plan in zip(model_names, plan.per_model())}


def _predicted_metrics(estimate: Estimate) -> dict[str, float | None]:
    full_context_speed = estimate.at_context[-1] if estimate.at_context else None
    metrics: dict[str, float | None] = {}
    for kind in ("generation", "prompt"):
        field, bounds = f"{kind}_tokens_per_s", getattr(estimate, f"{kind}_range")
        metrics[f"planned_{kind}_tokens_per_second"] = getattr(estimate, field)
        metrics[f"planned_{kind}_lowest_tokens_per_second"] = bounds and bounds.low
        metrics[f"planned_{kind}_highest_tokens_per_second"] = bounds and bounds.high
        metrics[f"planned_{kind}_full_tokens_per_second"] = full_context_speed and getattr(full_context_speed, field)
    return metrics


def _downloaded_files(plan: Plan) -> tuple[host_types.ModelFilePlan, ...]:
    """Return the files that the head downloads; none if the size of a file is not known yet."""
    files = {file.path: file for model_plan in plan.per_model() for file in model_plan.model.files if file.url}
    return () if any(file.bytes is None for file in files.values()) else tuple(files.values())


def _file_plan(path: str, content: bytes, source: str | None = None) -> host_types.FilePlan:
    return host_types.FilePlan(
        path=path,
        bytes=len(content),
        sha256=hashlib.sha256(content).hexdigest(),
        mode="0644",
        source=source,
        content=None if source else content.decode(),
    )


def compute_plan_id(plan: Plan) -> str:
    """Return the id of a completed plan. It depends on everything that is applied, but not on facts cached on the head, metrics, origins of files, paths on
    the controller, or the time limit of a run."""
    model = plan.model._replace(files=_without_urls(plan.model.files))
    hosts = {
        name: host._replace(
            files=tuple(
                file._replace(source=None, content=None)
                for file in host.files
                if not file.path.endswith(EXCLUDED_SUFFIXES)
            ),
            model=_without_urls(host.model),
        )
        for name, host in plan.hosts.items()
    }
    plan_values = (
        plan.cluster,
        plan.release,
        plan.releases,
        model,
        plan.external_workers,
        plan.head._replace(start_timeout=0, models=None),
    )
    models = [
        model_plan.model._replace(files=_without_urls(model_plan.model.files)) for model_plan in plan.head.models or ()
    ]
    text = json.dumps(typed_json.dump((*plan_values, hosts, *models)), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _without_urls(files: Sequence[host_types.ModelFilePlan]) -> tuple[host_types.ModelFilePlan, ...]:
    return tuple(file._replace(url=None) for file in files)
