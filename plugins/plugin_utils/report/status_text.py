# Copyright (c) 2026 the llamacpp.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""A status as text for the terminal."""

import textwrap
from collections.abc import Iterator

from ansible_collections.llamacpp.cluster.plugins.module_utils.common import units
from ansible_collections.llamacpp.cluster.plugins.module_utils.launcher import loading, serving
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan import tables
from ansible_collections.llamacpp.cluster.plugins.module_utils.status import cluster_status, types

MAX_RESTARTS = 3
"""Maximum number of restarts to show; the JSON has all recorded restarts."""
MAX_DIFFERENCES = 6
"""Maximum number of differences to show for each host; the JSON has all."""
STATE_TEXTS = {**serving.STATE_TEXTS, "starting": "is restarting"}
"""Texts for states of a cluster."""
LABEL_WIDTH, MAX_NAME_WIDTH = 10, 24
"""Width of the labels on the left, and of names in tables: longer names end in an ellipsis."""


def _gib(mib: int | None) -> str:
    return "" if mib is None else f"{mib / 1024:.1f}"


def _free_memory_text(free_mib: int | None, total_mib: int | None) -> str:
    if free_mib is None:
        return f"? of {_gib(total_mib)}" if total_mib is not None else ""
    return f"{_gib(free_mib)} of {_gib(total_mib)}" if total_mib is not None else _gib(free_mib)


def _shorten(text: str, max_width: int = MAX_NAME_WIDTH) -> str:
    return text if len(text) <= max_width else text[: max_width - 1] + "…"


def _labelled_lines(label: str, text: str) -> list[str]:
    """Return lines with a label and a text; continuation lines are indented."""
    return textwrap.wrap(
        text,
        tables.MAX_LINE_LENGTH,
        initial_indent=f"  {label.ljust(LABEL_WIDTH)}",
        subsequent_indent=" " * (LABEL_WIDTH + 2),
        break_on_hyphens=False,
    ) or [f"  {label}"]


def _cluster_lines(status: types.Status) -> list[str]:
    cluster = status.cluster
    state_seconds = cluster.uptime_s if cluster.asleep_s is None else cluster.asleep_s
    duration_text = f" for {units.duration_text(state_seconds)}" if state_seconds is not None else ""
    absence_text = f" without {', '.join(cluster.without)}" * bool(cluster.without)
    lines = [*_labelled_lines("state", f"{STATE_TEXTS.get(cluster.state, cluster.state)}{absence_text}{duration_text}")]
    if cluster.load:
        lines += _labelled_lines("loaded", loading.progress_sentence(cluster.load))
    if cluster.url:
        models_text = ", ".join(f"{model.name} {model.state}" for model in cluster.models)
        lines += [
            *_labelled_lines("url", cluster.url),
            *(_labelled_lines("models", models_text) if models_text else _labelled_lines("model", cluster.model or "")),
            *_labelled_lines("release", _release_text(cluster)),
        ]
    if cluster.balancer is not None:
        lines += _labelled_lines("balancer", cluster.balancer)
    if cluster.verified:
        verification = cluster.verified
        result_text = (
            "passed" if verification.passed else "failed"
        ) + ", but the model was asleep and was not tested" * verification.asleep
        lines += _labelled_lines(
            "verified", f"{units.duration_text(verification.age_s)} ago with {verification.release}, {result_text}"
        )
    elif cluster.state not in ("unknown", "not installed"):
        lines += _labelled_lines("verified", "never: the head has no record")
    if cluster.restarts or (cluster.models and cluster.last_restarts):
        lines += _labelled_lines("restarts", f"llama-server: {cluster.restarts}")
        for restart in cluster.last_restarts[:MAX_RESTARTS]:
            lines += _labelled_lines("", f"{units.duration_text(restart.age_s)} ago: {restart.text}")
    return lines


def _release_text(cluster: types.ClusterStatus) -> str:
    planned_release = cluster.planned
    if not planned_release:
        return ""
    build_text = f"build {planned_release.build}, " if planned_release.build else ""
    text = f"{planned_release.ref} ({build_text}RPC protocol {planned_release.protocol or 'unknown'})"
    comparison_texts = {
        True: "all hosts match the plan",
        False: "not all hosts match the plan",
        None: "not all hosts were compared",
    }
    running_text = f"; running: {', '.join(cluster.running_builds)}" * bool(cluster.running_builds)
    return f"{text}, {comparison_texts[cluster.as_planned]}{running_text}"


def _host_rows(host: types.HostStatus) -> Iterator[list[str]]:
    head_mark = " (head)" * host.is_head
    name = _shorten(host.name, MAX_NAME_WIDTH - len(head_mark)) + head_mark
    if host.resources is None:
        yield [name, "", "", "", "could not be examined" if host.reachable else "does not answer"]
        return
    resources = host.resources
    disk_mib = min((disk.free_mib for disk in resources.disks if disk.free_mib is not None), default=None)
    count = len(cluster_status.serious_differences(host))
    plan_state = "not compared" if host.differences is None else f"differs ({count})" if count else "as planned"
    yield [
        name,
        _free_memory_text(resources.memory_free_mib, resources.memory_total_mib),
        _gib(disk_mib),
        units.duration_text(resources.uptime_s),
        plan_state if host.installed else "not installed",
    ]
    for device in resources.devices:
        name = f"  {_shorten(device.name, MAX_NAME_WIDTH - 2)}"
        yield [name, _free_memory_text(device.free_mib, device.total_mib), "", "", ""]
        shared_memory = _free_memory_text(device.shared_free_mib, device.shared_total_mib)
        if shared_memory:
            yield ["    host memory (GTT)", shared_memory, "", "", ""]


def _worker_rows(host: types.HostStatus) -> Iterator[list[str]]:
    for worker in host.workers:
        state_text = worker.state + ", not used" * (worker.used is False)
        restarts_text = f", {worker.restarts} restart{'s' * (worker.restarts > 1)}" if worker.restarts else ""
        device_text = " ".join(filter(None, (worker.device, worker.protocol)))
        clients_text = ", ".join(worker.clients)
        yield [
            worker.endpoint or _shorten(worker.service),
            _shorten(host.name, 16),
            _shorten(device_text),
            units.duration_text(worker.uptime_s),
            _shorten(clients_text, 16),
            state_text + restarts_text,
        ]


def _difference_lines(host: types.HostStatus) -> Iterator[str]:
    differences = cluster_status.serious_differences(host) if host.installed else []
    for difference in differences[:MAX_DIFFERENCES]:
        yield from _labelled_lines("", f"{host.name}: {difference.text}")
    if len(differences) > MAX_DIFFERENCES:
        yield from _labelled_lines("", f"{host.name}: and {len(differences) - MAX_DIFFERENCES} more")


def text_of(status: types.Status) -> str:
    """Return the status for a person, at most tables.MAX_LINE_LENGTH columns wide if names allow."""
    host_rows = [row for host in status.hosts for row in _host_rows(host)]
    worker_rows = [row for host in status.hosts for row in _worker_rows(host)]
    difference_lines = [line for host in status.hosts for line in _difference_lines(host)]
    health = "healthy" if not status.problems else "NOT HEALTHY"
    lines = ["", f"  {status.cluster.name}  {health}"]
    lines += [line for problem in status.problems for line in _labelled_lines("problem", problem)]
    lines += [*_cluster_lines(status), ""]
    lines += tables.format_table(
        [["host", "memory free, GiB", "disk free, GiB", "up", "plan"], *host_rows]
    ).splitlines()
    if worker_rows:
        header = ["worker", "host", "device, protocol", "up", "client", "state"]
        lines += ["", *tables.format_table([header, *worker_rows]).splitlines()]
    return "\n".join([*lines, *([""] if difference_lines else []), *difference_lines, ""])
