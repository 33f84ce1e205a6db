# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Compares what hosts report with the plan, check by check."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from ansible_collections.llamacpp.cluster.plugins.module_utils.common import names, typed_json
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.names import is_loopback
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.validation import printable
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp.model import known_answer
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.drift import Drift
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.host_types import (
    HostPlan,
    ServicePlan,
    WorkerPlan,
)
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.types import (
    DevicePlacement,
    ExternalWorkerPlan,
    ModelPlan,
    Plan,
)
from ansible_collections.llamacpp.cluster.plugins.module_utils.verify.types import (
    SCHEMA,
    Check,
    Completion,
    Evidence,
    Handshakes,
    LinkMeasurement,
    Reading,
    Report,
    ServerEvidence,
    Subject,
    VerificationStatus,
)

ROUNDING_MIB = 0.02
"""By which a few lines of a log with two digits after the point may be wrong together."""
LINE = 500
"""Characters of a check that are recorded on the head."""
LEFT_ASLEEP = "its model is not loaded, and was left so: -e llama_verify_wake=true asks it"
NOT_REPEATED = "; none was made now, since workers answer one llama-server at a time: run stop.yml, then site.yml with the same llama_proof"
READINGS = 16
"""Number of readings that are recorded on the head."""
LARGEST_BITS = 2.0
"""Bits per byte of plain English. Language models need 0.8 to 1.4, guessing among equally likely tokens 3.5 to 4."""
LARGEST_RATIO = 1.07
"""Perplexity divided by that of an earlier reading. Correct builds and devices differ by less than 1.02."""
FAILED_CHECKS = 20
"""That are recorded on the head."""


class Observed(NamedTuple):
    """What is known of a cluster beside the evidence of its head."""

    hosts: Mapping[str, Drift]
    """Hosts that answered → how they differ."""
    probes: Mapping[str, str | None]
    """Endpoint at the address where the controller reaches the host → the controller's address where it could connect, or None."""
    changed: Collection[str] = ()
    """Hosts that the run changed, and that were compared again since."""
    others: Sequence[Evidence] = ()
    """Of models that take turns, after the first one."""
    unproven: bool = False
    """Whether the operator asked for a proof that this run did not make."""


def evidence_of(head: str, data: Any) -> Evidence:
    """The evidence in what the head reports.

    :raises Refusal: it has another form: a head that is compromised reports anything.
    """
    evidence = typed_json.reported(head, "the server", Evidence, data)
    if evidence.health.healthy != bool(evidence.server):
        raise typed_json.not_as_read(head, "the server", "server does not fit its health")
    return evidence


def judge(plan: Plan, evidence: Evidence, observed: Observed) -> Report:
    """The report on a cluster, whose head was compared again when its evidence was collected."""
    healthy, checks = evidence.health.healthy, []
    if healthy and plan.head.fallback_after is not None:
        checks.append(_fallback(plan, evidence))
    plan = as_served(plan, evidence)
    checks += [*_releases(plan, observed), *_closed_ports(plan, observed)]
    checks += [_link(host, measured) for host, measured in evidence.links.items()]
    checks.append(_health(plan, evidence))
    if evidence.server:
        checks += _handshakes(plan, evidence.handshakes)
        again = {"computes": NOT_REPEATED} if observed.unproven else {}
        models = _of_models(plan, [evidence, *observed.others])
        checks += [one._replace(evidence=f"{one.evidence}{again.get(one.name, '')}") for one in models]
    else:
        skipped = ("handshake", "buffers", "known answer", "completion", "speaks")
        checks += [_check(name, plan.head.url, None, "the server is not healthy") for name in skipped]
    passed = not any(check.status == "failed" for check in checks)
    return Report(SCHEMA, plan.cluster, passed, tuple(checks))


def _health(plan: Plan, evidence: Evidence) -> Check:
    detail = "; ".join(evidence.waits_for or [evidence.health.detail])
    return _check("health", plan.head.url, evidence.health.healthy, detail)


def left_asleep(evidence: Evidence) -> bool:
    return bool(evidence.server and not evidence.server.completion)


def readings_of(evidence: Sequence[Evidence]) -> tuple[Reading, ...]:
    """Return what the head keeps of readings: the new ones, and earlier ones of other models."""
    new = [one.server.reading for one in evidence if one.server and one.server.reading]
    ids = {one.id for one in new}
    return tuple([*(one for one in evidence[0].readings if one.id not in ids), *new][-READINGS:])


def outcome_of(plan: Plan, report: Report, asleep: bool) -> VerificationStatus:
    """What the head keeps of a report."""
    failed = tuple(check.sentence()[:LINE] for check in report.failed[:FAILED_CHECKS])
    return VerificationStatus(0, report.passed, failed, plan.release.ref, asleep)


def gate(subject: Subject, evidence: Evidence) -> str | None:
    """Why a head that was started does not serve, and what to do; None where it is healthy and has answered."""
    if not evidence.server:
        reasons = "; ".join(evidence.waits_for or [evidence.health.detail])
        return f"llama-server is not healthy: {reasons}. {advice(subject, evidence)}".rstrip()
    completion, url = _explained(evidence, evidence.server), subject.head.url
    checks = [_completion(url, completion)]
    if subject.has_known_answer:
        checks.append(_known_answer(url, subject.model, completion))
    checks.append(_speaks(url, (subject.asked or subject.head).reading, evidence, evidence.server))
    wrong = [f"{check.name}: {check.evidence}" for check in checks if check.status == "failed"]
    return f"llama-server does not answer as it should: {'; '.join(wrong)}" if wrong else None


def _explained(evidence: Evidence, server: ServerEvidence) -> Completion | None:
    """The completion, whose error names the workers that the model lacks: the server's own names none."""
    completion = server.completion
    if not completion or not completion.error:
        return completion
    return completion._replace(error="; ".join([completion.error, *evidence.waits_for]))


def advice(subject: Subject, evidence: Evidence) -> str:
    """What to do about a server that is not healthy: about the workers that its launcher waits for, else by the end of its log."""
    waits_for = evidence.waits_for
    if not waits_for:
        return "Its log ends in:\n" + "\n".join(evidence.log) if evidence.log else ""
    external = [
        worker
        for worker in subject.external_workers
        if any(f"worker {worker.endpoint}:" in sentence for sentence in waits_for)
    ]
    places = ", ".join(f"{worker.endpoint} on {worker.host}" for worker in external)
    texts = [f"Nothing here runs {places}: start it there, with a release of the head's protocol."] if external else []
    if len(external) < len(waits_for):
        texts.append(
            f"{', '.join(subject.away)} did not answer the controller either: start that host, or look at its network."
            if subject.away
            else "Where the worker's host answers and its process runs, something between the hosts closes its port, or another head uses it: check the "
            "firewalls and the routes between head and worker."
        )
    return " ".join(texts)


def as_served(plan: Plan, evidence: Evidence) -> Plan:
    """The plan as it is while the head serves on a fallback: with its placement and its workers."""
    served = evidence.fallback.planned(plan.fallbacks) if evidence.fallback else None
    if not served:
        return plan
    hosts = {
        name: host._replace(
            workers=tuple(worker._replace(used=worker.endpoint in served.workers) for worker in host.workers)
        )
        for name, host in plan.hosts.items()
    }
    external = tuple(worker._replace(used=worker.endpoint in served.workers) for worker in plan.external_workers)
    return plan._replace(placement=served.placement, hosts=hosts, external_workers=external)


def _check(name: str, subject: str, passed: bool | None, evidence: str) -> Check:
    status = {True: "passed", False: "failed", None: "not tested"}[passed]
    return Check(name, subject, status, printable(evidence))


def _count(number: int, thing: str) -> str:
    return f"{number} {thing}" if number == 1 else f"{number} {thing}{'es' if thing.endswith('s') else 's'}"


# ------------------------------------------------------------------------------------------------------------ fallback


def _fallback(plan: Plan, evidence: Evidence) -> Check:
    """Whether the whole plan is served, where the head may serve on a fallback."""
    served = evidence.fallback
    if not served:
        absences = f"{len(plan.fallbacks)} of {len(plan.fallbacks) + len(plan.no_fallback)} absences"
        return _check("fallback", plan.head.url, True, f"not needed; planned for {absences}")
    since = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(served.since))
    text = f"the head serves without {served.name} since {since} UTC, and with all workers again once that one answers"
    return _check("fallback", plan.head.url, False, text)


# ------------------------------------------------------------------------------------------------------------- release


def _releases(plan: Plan, observed: Observed) -> Iterator[Check]:
    for name, host in plan.hosts.items():
        report = observed.hosts.get(name)
        if not report:
            text = "the host does not answer: nothing was changed or compared there"
            yield _check("release", name, False, text)
            continue
        wrong = [
            f"{service.name} is {report.services[service.name].state}"
            for service in host.services
            if report.services[service.name].state != "running"
        ]
        wrong += [f"{service} runs, but is not planned" for service in report.unplanned]
        wrong += _foreign_clients(host, report)
        builds = ", ".join(build.id for build in host.builds)
        right = f"{_count(len(host.services), 'process')} of {builds} as planned"
        yield _check("release", name, not wrong, ", ".join(wrong) or right)


def _foreign_clients(host: HostPlan, report: Drift) -> Iterator[str]:
    """Clients of workers that are not the head, as the workers' host sees them. A worker serves one client."""
    for service in host.services:
        if service.kind == "worker":
            clients = set(report.services[service.name].clients) - _addresses_of_head(host, service)
            yield from (
                f"{service.name} has a connection from {address}, which is not the head" for address in sorted(clients)
            )


def _addresses_of_head(host: HostPlan, service: ServicePlan) -> set[str]:
    address, port = service.listens.rsplit(":", 1)
    heads = {source for rule in host.firewall if rule.port == int(port) for source in rule.sources}
    return heads | ({address} if is_loopback(address) else set()) or {address}


# -------------------------------------------------------------------------------------------------------- closed ports


class Attempt(NamedTuple):
    """An attempt of somebody else than the head to connect to a worker, who reached its host."""

    by: str
    source: str
    connected: bool


def _attempts(plan: Plan, observed: Observed, owner: str, end: str) -> Iterator[Attempt]:
    """Of the controller, and of hosts that were asked to try, after the owner of the port was changed."""
    if end in observed.probes:
        source = observed.probes[end]
        yield Attempt("the controller", source or "", source is not None)
    for name, report in observed.hosts.items():
        is_stale = owner in observed.changed and name not in observed.changed
        if name in plan.hosts and end in plan.hosts[name].port_probes and not is_stale:
            yield from (
                Attempt(name, probe.source, probe.open) for probe in report.port_probes if probe.endpoint == end
            )


def _closed_ports(plan: Plan, observed: Observed) -> Iterator[Check]:
    for name, host in plan.hosts.items():
        for worker in host.workers:
            yield _check("closed", worker.tunnel or worker.endpoint, *_judge_port(plan, observed, name, host, worker))
    for external in plan.external_workers:
        text = f"{external.host} runs it by itself: only a look there can tell"
        yield _check("closed", external.endpoint, None, text)


def _judge_port(
    plan: Plan, observed: Observed, name: str, host: HostPlan, worker: WorkerPlan
) -> tuple[bool | None, str]:
    end = worker.tunnel or worker.endpoint
    service = (
        observed.hosts[name].services.get(names.service(f"worker-{worker.name}")) if name in observed.hosts else None
    )
    listening = [
        other for other in (service.addresses if service else ()) if not (worker.tunnel and is_loopback(other))
    ]
    if not {one.rsplit(":", 1)[0] for one in (worker.listens, end)}.issuperset(listening):
        return False, f"it listens on {', '.join(listening)}"
    if not worker.tunnel and is_loopback(worker.listens) and listening:
        return True, "listens on loopback only"
    if worker.tunnel and not (host.unit_closes or host.firewall_manager):
        return None, "open to the network: its key alone lets in"
    attempts = list(_attempts(plan, observed, name, end))
    heads = {source for rule in host.firewall for source in rule.sources}
    for attempt in attempts:
        if attempt.connected and attempt.source not in heads:
            if _accepts_open(plan, name):
                return None, "the port is open: llama_accept_advisories accepts that (unprotected-worker)"
            return False, f"{attempt.by} can connect from {attempt.source}: close the port to all hosts but the head"
    for attempt in attempts:
        if not attempt.connected:
            origin = f" from {attempt.source}" if attempt.source else ""
            return True, f"{attempt.by} reaches the host{origin}, but not this port"
    return None, "neither another host nor the controller could try: none was seen to reach this address"


def _accepts_open(plan: Plan, host: str) -> bool:
    return any(one.id == "unprotected-worker" and one.accepted and host in one.hosts for one in plan.advisories)


# --------------------------------------------------------------------------------------------------------------- links


def _link(host: str, measured: LinkMeasurement | None) -> Check:
    """What the last measurement of a link gave. No threshold: what is enough depends on the model."""
    if not measured:
        return _check("link", host, None, "not measured yet: a run that reaches both ends measures it")
    texts = []
    if measured.mbit_per_second is not None:
        texts.append(f"{measured.mbit_per_second:.0f} Mbit/s")
    if measured.round_trip_ms is not None:
        texts.append(f"round trip {measured.round_trip_ms:.2f} ms")
    if measured.detail:
        texts.append(measured.detail)
    if measured.round_trip_ms is None:
        texts.append("the head's ping had no answer: it is measured again with -e llama_link_measure=true")
    elif not measured.requested:
        texts.append("the plan counts with it after -e llama_link_measure=true")
    return _check("link", host, measured.round_trip_ms is not None or None, ", ".join(texts))


# ---------------------------------------------------------------------------------------------------- a healthy server


def _of_models(plan: Plan, evidence: Sequence[Evidence]) -> Iterator[Check]:
    """:param evidence: of each model that takes turns, or of the one that is served."""
    names_of = [f"{one.name}: " for one in plan.head.models or ()] or [""]
    for name, one, found in zip(names_of, plan.per_model(), evidence):
        checks = _of_model(one, found, found.server) if found.server else [_health(one, found)]
        yield from (check._replace(subject=f"{name}{check.subject}") for check in checks)


def _of_model(plan: Plan, evidence: Evidence, server: ServerEvidence) -> Iterator[Check]:
    url, completion = plan.head.url, _explained(evidence, server)
    if completion or server.buffers:
        yield from (_buffers(entry, server.buffers) for entry in plan.placement)
    if completion and not evidence.fallback:
        yield from _rdma(plan, server)
    yield from _computes(plan, evidence) if not evidence.fallback else ()
    yield _known_answer(url, plan.model, completion)
    yield _completion(url, completion)
    yield _speaks(url, plan.head.reading, evidence, server)


def _computes(plan: Plan, evidence: Evidence) -> Iterator[Check]:
    """Yield what the proof found before the server started: workers serve one head at a time, so none can be made now."""
    proof = plan.head.proof
    if not proof:
        return
    names_of_devices = ", ".join(f"{one.host} {one.worker or one.device}" for one in plan.placement)
    if not proof.layers:
        yield _check(
            "computes", names_of_devices, None, f"no layers of this model can prove the devices: {proof.reason}"
        )
        return
    known = {verdict.id: verdict for verdict in evidence.verdicts}
    verdicts = [known[device.id] for device in proof.devices if device.id in known]
    unproven = [device.name for device in proof.devices if device.id not in known]
    texts = [verdict.sentence() for verdict in verdicts]
    if unproven:
        texts.append(
            f"{', '.join(unproven)}: not proven; site.yml proves devices when it starts the server, unless llama_proof is never"
        )
    texts.append(f"by {proof.coverage(plan.model.layers)}")
    # The operator may serve without a proof, so a wrong device is not a failure here.
    passed = bool(verdicts) and not unproven and all(verdict.right for verdict in verdicts)
    yield _check("computes", names_of_devices, passed or None, "; ".join(texts))


def _speaks(url: str, identifier: str | None, evidence: Evidence, server: ServerEvidence) -> Check:
    """Return whether the model reads plain text like a language model, and as well as before."""
    if not identifier:
        return _check("speaks", url, None, "this model generates no text, or only its known answer")
    now, earlier = server.reading, next((one for one in evidence.readings if one.id == identifier), None)
    if not server.completion:
        return _check("speaks", url, None, LEFT_ASLEEP)
    if not now:
        return _check("speaks", url, None, "the server reports no probabilities of given tokens, or answers too slowly")
    text = f"{now.bits_per_byte:.2f} bits per byte of plain text"
    if now.bits_per_byte > LARGEST_BITS:
        return _check(
            "speaks",
            url,
            False,
            f"{text}, more than {LARGEST_BITS:g}: the model computes wrong, or it was not made for English text",
        )
    if not earlier:
        return _check("speaks", url, True, f"{text}; nothing to compare with yet")
    ratio = now.ratio(earlier)
    text += f", perplexity {ratio:.3f} times that of the last verification"
    if ratio > LARGEST_RATIO:
        text += f", more than {LARGEST_RATIO:g}: the release, a device or the file computes worse than before"
    return _check("speaks", url, ratio <= LARGEST_RATIO, text)


def _rdma(plan: Plan, server: ServerEvidence) -> Iterator[Check]:
    """That no worker is reached over TCP that shall be over RDMA: llama.cpp goes back to it without a word. Connections do not say whose they are."""
    endpoints = {entry.endpoint for entry in plan.placement}
    workers = [worker for host in plan.hosts.values() for worker in host.workers if worker.used and worker.rdma]
    planned = [worker.endpoint for worker in workers if worker.endpoint in endpoints]
    if planned:
        text, enough = f"{server.rdma} of {len(planned)} workers are reached over RDMA", server.rdma >= len(planned)
        if not enough:
            text += (
                f", planned: {', '.join(planned)}. llama-server went back to TCP without a word: look where «RDMA» ends in start.log of the head and in "
                "the logs of these workers"
            )
        yield _check("rdma", plan.head.host, enough, text)


def _handshakes(plan: Plan, handshakes: Handshakes) -> Iterator[Check]:
    """Of workers that the plan uses: any other one of others may serve somebody else."""
    needed = {entry.endpoint: entry.capacity_mib for one in plan.per_model() for entry in one.placement}
    workers: list[WorkerPlan | ExternalWorkerPlan] = [one for host in plan.hosts.values() for one in host.workers]
    for worker in [*workers, *plan.external_workers]:
        if worker.used:
            passed, text = _judge_handshake(handshakes, worker.endpoint, needed.get(worker.endpoint, 0))
            tunnel = worker.tunnel if isinstance(worker, WorkerPlan) else None
            through = f", encrypted to {tunnel}" if passed and tunnel else ""
            yield _check("handshake", worker.endpoint, passed, f"{text}{through}")
        else:
            yield _check("handshake", worker.endpoint, None, "the head does not use it")


def _judge_handshake(handshakes: Handshakes, endpoint: str, needed: float) -> tuple[bool, str]:
    """Whether a worker answered as planned, and its answer.

    :param needed: MiB that the plan may put there.
    """
    answer = handshakes.workers.get(endpoint)
    if not answer:
        missing = "the launcher on the head recorded no handshake before llama-server started"
        return False, handshakes.error or missing
    if answer.state != "ok":
        return False, f"{answer.state}: {answer.detail}"
    total = sum(device.total_mib for device in answer.devices)
    text = f"protocol {answer.protocol}, {len(answer.devices)} device, {total} MiB"
    if len(answer.devices) == 1 and total >= needed:
        return True, text
    return False, f"{text}, planned: 1 device with {needed} MiB or more"


def _buffers(entry: DevicePlacement, logged: Mapping[str, Mapping[str, float]]) -> Check:
    """Whether a device holds as much of the model and its cache as planned."""
    buffers = logged.get(entry.device, {})
    wrong, bounds = [], ""
    for kind, key, planned in (("model", "weights_mib", entry.weights_mib), ("KV", "kv_mib", entry.kv_mib)):
        found = buffers.get(kind, 0.0)
        if key not in entry.exact:
            bounds += f", {kind} planned up to {planned} MiB"
            if kind == "model" and planned and not found:
                wrong.append(f"{kind} {found} MiB, planned up to {planned}")
        elif abs(found - planned) > ROUNDING_MIB + planned / 1000:
            wrong.append(f"{kind} {found} MiB, planned {planned}")
    if not wrong:
        sizes = ", ".join(f"{kind} {found} MiB" for kind, found in buffers.items())
        return _check("buffers", entry.device, True, sizes + bounds)
    if not logged:
        text = "start.log on the head has no sizes of buffers"
        return _check("buffers", entry.device, None, text)
    return _check("buffers", entry.device, False, "; ".join(wrong))


def _known_answer(url: str, model: ModelPlan, completion: Completion | None) -> Check:
    if not (model.known_answer or known_answer.is_name(model.name)):
        return _check("known answer", url, None, f"{model.name} is served, not the known-answer model")
    if not completion or completion.error:
        return _check(
            "known answer", url, False if completion else None, completion.error if completion else LEFT_ASLEEP
        )
    expected, words = known_answer.SENTENCE.split(), completion.text.split()
    if words == expected:
        text = f"{len(words)} of {len(expected)} words right, through {model.layers} layers (small faults of attention go unnoticed)"
        return _check("known answer", url, True, text)
    right = next(
        (n for n, pair in enumerate(zip(expected, words)) if pair[0] != pair[1]), min(len(expected), len(words))
    )
    text = (
        f"word {right + 1} is {' '.join(words[right : right + 1]) or 'missing'!r}, expected {' '.join(expected[right : right + 1]) or 'the end'!r}: at least "
        f"one layer computes wrong. The answer is {completion.text[:300]!r}"
    )
    return _check("known answer", url, False, text)


def _completion(url: str, completion: Completion | None) -> Check:
    if not completion or completion.error:
        return _check("completion", url, False if completion else None, completion.error if completion else LEFT_ASLEEP)
    speed = completion.tokens_per_second
    text = f"{completion.tokens} tokens" + (f", {speed:.1f} tokens per second" if speed else "")
    if not completion.computes_numbers:
        return _check(
            "completion", url, False, f"{text}, of which some have no probability: the model computes no numbers"
        )
    return _check("completion", url, completion.tokens > 0, text)
