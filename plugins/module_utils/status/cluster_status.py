# Copyright (c) 2026 the llamacpp.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Status of a cluster, from its plan and the hosts' reports. This module neither reads nor changes anything on hosts."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from ansible_collections.llamacpp.cluster.plugins.module_utils.common import names
from ansible_collections.llamacpp.cluster.plugins.module_utils.launcher import loading, serving
from ansible_collections.llamacpp.cluster.plugins.module_utils.launcher.serving import ASLEEP
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.drift import STATE_TEXTS, Difference, Drift
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.host_types import HostPlan
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.types import Plan
from ansible_collections.llamacpp.cluster.plugins.module_utils.status import types
from ansible_collections.llamacpp.cluster.plugins.module_utils.verify import server_client
from ansible_collections.llamacpp.cluster.plugins.module_utils.verify.waiting import load_bytes_of

HARMLESS_KINDS = ("unneeded",)
"""Kinds of differences that do not make a cluster unhealthy: leftovers that could be removed."""
RUNNING_STATES = ("running", "waiting")
"""States of a service whose process runs as planned."""
SERVING_STATES = ("serving", ASLEEP, "fallback")


class StatusAnswer(NamedTuple):
    """Answer of a host to a question about its condition."""

    condition: types.Condition | None = None
    drift: Drift | None = None
    """Differences from the host's part of the plan; None if the host was not compared."""
    reason: str = ""
    """Reason why the condition is missing."""
    reachable: bool = True


def _worker_statuses(
    host_plan: HostPlan | None, answer: StatusAnswer, condition: types.Condition
) -> Iterator[types.WorkerStatus]:
    workers = {names.service_name(f"worker-{worker.name}"): worker for worker in host_plan.workers} if host_plan else {}
    service_states = answer.drift.services if answer.drift else {}
    for name, worker in workers.items():
        if name in service_states:
            yield types.WorkerStatus(
                name,
                worker.endpoint,
                f"{worker.backend} {worker.device}",
                worker.protocol,
                worker.used,
                service_states[name].state,
                condition.uptimes_s.get(name),
                condition.restarts.get(name),
                service_states[name].clients,
            )
    for name, state in condition.service_states.items():
        if name not in workers and not names.is_head_service(name):
            yield types.WorkerStatus(
                name, None, None, None, None, state, None, condition.restarts.get(name), clients=()
            )


def _host_status(name: str, is_head: bool, plan: Plan | None, answer: StatusAnswer) -> types.HostStatus:
    condition = answer.condition
    return types.HostStatus(
        name=name,
        is_head=is_head,
        unknown_reason=answer.reason,
        reachable=answer.reachable,
        installed=bool(condition and condition.service_states),
        workers=tuple(_worker_statuses(plan.hosts[name] if plan else None, answer, condition)) if condition else (),
        resources=condition.resources if condition else None,
        differences=answer.drift.differences if answer.drift else None,
    )


def _cluster_state(
    drift_state: str | None,
    manager_state: str | None,
    head: types.HeadCondition,
    workers: Mapping[str, tuple[str, str]],
) -> tuple[str, str]:
    """Return state and detail of the cluster, from the report of its head.

    :param drift_state: state of the head's service in its drift; None without a plan.
    :param manager_state: its state in the service manager; None without a definition.
    """
    record, health = head.serving if head.current else None, head.health
    exit_text = f"llama-server exited {head.ends.last_exit}" if head.ends.last_exit else ""
    if health and health.healthy:
        return (record.state if record and record.state in SERVING_STATES else "serving"), ""
    if manager_state is None and drift_state not in RUNNING_STATES:
        return "not installed", ""
    if manager_state in ("stopped", "failed") and drift_state not in RUNNING_STATES:
        return manager_state, exit_text if manager_state == "failed" else ""
    if record and record.state in ("waiting", "loading"):
        return record.state, serving.describe_wait(workers, record.waiting_for) if record.waiting_for else ""
    if drift_state == "waiting":
        return "waiting", "; ".join(head.waits_for)
    if drift_state == "stopped":
        return "starting", exit_text
    if health:
        return ("loading", "") if health.detail == server_client.LOADING else ("silent", health.detail)
    return (record.state if record else "running"), ""


def _is_as_planned(hosts: Sequence[types.HostStatus]) -> bool | None:
    """Return whether all hosts are as planned; None if a host was not compared."""
    if any(serious_differences(host) for host in hosts):
        return False
    return None if any(host.differences is None for host in hosts) else True


def _cluster_status(
    name: str, plan: Plan | None, hosts: Sequence[types.HostStatus], answers: Mapping[str, StatusAnswer]
) -> types.ClusterStatus:
    head_name = next((host.name for host in hosts if host.is_head), None)
    drifts = [answer.drift for answer in answers.values() if answer.drift]
    cluster = types.ClusterStatus(
        name=name,
        state="unknown",
        detail="",
        head=head_name,
        url=plan.head.url if plan else None,
        model=", ".join(model.name for model in plan.head.models or (plan.model,)) if plan else None,
        planned=types.ReleaseStatus(plan.release.ref, plan.release.build, plan.release.protocol) if plan else None,
        running_builds=tuple(sorted({build for drift in drifts for build in drift.running_build_ids})),
        as_planned=_is_as_planned(hosts) if plan else None,
    )
    answer = answers.get(head_name or "", StatusAnswer())
    condition, drift = answer.condition, answer.drift
    if not condition:
        return cluster
    service = plan.head.service if plan else next(filter(names.is_head_service, condition.service_states), "")
    head, now_s = condition.head or types.UNKNOWN_HEAD_CONDITION, condition.now
    service_state = drift.services.get(service) if drift else None
    workers = {
        worker.endpoint: (name, worker.name)
        for name, host_plan in (plan.hosts if plan else {}).items()
        for worker in host_plan.workers
    }
    state, detail = _cluster_state(
        service_state and service_state.state, condition.service_states.get(service), head, workers
    )
    cluster = cluster._replace(
        state=state,
        detail=detail,
        uptime_s=condition.uptimes_s.get(service),
        restarts=head.serving.restarts if head.serving else head.ends.total,
        last_restarts=tuple(
            types.RestartStatus(max(0, now_s - event.time), event.text)
            for event in reversed(head.serving.last if head.serving else ())
        ),
        verified=head.verified,
        models=head.models,
    )
    record = head.serving if head.current else None
    if not record:
        return cluster
    is_load_known = plan and not plan.head.models and not record.without
    return cluster._replace(
        asleep_s=max(0, now_s - record.since) if state == ASLEEP else None,
        without=record.without if state == "fallback" else (),
        waiting_for=record.waiting_for,
        load=loading.progress_of(record.load, load_bytes_of(plan if is_load_known else None)) if record.load else None,
    )


def serious_differences(host: types.HostStatus) -> list[Difference]:
    """Return the differences of a host that make its cluster unhealthy."""
    return [difference for difference in host.differences or () if difference.kind not in HARMLESS_KINDS]


def _host_problems(host: types.HostStatus) -> Iterator[str]:
    if host.unknown_reason:
        yield f"{host.name} {'could not be examined' if host.reachable else 'does not answer'}: {host.unknown_reason}"
        return
    for worker in host.workers:
        if worker.state not in RUNNING_STATES:
            yield f"{worker.service} on {host.name} is {STATE_TEXTS.get(worker.state, worker.state)}"
    differences = [difference for difference in serious_differences(host) if difference.kind != "service"]
    if differences:
        kinds = ", ".join(dict.fromkeys(difference.kind for difference in differences))
        yield f"{host.name} differs from the plan in {len(differences)} way{'s' * (len(differences) > 1)} ({kinds})"


def problems_of(
    cluster: types.ClusterStatus, hosts: Sequence[types.HostStatus], refusal: str = "", other_plan_note: str = ""
) -> tuple[str, ...]:
    """Return the reasons why a cluster is not healthy, without full stops."""
    problems = []
    empty_hosts = [host.name for host in hosts if not host.unknown_reason and not host.installed]
    if cluster.state == "fallback":
        problems.append(serving.describe_absence(cluster.without))
    elif cluster.state == "unknown":
        problems.append("the head did not answer, so the cluster's state is unknown")
    elif cluster.state not in SERVING_STATES:
        state = serving.STATE_TEXTS.get(cluster.state, f"is {cluster.state}")
        problems.append(f"the cluster {state}{f': {cluster.detail}' * bool(cluster.detail)}")
    if cluster.balancer is not None and not cluster.balancer.startswith("UP"):
        problems.append(f"the balancer sends no requests to {cluster.head}: {cluster.balancer}")
    if refusal:
        problems.append(f"the inventory cannot be planned: {refusal}")
    if empty_hosts and cluster.state != "not installed":
        problems.append(f"nothing is installed on {', '.join(empty_hosts)}")
    problems += [problem for host in hosts if host.name not in empty_hosts for problem in _host_problems(host)]
    if cluster.verified and not cluster.verified.passed:
        failures = "; ".join(cluster.verified.failed_checks)
        problems.append(f"the last verification failed{f': {failures}' * bool(failures)}")
    return tuple(problem.rstrip(".") for problem in [*problems, *([other_plan_note] if other_plan_note else [])])


def make_status(
    name: str,
    heads: Sequence[str],
    plan: Plan | None,
    answers: Mapping[str, StatusAnswer],
    refusal: str = "",
    other_plan_note: str = "",
    balancer: str | None = None,
) -> types.Status:
    """Return the status of a cluster.

    :param other_plan_note: sentence about a plan that runs instead of the plan from the inventory, for example after a rollback.
    :param balancer: status of the cluster's server according to the balancer; None without a balancer.
    """
    head = plan.head.host if plan else next(iter(heads), None)
    hosts = tuple(_host_status(host, host == head, plan, answer) for host, answer in answers.items())
    cluster = _cluster_status(name, plan, hosts, answers)._replace(balancer=balancer)
    problems = problems_of(cluster, hosts, refusal, other_plan_note)
    return types.Status(types.SCHEMA, int(time.time()), cluster, hosts, refusal, other_plan_note, problems)
