# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""How a cluster is: from its plan and what host_status returned on its hosts. Reads and changes nothing."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from ansible_collections.llamacpp.cluster.plugins.module_utils.common import names
from ansible_collections.llamacpp.cluster.plugins.module_utils.launcher import loading
from ansible_collections.llamacpp.cluster.plugins.module_utils.launcher.serving import ASLEEP
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.drift import Difference, Drift
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.host_types import HostPlan
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.types import Plan
from ansible_collections.llamacpp.cluster.plugins.module_utils.status import types
from ansible_collections.llamacpp.cluster.plugins.module_utils.verify import server_client
from ansible_collections.llamacpp.cluster.plugins.module_utils.verify.loading import expected_of

HARMLESS = ("unneeded",)
"""Kinds of differences that leave a cluster healthy: what could be removed."""
UP = ("running", "waiting")
"""States of a service whose process runs as planned."""
SERVING = ("serving", ASLEEP, "fallback")


class Answer(NamedTuple):
    """What a host said when it was asked."""

    condition: types.Condition | None = None
    drift: Drift | None = None
    """From its part of the plan; None where it was not compared."""
    said: str = ""
    """Why there is no condition."""
    reachable: bool = True


def _workers(planned: HostPlan | None, answer: Answer, condition: types.Condition) -> Iterator[types.WorkerStatus]:
    workers = {names.service(f"worker-{worker.name}"): worker for worker in planned.workers} if planned else {}
    found = answer.drift.services if answer.drift else {}
    for name, worker in workers.items():
        if name in found:
            yield types.WorkerStatus(
                name,
                worker.endpoint,
                f"{worker.backend} {worker.device}",
                worker.protocol,
                worker.used,
                found[name].state,
                condition.uptimes_s.get(name),
                condition.restarts.get(name),
                found[name].clients,
            )
    for name, state in condition.service_states.items():
        if name not in workers and not names.is_head(name):
            yield types.WorkerStatus(
                name, None, None, None, None, state, None, condition.restarts.get(name), clients=()
            )


def _host(name: str, is_head: bool, plan: Plan | None, answer: Answer) -> types.HostStatus:
    condition = answer.condition
    return types.HostStatus(
        name=name,
        is_head=is_head,
        said=answer.said,
        reachable=answer.reachable,
        installed=bool(condition and condition.service_states),
        workers=tuple(_workers(plan.hosts[name] if plan else None, answer, condition)) if condition else (),
        resources=condition.resources if condition else None,
        differences=answer.drift.differences if answer.drift else None,
    )


def _state(planned: str | None, defined: str | None, head: types.HeadCondition) -> tuple[str, str]:
    """State and detail of the cluster, from what its head reports.

    :param planned: state of the head's service as state.service_state knows it; None where there is no plan.
    :param defined: its state as the service manager knows it; None where it has no definition.
    """
    serving, health = head.serving if head.current else None, head.health
    ended = f"llama-server ended {head.ends.how}" if head.ends.how else ""
    if health and health.healthy:
        return (serving.state if serving and serving.state in SERVING else "serving"), ""
    if defined is None and planned not in UP:
        return "not installed", ""
    if defined in ("stopped", "failed") and planned not in UP:
        return defined, ended if defined == "failed" else ""
    if serving and serving.state in ("waiting", "loading"):
        waits = ", ".join(serving.waiting_for)
        return serving.state, f"it waits for {waits}" if waits else ""
    if planned == "waiting":
        return "waiting", "; ".join(head.waits_for)
    if planned == "stopped":
        return "starting", ended
    if health:
        return ("loading", "") if health.detail == server_client.LOADING else ("silent", health.detail)
    return (serving.state if serving else "running"), ""


def _last_restarts(head: types.HeadCondition, now: int) -> tuple[types.RestartStatus, ...]:
    """The last reasons, the newest first."""
    last = head.serving.last if head.serving else ()
    return tuple(types.RestartStatus(max(0, now - event.time), event.text) for event in reversed(last))


def _as_planned(hosts: Sequence[types.HostStatus]) -> bool | None:
    """Whether all hosts are; None where one was not compared."""
    if any(serious(host) for host in hosts):
        return False
    return None if any(host.differences is None for host in hosts) else True


def _cluster(
    name: str, plan: Plan | None, hosts: Sequence[types.HostStatus], answers: Mapping[str, Answer]
) -> types.ClusterStatus:
    host = next((host.name for host in hosts if host.is_head), None)
    drifts = [answer.drift for answer in answers.values() if answer.drift]
    cluster = types.ClusterStatus(
        name=name,
        state="unknown",
        detail="",
        head=host,
        url=plan.head.url if plan else None,
        model=", ".join(one.name for one in plan.head.models or (plan.model,)) if plan else None,
        planned=types.ReleaseStatus(plan.release.ref, plan.release.build, plan.release.protocol) if plan else None,
        running_builds=tuple(sorted({build for drift in drifts for build in drift.running_releases})),
        as_planned=_as_planned(hosts) if plan else None,
    )
    answer = answers.get(host or "", Answer())
    condition, drift = answer.condition, answer.drift
    if not condition:
        return cluster
    service = plan.head.service if plan else next(filter(names.is_head, condition.service_states), "")
    head, now = condition.head or types.NOTHING_KNOWN, condition.now
    planned = drift.services.get(service) if drift else None
    state, detail = _state(planned and planned.state, condition.service_states.get(service), head)
    cluster = cluster._replace(
        state=state,
        detail=detail,
        uptime_s=condition.uptimes_s.get(service),
        restarts=head.serving.restarts if head.serving else head.ends.number,
        last_restarts=_last_restarts(head, now),
        verified=head.verified,
        models=head.models,
    )
    serving = head.serving if head.current else None
    if not serving:
        return cluster
    alone = plan and not plan.head.models and not serving.without
    return cluster._replace(
        asleep_s=max(0, now - serving.since) if state == ASLEEP else None,
        without=serving.without if state == "fallback" else (),
        waiting_for=serving.waiting_for,
        load=loading.progress_of(serving.load, expected_of(plan if alone else None)) if serving.load else None,
    )


def serious(host: types.HostStatus) -> list[Difference]:
    """What of a host's differences makes its cluster unhealthy."""
    return [entry for entry in host.differences or () if entry.kind not in HARMLESS]


def _problems_of_host(host: types.HostStatus) -> Iterator[str]:
    if host.said:
        yield f"{host.name} {'could not be examined' if host.reachable else 'does not answer'}: {host.said}"
        return
    for worker in host.workers:
        if worker.state not in UP:
            yield f"{worker.service} on {host.name} is {worker.state}"
    others = [entry for entry in serious(host) if entry.kind != "service"]
    if others:
        kinds = ", ".join(dict.fromkeys(entry.kind for entry in others))
        yield f"{host.name} differs from the plan in {len(others)} point{'s' * (len(others) > 1)} ({kinds})"


def problems_of(
    cluster: types.ClusterStatus, hosts: Sequence[types.HostStatus], unplanned: str = "", other: str = ""
) -> tuple[str, ...]:
    """Why a cluster is not healthy, each without a full stop."""
    problems = []
    bare = [host.name for host in hosts if not host.said and not host.installed]
    if cluster.state == "fallback":
        problems.append(f"it serves without {', '.join(cluster.without) or 'a worker'}")
    elif cluster.state == "unknown":
        problems.append("its head did not answer, so it is not known whether it serves")
    elif cluster.state not in SERVING:
        problems.append(f"it is {cluster.state}{f', {cluster.detail}' * bool(cluster.detail)}")
    if unplanned:
        problems.append(f"the inventory has no plan: {unplanned}")
    if bare and cluster.state != "not installed":
        problems.append(f"nothing is installed on {', '.join(bare)}")
    problems += [problem for host in hosts if host.name not in bare for problem in _problems_of_host(host)]
    if cluster.verified and not cluster.verified.passed:
        failed = "; ".join(cluster.verified.failed)
        problems.append(f"the last verification failed{f': {failed}' * bool(failed)}")
    return tuple(problem.rstrip(".") for problem in [*problems, *([other] if other else [])])


def of_cluster(
    name: str,
    heads: Sequence[str],
    plan: Plan | None,
    answers: Mapping[str, Answer],
    unplanned: str = "",
    other: str = "",
) -> types.Status:
    """
    :param heads: hosts of the group llama_head.
    :param plan: complete; None where there is none, and ``unplanned`` says why.
    :param answers: every host of the cluster → what it said.
    :param other: a sentence where the cluster runs another plan than the inventory's, as after a rollback.
    """
    head = plan.head.host if plan else next(iter(heads), None)
    hosts = tuple(_host(host, host == head, plan, answer) for host, answer in answers.items())
    cluster = _cluster(name, plan, hosts, answers)
    problems = problems_of(cluster, hosts, unplanned, other)
    return types.Status(types.SCHEMA, int(time.time()), cluster, hosts, unplanned, other, problems)
