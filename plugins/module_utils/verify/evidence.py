# Copyright (c) 2026 the llamacpp.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Collects evidence on the head: server, workers, links, and differences of the head from its part of the plan."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any
from urllib.parse import quote

from ansible_collections.llamacpp.cluster.plugins.module_utils.common import names, reading, typed_json
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.files import text_of
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.validation import printable
from ansible_collections.llamacpp.cluster.plugins.module_utils.facts import host as host_facts
from ansible_collections.llamacpp.cluster.plugins.module_utils.host import cluster_lock
from ansible_collections.llamacpp.cluster.plugins.module_utils.host.drift import processes, serving_record, state
from ansible_collections.llamacpp.cluster.plugins.module_utils.launcher import journal, progress, runtime, server
from ansible_collections.llamacpp.cluster.plugins.module_utils.launcher.serving import ASLEEP, LOADING
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp import replies, rpc
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp.rpc import Handshake
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.host_types import HostPlan
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.types import ServedModel
from ansible_collections.llamacpp.cluster.plugins.module_utils.proof import run
from ansible_collections.llamacpp.cluster.plugins.module_utils.verify import server_client, speech, start_log, types
from ansible_collections.llamacpp.cluster.plugins.module_utils.verify.server_client import Client

MAX_RECORD_BYTES = 1024 * 1024
"""Maximum size of a record."""
MAX_LINE_LENGTH = 500
"""Maximum length of a log line."""
PROMPT = "The first three prime numbers are"
MAX_TOKENS, MAX_KNOWN_ANSWER_TOKENS = 16, 64
"""Maximum tokens of an answer, and of the known answer, which may be endless if it is incorrect."""
ANSWER_TIMEOUT_SECONDS, ABSENCE_TIMEOUT_SECONDS = 300, 60
"""Time limit of an answer, normally and while a host of the cluster is absent: a frozen worker blocks the head."""
LIST_TIMEOUT_SECONDS = 5.0
MIN_LOAD_TIMEOUT_SECONDS = 1.0
"""Shortest time to wait for one of several models."""
PROBE_TIMEOUT_SECONDS = 3.0
"""Time to wait for the chat page, or for a worker whose absence may explain a failed model."""


def collect(subject: types.Subject, seconds: float, wake: bool) -> types.Evidence:
    """Return the evidence on this head.

    :param seconds: time to wait for the server.
    """
    head, host = subject.head, subject.hosts[subject.head.host]
    folder = Path(host.state)
    find_processes = partial(processes.account_processes, host.prefix, host.account)
    client = Client(head, find_processes)
    health, argv_by_pid = client.wait_for_health(seconds), find_processes()
    launcher_pids = [pid for pid, argv in argv_by_pid.items() if argv == [*head.launcher, "--", *head.argv]]
    record = serving_record.launcher_record(folder, launcher_pids)
    model, is_asleep = subject.named_model, bool(record and record.state == ASLEEP)
    if model:
        loaded_names = (
            {entry.name for entry in client.models(LIST_TIMEOUT_SECONDS) if entry.state == "loaded"} if not wake else ()
        )
        is_asleep = not (wake or model.name in loaded_names)
    elif health.healthy and is_asleep:
        health = types.Health(
            True, "ok; the server was asleep until this check woke it" if wake else "ok; the server is asleep"
        )
    can_ask = health.healthy and (wake or not is_asleep)
    if model and can_ask:  # this request loads the model
        reply = client.ask(f"/props?model={quote(model.name, safe='')}", max(seconds, MIN_LOAD_TIMEOUT_SECONDS))
        if reply.text.startswith(replies.TIMEOUT_TEXT):
            health, can_ask = types.Health(False, server_client.LOADING), False
    completion = _ask_question(client, subject) if can_ask else None
    log, links = _start_log(folder, model), host_facts.link_measurements(host.prefix)
    reading_record = typed_json.read_file(types.ReadingRecord, Path(host.prefix, names.READINGS_FILE), MAX_RECORD_BYTES)
    evidence = types.Evidence(
        health=health,
        exits=read_exits(folder / runtime.EXITS_FILE),
        log=_printable_lines(runtime.last_lines(log)),
        handshakes=read_handshakes(folder / runtime.HANDSHAKES_FILE, launcher_pids),
        links={
            name: typed_json.parse(types.LinkMeasurement, links[name]) if name in links else None
            for name in subject.links
        },
        fallback=_served_fallback(host, argv_by_pid),
        lock=cluster_lock.read_holder(Path(host.prefix)),
        verdicts=run.read_record(Path(host.prefix, names.PROOFS_FILE)).verdicts,
        readings=reading_record.readings if reading_record else (),
    )
    host_names = {worker.endpoint: name for name, host_plan in subject.hosts.items() for worker in host_plan.workers}
    host_names.update({worker.endpoint: worker.host for worker in subject.external_workers})
    if not health.healthy:
        load = record.load if record and record.state == LOADING else None
        return evidence._replace(waits_for=wait_reasons(evidence.handshakes.workers, host_names), load=load)
    if completion and completion.error:
        endpoints = {device.endpoint for device in subject.placement if device.endpoint}
        new_handshakes = _probe_missing_workers(endpoints, evidence.handshakes.workers)
        workers = {**evidence.handshakes.workers, **new_handshakes}
        evidence = evidence._replace(
            handshakes=evidence.handshakes._replace(workers=workers),
            waits_for=wait_reasons(new_handshakes, host_names, "the model needs"),
        )
    first_load_log = log.partition(server.SLEEP_LINE)[0]
    return evidence._replace(
        server=types.ServerEvidence(
            start_log.parse_buffers(first_load_log),
            _count_rdma_connections(subject, host),
            completion,
            _take_reading(client, subject) if completion and not completion.error else None,
            client.has_page(PROBE_TIMEOUT_SECONDS),
            client.certificate_names() if head.tls_certificate_file else (),
        ),
        drift=state.compare_host(host),
    )


def _take_reading(client: Client, subject: types.Subject) -> types.TextReading | None:
    """Return how well the model reads plain text; None if it generates none."""
    model, reading_id = subject.named_model, (subject.named_model or subject.head).reading
    return speech.take_reading(client.ask, reading_id, model and model.name) if reading_id else None


def _count_rdma_connections(subject: types.Subject, host: HostPlan) -> int:
    """Return the number of RDMA connections of the llama-server that answers. Each of several models has its own process."""
    model = subject.named_model
    option = (server.ALIAS_OPTION, model.name) if model else (server.PORT_OPTION, str(subject.head.port))
    return sum(
        progress.count_rdma_connections(pid)
        for pid, argv in processes.account_processes(host.prefix, host.account).items()
        if os.path.basename(argv[0]) == "llama-server" and option in zip(argv, argv[1:])
    )


def _start_log(folder: Path, model: ServedModel | None) -> str:
    """Return the log of the server's start, or of the last load of one of several models."""
    path = server.model_log_path(folder, model.name) if model else folder / journal.START_LOG_FILE
    try:
        return reading.read_start(path, journal.MAX_START_LOG_BYTES).decode("utf-8", "replace")
    except OSError:
        return ""


def _printable_lines(lines: Sequence[str]) -> tuple[str, ...]:
    return tuple(printable(line, MAX_LINE_LENGTH) for line in lines[: runtime.MAX_LAST_LINES + runtime.MAX_ERROR_LINES])


def read_exits(path: Path) -> types.Exits:
    """Return the exits of llama-server that the launcher recorded."""
    try:
        record = reading.read_object(path, MAX_RECORD_BYTES)
        last_exit, log = printable(record["how"]), _printable_lines(record["log"])
        return typed_json.parse(types.Exits, {"total": record["number"], "last_exit": last_exit, "log": log})
    except (OSError, ValueError, KeyError, TypeError):
        return types.Exits(0, "", ())


def read_handshakes(path: Path, launcher_pids: Collection[int] = ()) -> types.Handshakes:
    """Return the handshakes that the launcher recorded.

    :param launcher_pids: processes of the launcher, if known. A record by another process is outdated.
    """
    try:
        record = typed_json.parse(types.RecordedHandshakes, reading.read_object(path, MAX_RECORD_BYTES))
    except (OSError, ValueError) as error:
        return types.Handshakes({}, f"{path} cannot be used: {printable(error)}")
    if launcher_pids and record.process not in launcher_pids:
        return types.Handshakes(
            {}, f"{path} is from an earlier start of the server: check whether the disk is full or read-only"
        )
    return types.Handshakes(record.workers)


def _probe_missing_workers(endpoints: Collection[str], workers: Mapping[str, Handshake]) -> dict[str, Handshake]:
    """Return new handshakes with a model's unconnected workers: the router is healthy without them, and its answer does not name them."""
    connected_endpoints = server.connected_endpoints(
        progress.parse_tcp_table(text_of(progress.TCP_TABLE_FILE)), [*endpoints]
    )
    return {
        endpoint: rpc.probe(*rpc.parse_endpoint(endpoint), PROBE_TIMEOUT_SECONDS, workers[endpoint].protocol)
        for endpoint in sorted({*endpoints} - connected_endpoints)
        if endpoint in workers
    }


def wait_reasons(
    workers: Mapping[str, Handshake], hosts: Mapping[str, str] = MappingProxyType({}), intro: str = "the head waits for"
) -> tuple[str, ...]:
    """Return a sentence about each worker for which the head's launcher waits, or that a model needs.

    :param hosts: endpoint → host, if known.
    """
    owner_texts = {endpoint: f"{host}'s " for endpoint, host in hosts.items()}
    return tuple(
        f"{intro} {owner_texts.get(endpoint, '')}worker {endpoint}: {handshake.state}, {handshake.detail}"
        for endpoint, handshake in sorted(workers.items())
        if handshake.state != "ok"
    )


def _served_fallback(host: HostPlan, argv_by_pid: dict[int, list[str]]) -> types.ServedFallback | None:
    for service in host.services:
        fallback = state.served_fallback(service, argv_by_pid)
        if fallback:
            return types.ServedFallback(fallback[0], int(processes.start_time(fallback[1]) or 0))
    return None


def _ask_question(client: Client, subject: types.Subject) -> types.Completion:
    model = subject.named_model
    question: dict[str, Any] = {"prompt": "", "temperature": 0, "max_tokens": MAX_KNOWN_ANSWER_TOKENS, "n_probs": 1}
    if not subject.has_known_answer:
        question.update(prompt=PROMPT, max_tokens=MAX_TOKENS)
    argv = (model or subject.head).argv
    path = replies.pooling_path(argv)
    if path:
        question = replies.pooling_request(PROMPT)
    if model:
        question["model"] = model.name
    may_sleep = server.SLEEP_OPTION in argv
    timeout_s = (ABSENCE_TIMEOUT_SECONDS if subject.unreachable_hosts else ANSWER_TIMEOUT_SECONDS) + (
        subject.head.start_timeout if may_sleep else 0
    )
    return server_client.parse_completion(client.ask(path or "/v1/completions", timeout_s, question), bool(path))
