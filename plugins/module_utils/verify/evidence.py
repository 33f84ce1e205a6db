# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What the head knows of the cluster, collected there: server, workers, links, and how the head differs from its part of the plan."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any
from urllib.parse import quote

from ansible_collections.llamacpp.cluster.plugins.module_utils.common import names, reading, typed_json
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.files import text_of
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.validation import printable
from ansible_collections.llamacpp.cluster.plugins.module_utils.facts import host as host_facts
from ansible_collections.llamacpp.cluster.plugins.module_utils.host import cluster_lock
from ansible_collections.llamacpp.cluster.plugins.module_utils.host.drift import (
    processes,
    serving_record,
    state,
)
from ansible_collections.llamacpp.cluster.plugins.module_utils.launcher import journal, progress, runtime, server
from ansible_collections.llamacpp.cluster.plugins.module_utils.launcher.serving import ASLEEP, LOADING
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp import replies, rpc
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp.rpc import Handshake
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.host_types import HostPlan
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.types import ServedModel
from ansible_collections.llamacpp.cluster.plugins.module_utils.proof import run
from ansible_collections.llamacpp.cluster.plugins.module_utils.verify import server_client, speech, start_log
from ansible_collections.llamacpp.cluster.plugins.module_utils.verify.server_client import Client
from ansible_collections.llamacpp.cluster.plugins.module_utils.verify.types import (
    Completion,
    Evidence,
    Exits,
    Handshakes,
    Health,
    LinkMeasurement,
    Reading,
    ReadingRecord,
    RecordedHandshakes,
    ServedFallback,
    ServerEvidence,
    Subject,
)

RECORD_BYTES = 1024 * 1024
"""Of a file of the launcher's, at most."""
LINE = 500
"""Characters of a line of the log that are shown."""
PROMPT = "The first three prime numbers are"
TOKENS, ANSWER_TOKENS = 16, 64
"""Of an answer at most; a wrong one to the known question may have no end."""
SECONDS_FOR_ANSWER, SECONDS_WITHOUT_A_HOST = 300, 60
"""Of a cluster, and of one that lacks a host: a worker that froze holds its head's question."""
LIST_SECONDS = 5.0
LEAST_SECONDS = 1.0
"""For which a model of several is waited for."""
WORKER_SECONDS = 3.0
"""For which a worker is waited for without which a model may have failed."""


def collect(subject: Subject, seconds: float, wake: bool) -> Evidence:
    """
    :param seconds: how long to wait for the server.
    :param wake: whether a server that sleeps is asked too.
    """
    head, host = subject.head, subject.hosts[subject.head.host]
    folder = Path(host.state)
    running = processes.account_processes(host.prefix, host.account)
    client = Client(head, running)
    health = client.health(seconds)
    launchers = [pid for pid, argv in running.items() if argv == [*head.launcher, "--", *head.argv]]
    serving = serving_record.launcher_record(folder, launchers)
    asked, sleeps = subject.asked, bool(serving and serving.state == ASLEEP)
    if asked:
        loaded = {model.name for model in client.models(LIST_SECONDS) if model.state == "loaded"} if not wake else ()
        sleeps = not (wake or asked.name in loaded)
    elif health.healthy and sleeps:
        health = Health(True, "ok; it slept, and the question of this check woke it" if wake else "ok; it sleeps")
    ask = health.healthy and (wake or not sleeps)
    if asked and ask:  # this begins its load
        reply = client.ask(f"/props?model={quote(asked.name, safe='')}", max(seconds, LEAST_SECONDS))
        if reply.text.startswith(replies.LATE):
            health, ask = Health(False, server_client.LOADING), False
    completion = _complete(client, subject) if ask else None
    log = _start_log(folder, asked)
    evidence = Evidence(
        health=health,
        exits=exits(folder / runtime.ENDS),
        log=_last_lines(log.splitlines()),
        handshakes=handshakes(folder / runtime.HANDSHAKES, launchers),
        links=_links(host.prefix, subject.links),
        fallback=_served_fallback(host, running),
        lock=cluster_lock.read_holder(Path(host.prefix)),
        verdicts=run.read_record(Path(host.prefix, names.PROOF)).verdicts,
        readings=_earlier_readings(Path(host.prefix, names.READING)),
    )
    hosts = {worker.endpoint: name for name, one in subject.hosts.items() for worker in one.workers}
    hosts.update({worker.endpoint: worker.host for worker in subject.external_workers})
    if not health.healthy:
        load = serving.load if serving and serving.state == LOADING else None
        return evidence._replace(waits_for=waits_for(evidence.handshakes.workers, hosts), load=load)
    if completion and completion.error:
        needed = {entry.endpoint for entry in subject.placement if entry.endpoint}
        asked_again = _asked_again(needed, evidence.handshakes.workers)
        workers = {**evidence.handshakes.workers, **asked_again}
        evidence = evidence._replace(
            handshakes=evidence.handshakes._replace(workers=workers),
            waits_for=waits_for(asked_again, hosts, "needs"),
        )
    first_load = log.partition(server.FALLS_ASLEEP)[0]
    return evidence._replace(
        server=ServerEvidence(
            start_log.buffers(first_load),
            _rdma_connections(subject, host),
            completion,
            _read_text(client, subject) if completion and not completion.error else None,
        ),
        drift=state.drift(host),
    )


def _earlier_readings(path: Path) -> tuple[Reading, ...]:
    try:
        return typed_json.parse(ReadingRecord, reading.read_object(path, RECORD_BYTES)).readings
    except (OSError, ValueError):
        return ()


def _read_text(client: Client, subject: Subject) -> Reading | None:
    """Return how well the model reads plain text; None if it generates none."""
    asked, identifier = subject.asked, (subject.asked or subject.head).reading
    return speech.take_reading(client.ask, identifier, asked and asked.name) if identifier else None


def _rdma_connections(subject: Subject, host: HostPlan) -> int:
    """Of the llama-server that answers now: other models have their own."""
    asked = subject.asked
    called = (server.ALIAS, asked.name) if asked else (server.PORT, str(subject.head.port))
    return sum(
        progress.rdma_connections(process)
        for process, argv in processes.account_processes(host.prefix, host.account).items()
        if os.path.basename(argv[0]) == "llama-server" and called in zip(argv, argv[1:])
    )


def _start_log(folder: Path, asked: ServedModel | None) -> str:
    """The log of the server's start, or of the last load of a model."""
    path = server.log_of_model(folder, asked.name) if asked else folder / journal.START_LOG
    try:
        return reading.read_start(path, journal.START_LOG_BYTES).decode("utf-8", "replace")
    except OSError:
        return ""


def _last_lines(lines: Sequence[str]) -> tuple[str, ...]:
    return tuple(printable(line, LINE) for line in lines[-runtime.LAST_LINES :])


def exits(path: Path) -> Exits:
    """What the launcher recorded of the ends of llama-server."""
    try:
        recorded = reading.read_object(path, RECORD_BYTES)
        return typed_json.parse(
            Exits, {**recorded, "how": printable(recorded["how"]), "log": _last_lines(recorded["log"])}
        )
    except (OSError, ValueError, KeyError, TypeError):
        return Exits(0, "", ())


def handshakes(path: Path, launchers: Collection[int] = ()) -> Handshakes:
    """What the launcher recorded of its workers.

    :param launchers: processes of the launcher, as far as they are known; what another one recorded is out of date.
    """
    try:
        recorded = typed_json.parse(RecordedHandshakes, reading.read_object(path, RECORD_BYTES))
    except (OSError, ValueError) as error:
        return Handshakes({}, f"{path} cannot be used: {printable(error)}")
    if launchers and recorded.process not in launchers:
        return Handshakes({}, f"{path} cannot be used: it is of an earlier start: the disk may be full or read-only")
    return Handshakes(recorded.workers)


def _asked_again(needed: Collection[str], workers: Mapping[str, Handshake]) -> dict[str, Handshake]:
    """What those workers of a model say now that it does not hold: the router is healthy without them, and its answer names none."""
    held = server.connected(progress.parse_tcp_table(text_of(progress.TCP_TABLE)), [*needed])
    return {
        endpoint: rpc.probe(*rpc.place_of(endpoint), WORKER_SECONDS, workers[endpoint].protocol)
        for endpoint in sorted({*needed} - held)
        if endpoint in workers
    }


def waits_for(
    workers: Mapping[str, Handshake], hosts: Mapping[str, str] = MappingProxyType({}), verb: str = "waits for"
) -> tuple[str, ...]:
    """What the head's launcher still waits for, or a model needs, a sentence for each worker.

    :param hosts: endpoint → host, as far as that is known.
    """
    owners = {endpoint: f"{host}'s " for endpoint, host in hosts.items()}
    return tuple(
        f"it {verb} {owners.get(endpoint, '')}worker {endpoint}: {answer.state}, {answer.detail}"
        for endpoint, answer in sorted(workers.items())
        if answer.state != "ok"
    )


def _links(prefix: str, names_of_hosts: Iterable[str]) -> dict[str, LinkMeasurement | None]:
    measured = host_facts.measured_links(prefix)
    return {
        name: typed_json.parse(LinkMeasurement, measured[name]) if name in measured else None for name in names_of_hosts
    }


def _served_fallback(host: HostPlan, running: dict[int, list[str]]) -> ServedFallback | None:
    for service in host.services:
        served = state.served_fallback(service, running)
        if served:
            return ServedFallback(served[0], int(processes.started_at(served[1]) or 0))
    return None


def _complete(client: Client, subject: Subject) -> Completion:
    asked = subject.asked
    question: dict[str, Any] = {"prompt": "", "temperature": 0, "max_tokens": ANSWER_TOKENS, "n_probs": 1}
    if not subject.has_known_answer:
        question.update(prompt=PROMPT, max_tokens=TOKENS)
    argv = (asked or subject.head).argv
    embeds = replies.instead_of_text(argv)
    if embeds:
        question = replies.question_without_text(PROMPT)
    if asked:
        question["model"] = asked.name
    sleeps = server.SLEEP in argv
    patience = (SECONDS_WITHOUT_A_HOST if subject.away else SECONDS_FOR_ANSWER) + (
        subject.head.start_timeout if sleeps else 0
    )
    return server_client.completion(client.ask(embeds or "/v1/completions", patience, question), bool(embeds))
