# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""How a cluster is: from its plan and what host_status returned on its hosts, to values, a table and JSON. Reads and changes nothing."""

from __future__ import annotations

import textwrap
import time
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from ansible_collections.llamacpp.cluster.plugins.module_utils.common import names, typed_json, units
from ansible_collections.llamacpp.cluster.plugins.module_utils.facts.resources import Resources
from ansible_collections.llamacpp.cluster.plugins.module_utils.host.drift import fallback
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan import plan_text
from ansible_collections.llamacpp.cluster.plugins.module_utils.status import metrics
from ansible_collections.llamacpp.cluster.plugins.module_utils.verify import loading, verification

SCHEMA = 1
HARMLESS = ("unneeded",)
"""Kinds of differences that leave a cluster healthy: what could be removed."""
UP = ("running", "waiting")
"""States of a service whose process runs as planned."""
LAST_RESTARTS = 3
"""That the table shows; the JSON has all that the launcher keeps."""
SHOWN_DIFFERENCES = 6
"""Of each host in the table; the JSON has all."""
SERVING = ("serving", fallback.ASLEEP, "fallback")
STATES = {
    "silent": "does not answer as a server",
    "starting": "is started again",
    "fallback": "serves on a fallback",
    fallback.ASLEEP: "asleep (a request wakes it)",
}
"""States of a cluster that the table says in other words."""


class Worker(NamedTuple):
    """One worker of a host; ``device``, ``protocol`` and ``used`` are of the plan, null where there is none."""

    service: str
    endpoint: str | None
    device: str | None
    protocol: str | None
    used: bool | None
    state: str
    uptime_s: int | None
    restarts: int | None
    clients: list[str]


class Host(NamedTuple):
    name: str
    is_head: bool
    said: str
    """Why nothing is known of it; empty where it answered."""
    reachable: bool
    installed: bool
    """Whether a service of the collection is defined there."""
    workers: list[Worker]
    resources: Resources | None
    differences: list[dict] | None
    """From its part of the plan, as common.differences defines them; None where it was not compared."""
    unused: list[dict] | None = None
    """What nothing uses there, as apply.unused.FORM says; None where that was not looked for."""


class Restart(NamedTuple):
    age_s: int
    text: str


class Verification(NamedTuple):
    age_s: int
    passed: bool
    failed: list[str]
    release: str


class Speed(NamedTuple):
    """Averages over the time in which llama-server computed, since its start."""

    generation_tokens_per_s: float | None
    prompt_tokens_per_s: float | None
    generated_tokens: int
    prompt_tokens: int


class Release(NamedTuple):
    ref: str
    build: int | None
    protocol: str | None


class Cluster(NamedTuple):
    name: str
    state: str
    detail: str
    """What the server or its launcher says of a state that is not «serving»."""
    head: str | None
    url: str | None
    model: str | None
    planned: Release | None
    running_builds: list[str]
    """Ids of the builds whose programs run, on any host that was compared."""
    as_planned: bool | None
    """Whether all hosts are as the inventory plans; None where that is not known."""
    uptime_s: int | None
    restarts: int | None
    last_restarts: list[Restart]
    without: list[str]
    waiting_for: list[str]
    load: loading.Progress | None
    """How far the model is loaded, while it is."""
    verified: Verification | None
    benchmark: str | None
    """Id of the last one that the head keeps."""
    speed: Speed | None
    speed_reason: str
    """Why there is no speed."""


class Status(NamedTuple):
    schema: int
    time: int
    cluster: Cluster
    hosts: list[Host]
    unplanned: str
    """Why there is no plan; empty where there is one."""
    other: str
    """What serves in place of what the inventory plans; empty where that is the same."""
    problems: list[str]
    """Why the cluster is not healthy, each without a full stop."""


# --------------------------------------------------------------------------------------------------------------- values


def _workers(planned: Mapping[str, Any] | None, drift: Mapping[str, Any] | None, condition: dict) -> Iterator[Worker]:
    restarts, uptimes = condition["restarts"], condition["uptimes_s"]
    services = {service["name"]: service for service in planned["services"]} if planned else {}
    endpoints = {worker["endpoint"]: worker for worker in planned["workers"]} if planned else {}
    by_port = {worker["listens"]: worker for worker in endpoints.values()}
    for name, service in services.items():
        found = (drift or {"services": {}})["services"].get(name)
        if service["kind"] == "worker" and found:
            worker = by_port[service["listens"]]
            clients = [str(client) for client in found["clients"]]
            yield Worker(
                name,
                worker["endpoint"],
                f"{worker['backend']} {worker['device']}",
                worker["protocol"],
                worker["used"],
                found["state"],
                uptimes.get(name),
                restarts.get(name),
                clients,
            )
    for name, state in condition["service_states"].items():
        if name not in services and not names.is_head(name):
            yield Worker(name, None, None, None, None, state, None, restarts.get(name), [])


def _host(name: str, is_head: bool, plan: Mapping[str, Any] | None, answer: dict, drift: dict | None) -> Host:
    condition, said = answer.get("condition"), str(answer.get("msg") or "")
    if not condition:
        reachable = bool(answer) and not answer.get("unreachable")
        return Host(name, is_head, said or "it was not asked", reachable, False, [], None, None)
    planned = plan["hosts"][name] if plan else None
    workers = list(_workers(planned, drift, condition))
    installed = bool(condition["service_states"])
    differences = drift["differences"] if drift else None
    resources = typed_json.parse(Resources, condition["resources"])
    return Host(name, is_head, "", True, installed, workers, resources, differences, condition.get("unused"))


def _serving(planned: str | None, defined: str | None, head: dict) -> tuple[str, str]:
    """State and detail of the cluster, from what its head reports.

    :param planned: state of the head's service as state.service_state knows it; None where there is no plan.
    :param defined: its state as the service manager knows it; None where it has no definition.
    """
    told, health = head.get("serving") if head.get("current") else None, head.get("health")
    ended = (head.get("ends") or {}).get("how") or ""
    if health and health["healthy"]:
        return (told["state"] if told and told["state"] in SERVING else "serving"), ""
    if defined is None and planned not in UP:
        return "not installed", ""
    if defined in ("stopped", "failed") and planned not in UP:
        return defined, f"llama-server ended {ended}" if ended else ""
    if told and told["state"] in ("waiting", "loading"):
        waits = ", ".join(told["waiting_for"])
        return told["state"], f"it waits for {waits}" if waits else ""
    if planned == "waiting":
        return "waiting", "; ".join(head.get("waits_for") or [])
    if planned == "stopped":
        return "starting", f"llama-server ended {ended}" if ended else ""
    if health:
        return ("loading", "") if health["said"] == verification.LOADING else ("silent", health["said"])
    return (told["state"] if told else "running"), ""


def _verified(head: dict, now: int) -> Verification | None:
    found = head.get("verified")
    return found and Verification(max(0, now - found["time"]), found["passed"], list(found["failed"]), found["release"])


def _restarts(head: dict, now: int) -> tuple[int, list[Restart]]:
    """How often llama-server was started again, and the last reasons, the newest first."""
    told, ends = head.get("serving"), head["ends"]
    if told:
        last = [Restart(max(0, now - entry["time"]), entry["text"]) for entry in told["last"]]
        return told["restarts"], last[::-1]
    return ends["number"], []


def _load(plan: Mapping[str, Any] | None, told: Mapping[str, Any]) -> loading.Progress | None:
    load = told.get("load")
    return loading.progress_of(load, loading.expected_of(plan or {"head": {}})) if load else None


def _speed(head: dict, argv: list[str]) -> tuple[Speed | None, str]:
    if metrics.OPTION not in argv:
        return None, f"llama-server counts its tokens with llama_server_extra_args: [{metrics.OPTION}]"
    counted = head.get("metrics")
    if not counted:
        return None, "llama-server did not report its counters"
    rates = [
        round(counted[number] / counted[seconds], 2) if counted[seconds] >= loading.LEAST_SECONDS else None
        for number, seconds in (("generated_tokens", "generation_s"), ("prompt_tokens", "prompt_s"))
    ]
    generated, read = int(counted["generated_tokens"]), int(counted["prompt_tokens"])
    return Speed(rates[0], rates[1], generated, read), ""


def _release(plan: Mapping[str, Any]) -> Release:
    release = plan["release"]
    return Release(release["ref"], release["build"] or release["generation"], release["protocol"])


def _service_of_head(plan: Mapping[str, Any] | None, host: str | None, condition: dict) -> str | None:
    if plan and host:
        return next(service["name"] for service in plan["hosts"][host]["services"] if service["kind"] == "head")
    return next((name for name in condition["service_states"] if names.is_head(name)), None)


def _cluster(name: str, plan: Mapping[str, Any] | None, hosts: list[Host], answer: dict, drifts: Mapping) -> Cluster:
    """:param answer: of the head."""
    host = next((host.name for host in hosts if host.is_head), None)
    differ = [host.differences for host in hosts]
    as_planned: bool | None = not any(map(_serious, differ)) if plan else None
    if as_planned and any(differences is None for differences in differ):
        as_planned = None
    cluster = Cluster(
        name=name,
        state="unknown",
        detail="",
        head=host,
        url=plan["head"]["url"] if plan else None,
        model=plan["model"]["name"] if plan else None,
        planned=_release(plan) if plan else None,
        running_builds=sorted({build for drift in drifts.values() for build in drift["running_releases"]}),
        as_planned=as_planned,
        uptime_s=None,
        restarts=None,
        last_restarts=[],
        without=[],
        waiting_for=[],
        load=None,
        verified=None,
        benchmark=None,
        speed=None,
        speed_reason="",
    )
    condition = answer.get("condition")
    if not condition:
        return cluster
    service = _service_of_head(plan, host, condition)
    return _with_head(cluster, service, plan, condition, drifts.get(host or "", {"services": {}}))


def _with_head(
    cluster: Cluster, service: str | None, plan: Mapping[str, Any] | None, condition: dict, drift: Mapping[str, Any]
) -> Cluster:
    """The cluster with what its head reports.

    :param service: of llama-server.
    """
    head, now = condition["head"] or {"ends": {"number": 0, "how": "", "log": []}}, condition["now"]
    found = drift["services"].get(service)
    state, detail = _serving(found and found["state"], condition["service_states"].get(service), head)
    told = head.get("serving") if head.get("current") else None
    restarts, last = _restarts(head, now)
    speed, reason = _speed(head, plan["head"]["argv"]) if plan and state in SERVING else (None, "")
    return cluster._replace(
        state=state,
        detail=detail,
        uptime_s=condition["uptimes_s"].get(service),
        restarts=restarts,
        last_restarts=last,
        without=list(told["without"]) if told and state == "fallback" else [],
        waiting_for=list(told["waiting_for"]) if told else [],
        load=_load(plan, told) if told and state == "loading" else None,
        verified=_verified(head, now),
        benchmark=head.get("benchmark"),
        speed=speed,
        speed_reason=reason,
    )


def _serious(differences: list[dict] | None) -> list[dict]:
    return [entry for entry in differences or [] if entry["kind"] not in HARMLESS]


# -------------------------------------------------------------------------------------------------------------- judgement


def _problems_of_host(host: Host) -> Iterator[str]:
    if host.said:
        yield f"{host.name} {'could not be examined' if host.reachable else 'does not answer'}: {host.said}"
        return
    for worker in host.workers:
        if worker.state not in UP:
            yield f"{worker.service} on {host.name} is {worker.state}"
    others = [entry for entry in _serious(host.differences) if entry["kind"] != "service"]
    if others:
        kinds = ", ".join(dict.fromkeys(entry["kind"] for entry in others))
        yield f"{host.name} differs from the plan in {len(others)} point{'s' * (len(others) > 1)} ({kinds})"


def _problems(cluster: Cluster, hosts: list[Host], unplanned: str) -> list[str]:
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
    return [problem.rstrip(".") for problem in problems]


def of_cluster(
    name: str,
    heads: list[str],
    plan: Mapping[str, Any] | None,
    unplanned: str,
    answers: Mapping[str, dict],
    drifts: Mapping[str, dict],
    other: str | None = None,
) -> Status:
    """
    :param heads: hosts of the group llama_head.
    :param plan: complete; None where there is none, and ``unplanned`` says why.
    :param answers: host → what host_status returned, in the form CONDITION, or ``{"msg", "unreachable"}``. Every host of the cluster is in it.
    :param drifts: host → drift of those that were compared with the plan.
    :param other: a sentence where the cluster runs another plan than the inventory's, as after a rollback.
    """
    head = plan["head"]["host"] if plan else next(iter(heads), None)
    hosts = [_host(host, host == head, plan, answer, drifts.get(host)) for host, answer in answers.items()]
    cluster = _cluster(name, plan, hosts, answers.get(head or "", {}), drifts)
    problems = _problems(cluster, hosts, unplanned) + ([other.rstrip(".")] if other else [])
    return Status(SCHEMA, int(time.time()), cluster, hosts, unplanned, other or "", problems)


def as_json(value: Any) -> Any:
    """A status as JSON has it: named values become mappings."""
    if hasattr(value, "_asdict"):
        return {name: as_json(part) for name, part in value._asdict().items()}
    return [as_json(part) for part in value] if isinstance(value, (list, tuple)) else value


# ------------------------------------------------------------------------------------------------------------------ table

LABEL, LONGEST_NAME = 10, 24
"""Columns of the names on the left, and of names in tables: longer ones end in an ellipsis."""


def _gib(mib: int | None) -> str:
    return "" if mib is None else f"{mib / 1024:.1f}"


def _of(free: int | None, total: int | None) -> str:
    if free is None:
        return f"? of {_gib(total)}" if total is not None else ""
    return f"{_gib(free)} of {_gib(total)}" if total is not None else _gib(free)


def _short(text: str, longest: int = LONGEST_NAME) -> str:
    return text if len(text) <= longest else text[: longest - 1] + "…"


def _row(start: str, text: str) -> list[str]:
    """A name and a text, which goes on below itself."""
    return textwrap.wrap(
        text,
        plan_text.WIDTH,
        initial_indent=f"  {start.ljust(LABEL)}",
        subsequent_indent=" " * (LABEL + 2),
        break_on_hyphens=False,
    ) or [f"  {start}"]


def _cluster_lines(status: Status) -> list[str]:
    cluster = status.cluster
    since = f" for {units.duration(cluster.uptime_s)}" if cluster.uptime_s is not None else ""
    without = f" without {', '.join(cluster.without)}" * bool(cluster.without)
    lines = [*_row("state", f"{STATES.get(cluster.state, cluster.state)}{without}{since}")]
    if cluster.load:
        lines += _row("loaded", loading.sentence(cluster.load))
    if cluster.url:
        lines += [
            *_row("url", cluster.url),
            *_row("model", cluster.model or ""),
            *_row("release", _release_text(cluster)),
        ]
    if cluster.verified:
        verified = cluster.verified
        result = "passed" if verified.passed else "failed"
        lines += _row("verified", f"{units.duration(verified.age_s)} ago with {verified.release}, {result}")
    elif cluster.state not in ("unknown", "not installed"):
        lines += _row("verified", "never, as far as the head knows")
    if cluster.benchmark:
        lines += _row("benchmark", f"{cluster.benchmark} is the last one")
    if cluster.restarts:
        lines += _row("restarts", f"{cluster.restarts} of llama-server")
        for restart in cluster.last_restarts[:LAST_RESTARTS]:
            lines += _row("", f"{units.duration(restart.age_s)} ago: {restart.text}")
    return lines + _speed_lines(cluster)


def _release_text(cluster: Cluster) -> str:
    planned = cluster.planned
    if not planned:
        return ""
    build = f"build {planned.build}, " if planned.build else ""
    text = f"{planned.ref} ({build}RPC protocol {planned.protocol or 'unknown'})"
    judged = {
        True: "all hosts are as planned",
        False: "not all hosts are as planned",
        None: "not all hosts were compared",
    }
    runs = f"; runs {', '.join(cluster.running_builds)}" * bool(cluster.running_builds)
    return f"{text}, {judged[cluster.as_planned]}{runs}"


def _speed_lines(cluster: Cluster) -> list[str]:
    speed = cluster.speed
    if not speed:
        return _row("speed", f"unknown: {cluster.speed_reason}") if cluster.speed_reason else []
    rates = [(speed.generation_tokens_per_s, "generation"), (speed.prompt_tokens_per_s, "prompts")]
    shown = [f"{rate:g} tokens/s in {what}" for rate, what in rates if rate is not None]
    since = "since the server's start"
    if not shown:
        return _row("speed", f"no request that ended {since}")
    counted = f"{speed.generated_tokens} generated, {speed.prompt_tokens} read"
    return _row("speed", f"{', '.join(shown)} {since} ({counted})")


def _host_rows(host: Host) -> Iterator[list[str]]:
    role = " (head)" * host.is_head
    name = _short(host.name, LONGEST_NAME - len(role)) + role
    resources = host.resources
    if resources is None:
        yield [name, "", "", "", "could not be examined" if host.reachable else "does not answer"]
        return
    disk = min((disk.free_mib for disk in resources.disks if disk.free_mib is not None), default=None)
    differences = len(_serious(host.differences))
    plan = "not compared" if host.differences is None else f"differs ({differences})" if differences else "as planned"
    yield [
        name,
        _of(resources.memory_free_mib, resources.memory_total_mib),
        _gib(disk),
        units.duration(resources.uptime_s),
        plan if host.installed else "not installed",
    ]
    for device in resources.devices:
        yield [f"  {_short(device.name, LONGEST_NAME - 2)}", _of(device.free_mib, device.total_mib), "", "", ""]
        shared = _of(device.shared_free_mib, device.shared_total_mib)
        if shared:
            yield ["    of the host's (GTT)", shared, "", "", ""]


def _worker_rows(host: Host) -> Iterator[list[str]]:
    for worker in host.workers:
        state = worker.state + ", not used" * (worker.used is False)
        restarts = f", {worker.restarts} restarts" if worker.restarts else ""
        device = " ".join(filter(None, (worker.device, worker.protocol)))
        clients = ", ".join(worker.clients)
        yield [
            worker.endpoint or _short(worker.service),
            _short(host.name, 16),
            _short(device),
            units.duration(worker.uptime_s),
            _short(clients, 16),
            state + restarts,
        ]


def _difference_lines(host: Host) -> Iterator[str]:
    serious = _serious(host.differences) if host.installed else []
    for entry in serious[:SHOWN_DIFFERENCES]:
        yield from _row("", f"{host.name}: {entry['text']}")
    if len(serious) > SHOWN_DIFFERENCES:
        yield from _row("", f"{host.name}: and {len(serious) - SHOWN_DIFFERENCES} more")


def _unused_lines(hosts: list[Host]) -> Iterator[str]:
    """A line for each host that has something on its disk which nothing uses."""
    for host in hosts:
        by_kind: dict[str, list[dict]] = {}
        for entry in host.unused or ():
            by_kind.setdefault(entry["kind"], []).append(entry)
        texts = [
            f"{units.amount(sum(entry['bytes'] for entry in entries))} of {kind} ({len(entries)}, the newest unused for "
            f"{units.duration(min(entry['age_s'] for entry in entries))})"
            for kind, entries in by_kind.items()
        ]
        if texts:
            yield from _row("unused", f"{host.name}: {', '.join(texts)}")
    if any(host.unused for host in hosts):
        yield from _row("", "playbooks/clean.yml removes what llama_clean names")


def page(status: Status) -> str:
    """The status for a person, at most plan_text.WIDTH columns wide where names allow."""
    hosts = [row for host in status.hosts for row in _host_rows(host)]
    workers = [row for host in status.hosts for row in _worker_rows(host)]
    notes = [line for host in status.hosts for line in _difference_lines(host)]
    notes += _unused_lines(status.hosts)
    health = "healthy" if not status.problems else "NOT HEALTHY"
    lines = ["", f"  {status.cluster.name}  {health}"]
    lines += [line for problem in status.problems for line in _row("problem", problem)]
    lines += [*_cluster_lines(status), ""]
    lines += plan_text.table([["host", "memory free, GiB", "disk free, GiB", "up", "plan"], *hosts]).splitlines()
    if workers:
        head = ["worker", "host", "device, protocol", "up", "client", "state"]
        lines += ["", *plan_text.table([head, *workers]).splitlines()]
    return "\n".join([*lines, *([""] if notes else []), *notes, ""])
