# Copyright (c) 2026 the llamacpp.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Compares the reports of hosts with the plan, check by check."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from ansible_collections.llamacpp.cluster.plugins.module_utils.common import names, typed_json
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.names import is_loopback
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.validation import printable
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp.model import known_answer
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.drift import STATE_TEXTS, Drift
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.host_types import HostPlan, ServicePlan, WorkerPlan
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.types import (
    DevicePlacement,
    ExternalWorkerPlan,
    ModelPlan,
    Plan,
)
from ansible_collections.llamacpp.cluster.plugins.module_utils.verify import types

ROUNDING_MIB = 0.02
"""Total rounding error of several log lines with two decimal places each."""
MAX_CHECK_LENGTH = 500
"""Maximum length of a recorded check."""
ASLEEP_NOTE = "the model is not loaded (asleep); use -e llama_verify_wake=true to test it"
NO_PROOF_NOTE = "; not proven in this run, because the running server occupies the workers: run stop.yml, then site.yml with the same llama_proof"
MAX_READINGS = 16
"""Maximum number of recorded readings."""
MAX_BITS_PER_BYTE = 2.0
"""Maximum bits per byte of plain English. Language models need 0.8 to 1.4; guessing among equally likely tokens needs 3.5 to 4."""
MAX_PERPLEXITY_RATIO = 1.07
"""Maximum perplexity, divided by that of an earlier reading. Correct builds and devices differ by a factor of less than 1.02."""
MAX_FAILED_CHECKS = 20
"""Maximum number of recorded failed checks."""


class Observations(NamedTuple):
    """Observations of a cluster that its head did not report."""

    drifts: Mapping[str, Drift]
    """Host that answered → its differences from the plan."""
    controller_probes: Mapping[str, str | None]
    """Endpoint at an address that the controller can reach → address from which the controller could connect, or None."""
    changed_hosts: Collection[str] = ()
    """Hosts that the run changed and then compared again."""
    other_evidence: Sequence[types.Evidence] = ()
    """Evidence about each of several models except the first."""
    lacks_proof: bool = False
    """Whether the operator requested a proof that was not run."""


def parse_evidence(head: str, data: Any) -> types.Evidence:
    """Return the evidence in the report of a head.

    :raises Refusal: the report is invalid. A compromised head may report anything.
    """
    evidence = typed_json.parse_report(head, "the server", types.Evidence, data)
    if evidence.health.healthy != bool(evidence.server):
        raise typed_json.refusal_of_report(head, "the server", "the server's state does not match its health")
    return evidence


def judge(plan: Plan, evidence: types.Evidence, observations: Observations) -> types.Report:
    """Return the report on a cluster. The evidence includes a new comparison of the head with the plan."""
    is_healthy, checks = evidence.health.healthy, []
    if is_healthy and plan.head.fallback_after is not None:
        checks.append(_check_fallback(plan, evidence))
    plan = served_plan(plan, evidence)
    checks += [*_check_releases(plan, observations), *_check_ports(plan, observations)]
    checks += [_check_link(host, measurement) for host, measurement in evidence.links.items()]
    checks.append(_check_health(plan, evidence))
    if evidence.server:
        checks += _check_handshakes(plan, evidence.handshakes)
        notes = {"computes": NO_PROOF_NOTE} if observations.lacks_proof else {}
        model_checks = _check_models(plan, [evidence, *observations.other_evidence])
        checks += [check._replace(evidence=f"{check.evidence}{notes.get(check.name, '')}") for check in model_checks]
    else:
        skipped_names = ("handshake", "buffers", "known answer", "completion", "speaks")
        checks += [_result(name, plan.head.url, None, "the server is not healthy") for name in skipped_names]
    passed = not any(check.status == "failed" for check in checks)
    return types.Report(types.SCHEMA, plan.cluster, passed, tuple(checks))


def _check_health(plan: Plan, evidence: types.Evidence) -> types.Check:
    detail = "; ".join(evidence.waits_for or [evidence.health.detail])
    return _result("health", plan.head.url, evidence.health.healthy, detail)


def was_asleep(evidence: types.Evidence) -> bool:
    return bool(evidence.server and not evidence.server.completion)


def readings_of(evidence: Sequence[types.Evidence]) -> tuple[types.TextReading, ...]:
    """Return the readings for the head to keep: the best reading of each model, so that several small losses do not add up unnoticed."""
    best_readings = {reading.id: reading for reading in evidence[0].readings}
    for reading in [report.server.reading for report in evidence if report.server and report.server.reading]:
        reference = best_readings.pop(reading.id, reading)
        best_readings[reading.id] = reference if reading.perplexity_ratio(reference) >= 1 else reading
    return tuple(best_readings.values())[-MAX_READINGS:]


def outcome_of(plan: Plan, report: types.Report, is_asleep: bool) -> types.VerificationStatus:
    """Return the part of a report for the head to keep."""
    failures = tuple(check.sentence()[:MAX_CHECK_LENGTH] for check in report.failed_checks[:MAX_FAILED_CHECKS])
    return types.VerificationStatus(0, report.passed, failures, plan.release.ref, is_asleep)


def serving_failure(subject: types.Subject, evidence: types.Evidence) -> str | None:
    """Return the reason why a started head does not serve, and the remedy; None if it is healthy and has answered."""
    if not evidence.server:
        reasons = "; ".join(evidence.waits_for or [evidence.health.detail])
        return f"llama-server is not healthy: {reasons}. {advice(subject, evidence)}".rstrip()
    completion, url = _explained_completion(evidence, evidence.server), subject.head.url
    checks = [_result("completion", url, *_judge_completion(completion))]
    if subject.has_known_answer:
        checks.append(_result("known answer", url, *_judge_known_answer(subject.model, completion)))
    reading_id = (subject.named_model or subject.head).reading
    checks.append(_result("speaks", url, *_judge_reading(reading_id, evidence, evidence.server)))
    failures = [f"{check.name}: {check.evidence}" for check in checks if check.status == "failed"]
    return f"llama-server fails these checks: {'; '.join(failures)}" if failures else None


def _explained_completion(evidence: types.Evidence, server: types.ServerEvidence) -> types.Completion | None:
    """Return the completion. Add the missing workers to its error, because the server does not name them."""
    completion = server.completion
    if not completion or not completion.error:
        return completion
    return completion._replace(error="; ".join([completion.error, *evidence.waits_for]))


def advice(subject: types.Subject, evidence: types.Evidence) -> str:
    """Return advice on an unhealthy server: about the workers for which its launcher waits, or else the end of its log."""
    waits_for = evidence.waits_for
    if not waits_for:
        return "The last lines of its log (errors first):\n" + "\n".join(evidence.log) if evidence.log else ""
    external_workers = [
        worker
        for worker in subject.external_workers
        if any(f"worker {worker.endpoint}:" in sentence for sentence in waits_for)
    ]
    workers_text = ", ".join(f"{worker.endpoint} on {worker.host}" for worker in external_workers)
    texts = (
        [
            f"This collection does not start external workers ({workers_text}): start them on their hosts, with a release that uses the head's protocol."
        ]
        if external_workers
        else []
    )
    if len(external_workers) < len(waits_for):
        texts.append(
            f"The controller got no answer from {', '.join(subject.unreachable_hosts)} either: check their power and network."
            if subject.unreachable_hosts
            else "If the worker's host answers and the worker is running, the network blocks the worker's port, or another head uses the worker. Check "
            "firewalls and routes between head and worker."
        )
    return " ".join(texts)


def served_plan(plan: Plan, evidence: types.Evidence) -> Plan:
    """Return the plan with the placement and workers of the fallback on which the head serves."""
    fallback = evidence.fallback.find_in(plan.fallbacks) if evidence.fallback else None
    if not fallback:
        return plan
    hosts = {
        name: host._replace(
            workers=tuple(worker._replace(used=worker.endpoint in fallback.workers) for worker in host.workers)
        )
        for name, host in plan.hosts.items()
    }
    external_workers = tuple(
        worker._replace(used=worker.endpoint in fallback.workers) for worker in plan.external_workers
    )
    return plan._replace(placement=fallback.placement, hosts=hosts, external_workers=external_workers)


def _result(name: str, subject: str, passed: bool | None, evidence: str) -> types.Check:
    status = {True: "passed", False: "failed", None: "not tested"}[passed]
    return types.Check(name, subject, status, printable(evidence))


def _quantity_text(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}{'es' if noun.endswith('s') else 's'}"


def _check_fallback(plan: Plan, evidence: types.Evidence) -> types.Check:
    """Check whether the head serves the whole plan rather than a fallback."""
    fallback = evidence.fallback
    if not fallback:
        absence_text = f"{len(plan.fallbacks)} of {len(plan.fallbacks) + len(plan.no_fallback)} possible absences"
        return _result("fallback", plan.head.url, True, f"none in use; fallbacks are planned for {absence_text}")
    start_text = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(fallback.since))
    text = f"the head has served without {fallback.name} since {start_text} UTC and will return to all workers when {fallback.name} answers"
    return _result("fallback", plan.head.url, False, text)


def _check_releases(plan: Plan, observations: Observations) -> Iterator[types.Check]:
    for name, host in plan.hosts.items():
        drift = observations.drifts.get(name)
        if not drift:
            text = "the host did not answer, so it was neither changed nor compared with the plan"
            yield _result("release", name, False, text)
            continue
        faults = [
            f"{service.name} is {STATE_TEXTS.get(state, state)}"
            for service in host.services
            if (state := drift.services[service.name].state) != "running"
        ]
        faults += [f"{service} is running but is not planned" for service in drift.unplanned]
        faults += _client_faults(host, drift)
        build_ids = ", ".join(build.id for build in host.builds)
        summary = f"{_quantity_text(len(host.services), 'process')} running {build_ids}, as in the plan"
        yield _result("release", name, not faults, ", ".join(faults) or summary)


def _client_faults(host: HostPlan, drift: Drift) -> Iterator[str]:
    """Yield a text about each client of a worker that is not the head. A worker serves a single client at a time."""
    for service in host.services:
        if service.kind == "worker":
            clients = set(drift.services[service.name].clients) - _addresses_of_head(host, service)
            yield from (
                f"{service.name} has a connection from {address}, not from the head" for address in sorted(clients)
            )


def _addresses_of_head(host: HostPlan, service: ServicePlan) -> set[str]:
    address, port = service.listens.rsplit(":", 1)
    head_addresses = {source for rule in host.firewall if rule.port == int(port) for source in rule.sources}
    return head_addresses | ({address} if is_loopback(address) else set()) or {address}


class PortTest(NamedTuple):
    """A test of whether a client other than the head can connect to a worker's port."""

    client: str
    address: str
    is_connected: bool


def _port_tests(plan: Plan, observations: Observations, port_host: str, endpoint: str) -> Iterator[PortTest]:
    """Yield the tests by the controller and other hosts, unless the port's host changed after the test."""
    if endpoint in observations.controller_probes:
        address = observations.controller_probes[endpoint]
        yield PortTest("the controller", address or "", address is not None)
    for name, drift in observations.drifts.items():
        is_stale = port_host in observations.changed_hosts and name not in observations.changed_hosts
        if name in plan.hosts and endpoint in plan.hosts[name].port_probes and not is_stale:
            yield from (
                PortTest(name, probe.source, probe.open) for probe in drift.port_probes if probe.endpoint == endpoint
            )


def _check_ports(plan: Plan, observations: Observations) -> Iterator[types.Check]:
    for name, host in plan.hosts.items():
        for worker in host.workers:
            yield _result(
                "closed", worker.tunnel or worker.endpoint, *_judge_port(plan, observations, name, host, worker)
            )
    for external_worker in plan.external_workers:
        text = f"{external_worker.host} runs this worker without the collection: check on that host that only the head can reach the port"
        yield _result("closed", external_worker.endpoint, None, text)


def _judge_port(
    plan: Plan, observations: Observations, name: str, host: HostPlan, worker: WorkerPlan
) -> tuple[bool | None, str]:
    endpoint = worker.tunnel or worker.endpoint
    state = (
        observations.drifts[name].services.get(names.service_name(f"worker-{worker.name}"))
        if name in observations.drifts
        else None
    )
    addresses = [
        address for address in (state.addresses if state else ()) if not (worker.tunnel and is_loopback(address))
    ]
    planned_addresses = {listener.rsplit(":", 1)[0] for listener in (worker.listens, endpoint)}
    if unplanned_addresses := [address for address in addresses if address not in planned_addresses]:
        return False, f"the worker listens on {', '.join(unplanned_addresses)}, which the plan does not allow"
    if not worker.tunnel and is_loopback(worker.listens) and addresses:
        return True, "the worker listens on loopback only"
    if worker.tunnel and not (host.unit_closes or host.firewall_manager):
        return None, "the port is reachable from the network; only the tunnel key protects it"
    tests = list(_port_tests(plan, observations, name, endpoint))
    head_addresses = {source for rule in host.firewall for source in rule.sources}
    accepted_advisories = [entry for entry in plan.advisories if entry.id == "unprotected-worker" and entry.accepted]
    for test in tests:
        if test.is_connected and test.address not in head_addresses:
            if any(name in advisory.hosts for advisory in accepted_advisories):
                return None, "the port is open, as accepted with llama_accept_advisories (unprotected-worker)"
            text = f"{test.client} can connect from {test.address}: close the port to all hosts except the head"
            return False, text
    for test in tests:
        if not test.is_connected:
            address_text = f" from {test.address}" if test.address else ""
            return True, f"{test.client} reaches the host{address_text}, but not this port"
    return None, "not tested: no connection could be tried from an address other than the head's"


def _check_link(host: str, measurement: types.LinkMeasurement | None) -> types.Check:
    """Show the last measurement of a link. There is no threshold, because it would depend on the model."""
    if not measurement:
        return _result("link", host, None, "not measured yet: the next run that reaches both hosts will measure it")
    texts = []
    if measurement.mbit_per_second is not None:
        texts.append(f"{measurement.mbit_per_second:.0f} Mbit/s")
    if measurement.round_trip_ms is not None:
        texts.append(f"round trip {measurement.round_trip_ms:.2f} ms")
    if measurement.detail:
        texts.append(measurement.detail)
    if measurement.round_trip_ms is None:
        texts.append("the head's ping was not answered: run with -e llama_link_measure=true to measure again")
    elif not measurement.requested:
        texts.append("run with -e llama_link_measure=true to use this measurement in planning")
    return _result("link", host, measurement.round_trip_ms is not None or None, ", ".join(texts))


def _check_models(plan: Plan, evidence: Sequence[types.Evidence]) -> Iterator[types.Check]:
    """:param evidence: evidence about each of several models, or about the only model."""
    prefixes = [f"{model.name}: " for model in plan.head.models or ()] or [""]
    for prefix, model_plan, report in zip(prefixes, plan.per_model(), evidence):
        checks = (
            _check_model(model_plan, report, report.server) if report.server else [_check_health(model_plan, report)]
        )
        yield from (check._replace(subject=f"{prefix}{check.subject}") for check in checks)


def _check_model(plan: Plan, evidence: types.Evidence, server: types.ServerEvidence) -> Iterator[types.Check]:
    url, completion = plan.head.url, _explained_completion(evidence, server)
    if completion or server.buffers:
        yield from (_check_buffers(device, server.buffers) for device in plan.placement)
    if completion and not evidence.fallback:
        yield from _check_rdma(plan, server)
    yield from _check_proof(plan, evidence) if not evidence.fallback else ()
    yield _result("known answer", url, *_judge_known_answer(plan.model, completion))
    yield _result("completion", url, *_judge_completion(completion))
    if not (plan.model.known_answer or known_answer.is_model_name(plan.model.name)):
        yield _result("speaks", url, *_judge_reading(plan.head.reading, evidence, server))


def _check_proof(plan: Plan, evidence: types.Evidence) -> Iterator[types.Check]:
    """Yield the result of the proof that ran before the server started. Workers serve a single head, so a proof is impossible now."""
    proof = plan.head.proof
    if not proof:
        return
    device_names = ", ".join(f"{device.host} {device.worker or device.device}" for device in plan.placement)
    if not proof.layers:
        yield _result("computes", device_names, None, f"the devices cannot be tested with this model: {proof.reason}")
        return
    verdicts_by_id = {verdict.id: verdict for verdict in evidence.verdicts}
    verdicts = [verdicts_by_id[device.id] for device in proof.devices if device.id in verdicts_by_id]
    unproven_names = [device.name for device in proof.devices if device.id not in verdicts_by_id]
    texts = [verdict.sentence() for verdict in verdicts]
    if unproven_names:
        texts.append(
            f"{', '.join(unproven_names)}: not proven; site.yml runs the proof before it starts the server, unless llama_proof is never"
        )
    texts.append(f"the proof uses {proof.coverage_text(plan.model.layers)}")
    # The operator may serve without a proof, so an incorrect device does not fail this check.
    passed = bool(verdicts) and not unproven_names and all(verdict.is_correct for verdict in verdicts)
    yield _result("computes", device_names, passed or None, "; ".join(texts))


def _judge_reading(
    reading_id: str | None, evidence: types.Evidence, server: types.ServerEvidence
) -> tuple[bool | None, str]:
    """Return whether the model reads plain text like a language model, and no worse than before."""
    if not reading_id:
        return None, "this model generates no text"
    reading = server.reading
    reference = next((entry for entry in evidence.readings if entry.id == reading_id), None)
    if not server.completion:
        return None, ASLEEP_NOTE
    if not reading:
        return None, "the server does not report token probabilities, or answers too slowly"
    text = f"{reading.bits_per_byte:.2f} bits per byte of plain text"
    if reading.bits_per_byte > MAX_BITS_PER_BYTE:
        text += f", more than {MAX_BITS_PER_BYTE:g}: the cluster computes incorrectly, or the model was not trained on English text"
        return False, text
    if not reference:
        return True, f"{text}; there is no earlier reading for comparison"
    ratio = reading.perplexity_ratio(reference)
    text += f", perplexity {ratio:.3f} times that of the best reading so far"
    if ratio > MAX_PERPLEXITY_RATIO:
        text += f", more than {MAX_PERPLEXITY_RATIO:g}: the release, a device or the model file is worse than before"
    return ratio <= MAX_PERPLEXITY_RATIO, text


def _check_rdma(plan: Plan, server: types.ServerEvidence) -> Iterator[types.Check]:
    """Check that the head uses RDMA for all workers for which it is planned. A connection does not show its worker."""
    endpoints = {device.endpoint for device in plan.placement}
    workers = [worker for host in plan.hosts.values() for worker in host.workers if worker.used and worker.rdma]
    rdma_endpoints = [worker.endpoint for worker in workers if worker.endpoint in endpoints]
    if rdma_endpoints:
        passed = server.rdma >= len(rdma_endpoints)
        text = f"workers reached over RDMA: {server.rdma} of {len(rdma_endpoints)}"
        if not passed:
            text += (
                f", planned: {', '.join(rdma_endpoints)}. llama-server silently fell back to TCP: see the last lines that mention RDMA in start.log on the "
                "head, and in these workers' logs"
            )
        yield _result("rdma", plan.head.host, passed, text)


def _check_handshakes(plan: Plan, handshakes: types.Handshakes) -> Iterator[types.Check]:
    """Check the workers that the plan uses. Unused external workers may serve another head."""
    capacities_mib = {device.endpoint: device.capacity_mib for model in plan.per_model() for device in model.placement}
    workers: list[WorkerPlan | ExternalWorkerPlan] = [worker for host in plan.hosts.values() for worker in host.workers]
    for worker in [*workers, *plan.external_workers]:
        if worker.used:
            passed, text = _judge_handshake(handshakes, worker.endpoint, capacities_mib.get(worker.endpoint, 0))
            tunnel = worker.tunnel if isinstance(worker, WorkerPlan) else None
            tunnel_note = f", through an encrypted tunnel to {tunnel}" if passed and tunnel else ""
            yield _result("handshake", worker.endpoint, passed, f"{text}{tunnel_note}")
        else:
            yield _result("handshake", worker.endpoint, None, "the head does not use this worker")


def _judge_handshake(handshakes: types.Handshakes, endpoint: str, needed_mib: float) -> tuple[bool, str]:
    """Return whether a worker answered as planned, and a summary of its answer.

    :param needed_mib: MiB that the plan may place on the worker.
    """
    handshake = handshakes.workers.get(endpoint)
    if not handshake:
        reason = "the launcher on the head recorded no handshake with this worker before llama-server started"
        return False, handshakes.error or reason
    if handshake.state != "ok":
        return False, f"{handshake.state}: {handshake.detail}"
    total_mib = sum(device.total_mib for device in handshake.devices)
    text = f"protocol {handshake.protocol}, {_quantity_text(len(handshake.devices), 'device')}, {total_mib} MiB"
    if len(handshake.devices) == 1 and total_mib >= needed_mib:
        return True, text
    return False, f"{text}, planned: 1 device with {needed_mib} MiB or more"


def _check_buffers(device: DevicePlacement, logged_buffers: Mapping[str, Mapping[str, float]]) -> types.Check:
    """Check that a device holds the planned amounts of the model and its cache."""
    buffers = logged_buffers.get(device.device, {})
    faults, bounds_text = [], ""
    for kind, key, planned_mib in (("model", "weights_mib", device.weights_mib), ("KV", "kv_mib", device.kv_mib)):
        actual_mib = buffers.get(kind, 0.0)
        if key not in device.exact:
            bounds_text += f"; at most {planned_mib} MiB planned for {kind}"
            if kind == "model" and planned_mib and not actual_mib:
                faults.append(f"{kind} {actual_mib} MiB, planned up to {planned_mib}")
        elif abs(actual_mib - planned_mib) > ROUNDING_MIB + planned_mib / 1000:
            faults.append(f"{kind} {actual_mib} MiB, planned {planned_mib}")
    if not faults:
        sizes = ", ".join(f"{kind} {actual_mib} MiB" for kind, actual_mib in buffers.items())
        return _result("buffers", device.device, True, sizes + bounds_text)
    if not logged_buffers:
        return _result("buffers", device.device, None, "start.log on the head lists no buffer sizes")
    return _result("buffers", device.device, False, "; ".join(faults))


def _judge_known_answer(model: ModelPlan, completion: types.Completion | None) -> tuple[bool | None, str]:
    if not (model.known_answer or known_answer.is_model_name(model.name)):
        return None, f"the cluster serves {model.name}, not the known-answer model"
    if not completion or completion.error:
        return False if completion else None, completion.error if completion else ASLEEP_NOTE
    expected_words, words = known_answer.SENTENCE.split(), completion.text.split()
    if words == expected_words:
        text = f"{len(words)} of {len(expected_words)} words correct, through {model.layers} layers (this check does not detect small attention errors)"
        return True, text
    position = next(
        (index for index, (expected, word) in enumerate(zip(expected_words, words)) if expected != word),
        min(len(expected_words), len(words)),
    )
    actual_word, expected_word = (" ".join(map(repr, answer[position:][:1])) for answer in (words, expected_words))
    text = (
        f"word {position + 1}: expected {expected_word or 'the end'}, got {actual_word or 'the end'}: at least one layer computes incorrectly. "
        f"The answer is {completion.text[:300]!r}"
    )
    return False, text


def _judge_completion(completion: types.Completion | None) -> tuple[bool | None, str]:
    if not completion or completion.error:
        return False if completion else None, completion.error if completion else ASLEEP_NOTE
    speed = completion.tokens_per_second
    text = f"{completion.tokens} tokens" + (f", {speed:.1f} tokens per second" if speed else "")
    if not completion.computes_numbers:
        return False, f"{text}, some without a probability: the model produces NaN results"
    return completion.tokens > 0, text
