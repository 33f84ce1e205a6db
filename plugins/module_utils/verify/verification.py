# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Compares what a cluster does with its plan, check by check.

A check is ``{"name", "subject", "status", "evidence"}``; status is passed, failed or not tested.
"""

from __future__ import annotations

import json
import re
import socket
import ssl
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Optional

from ansible_collections.llamacpp.cluster.plugins.module_utils.common import names, reading, typed_json, validation
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.files import replace_file
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.names import VERIFIED, is_loopback
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.validation import (
    Each,
    Maybe,
    Number,
    Text,
    printable,
)
from ansible_collections.llamacpp.cluster.plugins.module_utils.facts import host
from ansible_collections.llamacpp.cluster.plugins.module_utils.host.drift import fallback, serving_record, state
from ansible_collections.llamacpp.cluster.plugins.module_utils.launcher import journal, runtime, server
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp import rpc
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp.model import known_answer
from ansible_collections.llamacpp.cluster.plugins.module_utils.verify import loading

SCHEMA = 1
KNOCK_SECONDS = 1.0
HEALTH_SECONDS = 5
RECORD_BYTES, KEY_BYTES = 1024 * 1024, 64 * 1024
"""Of a file of the launcher's, and of the API keys, at most."""
LINE, DEVICES = 500, 256
"""Characters of a line of the log that are shown, and devices of a log that are kept."""
FAILED_CHECKS = 20
"""That are recorded on the head."""
LOADING = "the model is loading"
"""What is said of a server that answers 503."""
NAMES = 32
"""Of a certificate, that are shown."""
PARTIAL_CHAIN = 0x80000
"""ssl.VERIFY_X509_PARTIAL_CHAIN, which Python names from 3.10 on: a certificate that is trusted itself needs no authority."""
WRONG_FORM = (ValueError, KeyError, TypeError, AttributeError, IndexError)
"""What is raised where values are taken from JSON of another form."""
BUFFER = r": +(\S{1,200})(?: +(model|KV|RS|compute))? buffer size =\s*([0-9]{1,12}(?:\.[0-9]{1,6})?) MiB"
LOGGED_ROUNDING_MIB = 0.005
"""MiB by which a figure with two digits after the point may be wrong: one of the log, or of the plan."""
PROMPT = "The first three prime numbers are"
TOKENS = 16
SECONDS_FOR_ANSWER = 300
ENDS_BEFORE_GIVING_UP = 3
"""So often llama-server may end while verify waits for it."""


# ------------------------------------------------------------------------------------------------ evidence, on the head


def handshakes(path: Path, launchers: Collection[int] = ()) -> dict:
    """What the launcher recorded: ``workers``, endpoint → answer, and ``error`` where that cannot be read.

    :param launchers: processes of the launcher, as far as they are known; what another one recorded is out of date.
    """
    try:
        recorded = reading.read_object(path, RECORD_BYTES)
        if launchers and recorded["process"] not in launchers:
            raise ValueError("it is of an earlier start: the disk may be full or read-only")
        return {"workers": {str(endpoint): _answer(answer) for endpoint, answer in recorded["workers"].items()}}
    except (OSError, *WRONG_FORM) as error:
        why = "it has another form" if isinstance(error, (KeyError, TypeError, AttributeError)) else printable(error)
        return {"workers": {}, "error": f"{path} cannot be used: {why}"}


def _answer(answer: dict) -> dict:
    return {
        "state": printable(answer["state"]),
        "detail": printable(answer["detail"]),
        "protocol": printable(answer["protocol"]),
        "devices": [{"total_mib": int(device["total_mib"])} for device in answer["devices"]],
    }


def ends(path: Path) -> dict:
    """What the launcher recorded of the ends of llama-server: their ``number``, ``how`` the last one came, and the end of its ``log``."""
    try:
        recorded = reading.read_object(path, RECORD_BYTES)
        return {
            "number": int(recorded["number"]),
            "how": printable(recorded["how"]),
            "log": _last_lines(list(recorded["log"])),
        }
    except (OSError, *WRONG_FORM):
        return {"number": 0, "how": "", "log": []}


def _last_lines(lines: list) -> list[str]:
    return [printable(line, LINE) for line in lines[-runtime.LAST_LINES :]]


def ends_at_each_start(evidence: dict, before: int) -> bool:
    """Whether llama-server ended so often since then that waiting makes no sense; if so, it is written into the evidence.

    :param before: number of ends when waiting began.
    """
    recorded = evidence["ends"]
    if recorded["number"] - before < ENDS_BEFORE_GIVING_UP:
        return False
    said = f"llama-server ended {recorded['number'] - before} times while verify waited for it, the last time {recorded['how']}"
    evidence.update(health={"healthy": False, "said": said}, waits_for=[], log=recorded["log"])
    return True


def came_late(evidence: dict, limit: float, progress: loading.Progress | None) -> None:
    """Writes into the evidence of a server that still loads its model that the time is over, how far it came, and what to do.

    :param limit: seconds.
    """
    set_by = "llama_server_start_timeout, or several times the predicted load where that is not set"
    texts = [f"{evidence['health']['said']}, and the limit of {limit:.0f} s is over ({set_by})"]
    texts += [loading.sentence(progress)] if progress else []
    if progress and progress.left_s:
        texts.append(f"set llama_server_start_timeout to {_rounded_up(limit + 2 * progress.left_s)}, since it goes on")
    elif progress and progress.workers:
        least = min(progress.workers, key=lambda worker: (worker.sent_bytes or 0) / (worker.planned_bytes or 1))
        texts.append(
            f"nothing moved in the end: look at the log of the service on the head and at the worker {least.endpoint}, which has the least"
        )
    else:
        texts.append("look at the log of the service on the head, or set llama_server_start_timeout to more")
    evidence["health"] = {"healthy": False, "said": "; ".join(texts)}


def _rounded_up(seconds: float) -> int:
    """To whole hundreds."""
    return -int(-seconds // 100) * 100


def record(prefix: str, verified: dict) -> None:
    """Leaves on the head what a verification has found, for status.

    :param verified: ``passed``, ``failed`` and ``release``.
    :raises OSError: names the file.
    """
    path = Path(prefix, VERIFIED)
    replace_file(path, json.dumps({"schema": SCHEMA, "time": int(time.time()), **verified}) + "\n", 0o644)


def recorded(plan: dict, judged: dict) -> dict:
    """What record writes of a report."""
    failed = [check for check in judged["checks"] if check["status"] == "failed"]
    texts = [f"{check['name']} of {check['subject']}: {check['evidence']}"[:LINE] for check in failed]
    return {"passed": judged["passed"], "failed": texts[:FAILED_CHECKS], "release": plan["release"]["ref"]}


def first_key(path: str | None) -> str | None:
    if not path:
        return None
    lines = reading.read(Path(path), KEY_BYTES, follow=True).decode(*reading.KEY_TEXT).split("\n")
    return next((line.strip() for line in lines if line.strip()), None)


class Logged(NamedTuple):
    """MiB that so many lines of a log add up to, each rounded to two digits after the point."""

    mib: float = 0.0
    lines: int = 0

    def plus(self, other: Logged) -> Logged:
        return Logged(round(self.mib + other.mib, 2), self.lines + other.lines)

    @property
    def rounding(self) -> float:
        """MiB by which the sum may be wrong."""
        return self.lines * LOGGED_ROUNDING_MIB


def buffers(log: str) -> dict[str, dict[str, Logged]]:
    """Device → kind (model; KV, with the states of recurrent layers; compute) → what the log of one start reports. ik_llama.cpp does
    not name the kind model. A processor has several: CPU, AMX, CPU_REPACK and the like."""
    devices: dict[str, dict[str, Logged]] = {}
    for device, kind, size in re.findall(BUFFER, log):
        if device not in devices and len(devices) >= DEVICES:
            continue
        sizes = devices.setdefault(device.removesuffix("_Mapped"), {})
        kind = "KV" if kind == "RS" else kind or "model"
        sizes[kind] = sizes.get(kind, Logged()).plus(Logged(float(size), 1))
    return devices


def connections_by_rdma(log: str) -> int:
    """How many connections to workers the log of one start reports as moved from TCP to RDMA (transport.cpp and transport-apple.cpp of
    ggml-rpc, in the trees of 0.3.25, 0.3.35 and 0.3.36). A connection that stays on TCP is not reported."""
    return len(re.findall(r"\bRDMA(?:\(Apple/UC\))? activated: ", log))


def certificate_of(head: Mapping[str, Any]) -> bytes | None:
    """The certificate that the server is to show; None where it speaks HTTP.

    :raises ValueError: its file has none, or cannot be read.
    """
    path = head["tls_certificate_file"]
    try:
        return reading.first_certificate(_text(path)) if path else None
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise ValueError(f"llama_server_tls_certificate_file is {path!r}, which cannot be used: {why}") from None


def _text(path: str) -> str:
    return reading.read(Path(path), KEY_BYTES, follow=True).decode("utf-8", "replace")


def examine_certificate(url: str, path: str) -> dict:
    """``names`` and ``until`` of the certificate that the server shows, or ``error``, why no client would take it whomever it trusts."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_flags |= PARTIAL_CHAIN
    address, port = _address(url).rsplit(":", 1)
    try:
        context.load_verify_locations(cadata=_text(path))
        with (
            socket.create_connection((address, int(port)), HEALTH_SECONDS) as plain,
            context.wrap_socket(plain) as shown,
        ):
            found = shown.getpeercert() or {}
    except ssl.SSLCertVerificationError as error:
        return {"error": printable(error.verify_message)}
    except (OSError, ValueError) as error:
        return {"error": printable(error)}
    names = [printable(entry[-1]) for entry in found.get("subjectAltName", ())]
    return {"names": names[:NAMES], "until": printable(found["notAfter"])}


def wait_for_health(
    url: str, seconds: float, certificate: bytes | None = None, patience: float = HEALTH_SECONDS
) -> dict:
    """``{"healthy", "said"}`` after at most so many seconds. A server with another certificate is not waited for: it keeps that until it ends.

    :param patience: seconds that one answer may take.
    """
    deadline = time.monotonic() + seconds
    while True:
        reply = reading.ask(_address(url), "/health", patience, certificate=certificate)
        if reply.status == 200:
            return {"healthy": True, "said": "ok"}
        if reply == (0, reading.OTHER_CERTIFICATE) or time.monotonic() >= deadline:
            said = LOADING if reply.status == 503 else _said(reply)
            return {"healthy": False, "said": said}
        time.sleep(0.5)


def _address(url: str) -> str:
    return url.split("//", 1)[1]


def _said(reply: reading.Reply) -> str:
    text = printable(reply.text)
    return f"status {reply.status}: {text}" if reply.status else text


def _answers_of_unused(plan: dict) -> dict:
    """Endpoint → what a worker says now, of those that the head does not hold."""
    answers = {}
    for worker in (worker for planned in plan["hosts"].values() for worker in planned["workers"] if not worker["used"]):
        address, port = worker["endpoint"].rsplit(":", 1)
        answers[worker["endpoint"]] = rpc.probe(address, int(port), protocol=worker["protocol"])
    return answers


def _fallback_of(own: dict, running: dict[int, list[str]]) -> dict:
    """``fallback`` of the evidence, where the head serves on one."""
    served = (fallback.served(service, running, Path(own["state"])) for service in own["services"])
    return next(({"fallback": {"name": one.name, "since": one.since}} for one in served if one), {})


def as_served(plan: dict, evidence: dict) -> dict:
    """The plan as it is while the head serves on a fallback: with its placement and its workers.

    :param evidence: of collect.
    """
    said = evidence.get("fallback")
    served = next((entry for entry in plan["fallbacks"] if entry["without"] == said["name"]), None) if said else None
    if not served:
        return plan

    def used(workers: list[dict]) -> list[dict]:
        return [{**worker, "used": worker["endpoint"] in served["workers"]} for worker in workers]

    hosts = {host: {**planned, "workers": used(planned["workers"])} for host, planned in plan["hosts"].items()}
    return {
        **plan,
        "placement": served["placement"],
        "hosts": hosts,
        "external_workers": used(plan["external_workers"]),
    }


def waits_for(answers: dict) -> list[str]:
    """What the head's launcher still waits for, a sentence for each worker."""
    return [
        f"it waits for worker {endpoint}: {answer['state']}, {answer['detail']}"
        for endpoint, answer in sorted(answers.items())
        if answer["state"] != "ok"
    ]


def remedy(plan: dict, waiting: list[str]) -> str:
    """What to do about workers that the launcher waits for.

    :param waiting: of waits_for.
    """
    elsewhere = [
        worker
        for worker in plan["external_workers"]
        if any(f"worker {worker['endpoint']}:" in sentence for sentence in waiting)
    ]
    others = ", ".join(f"{worker['endpoint']} on {worker['host']}" for worker in elsewhere)
    texts = [f"Nothing here runs {others}: start it there, with a release of the head's protocol."] if elsewhere else []
    if len(elsewhere) < len(waiting):
        texts.append(
            "The worker's process runs, so something between the hosts closes its port, or another head uses it: check the firewalls and the routes "
            "between head and worker."
        )
    return " ".join(texts)


def collect(plan: dict, seconds: float) -> dict:
    """Everything that only the head knows.

    :param seconds: how long to wait for the server.
    """
    head = plan["head"]
    own = plan["hosts"][head["host"]]
    folder = Path(own["state"])
    evidence: dict = {}
    certificate = None
    try:
        certificate = certificate_of(head)
        evidence["health"] = wait_for_health(head["own_url"], seconds, certificate)
    except ValueError as error:
        evidence["health"] = {"healthy": False, "said": printable(error)}
    running = state.processes(own["prefix"], own["account"])
    evidence["ends"] = ends(folder / runtime.ENDS)
    launchers = [pid for pid, argv in running.items() if argv == [*head["launcher"], "--", *head["argv"]]]
    evidence["launched"] = bool(launchers)
    record = serving_record.of_launcher(folder, launchers)
    if record and record.state == serving_record.ASLEEP and evidence["health"]["healthy"]:
        evidence["health"]["said"] = "ok; it slept, and the question of this check woke it"
    evidence.update(_fallback_of(own, running))
    plan = as_served(plan, evidence)
    try:
        log = reading.read(folder / server.START_LOG, server.START_LOG_BYTES).decode("utf-8", "replace")
    except OSError:
        log = ""
    evidence["log"] = _last_lines(log.splitlines())
    evidence["log_complete"] = bool(log) and journal.INCOMPLETE not in log
    evidence["handshakes"] = handshakes(folder / runtime.HANDSHAKES, launchers)
    measured = host.measured_links(own["prefix"])
    evidence["links"] = {name: measured.get(name) for name in plan["links"]}
    if not evidence["health"]["healthy"]:
        evidence["waits_for"] = waits_for(evidence["handshakes"]["workers"])
        if record and record.state == serving_record.LOADING and record.load:
            evidence["load"] = typed_json.dump(record.load)
        return evidence
    if not plan["staging"]:
        evidence["drift"] = state.drift(own)
    first_load = log.partition(server.FALLS_ASLEEP)[0]
    evidence["buffers"] = buffers(first_load)
    evidence["rdma"] = connections_by_rdma(first_load)
    evidence["handshakes"]["workers"].update(_answers_of_unused(plan))
    if certificate:
        evidence["certificate"] = examine_certificate(head["own_url"], head["tls_certificate_file"])
    patience = SECONDS_FOR_ANSWER + (head["start_timeout"] if server.SLEEP in head["argv"] else 0)
    evidence["completion"] = _ask(plan, running, certificate, patience)
    return evidence


def _ask(plan: dict, running: Collection[int], certificate: bytes | None, patience: float) -> dict:
    """What the server answers to the question of this check, as of completion, within so many seconds."""
    head, known = plan["head"], {"prompt": "", "temperature": 0}
    question = known if _is_known(plan) else {"prompt": PROMPT, "temperature": 0, "max_tokens": TOKENS}
    key = first_key(head["api_key_file"])
    place = _address(head["own_url"])
    address, port = place.rsplit(":", 1)

    def objection() -> str | None:
        """The connection stands, so whoever listens now is who gets the key, or nobody does."""
        account = plan["hosts"][head["host"]]["account"]
        stranger = state.stranger_at(address, int(port), running, account) if key else None
        return stranger and f"the API key was not sent: {stranger}"

    return completion(reading.ask(place, "/v1/completions", patience, question, key, objection, certificate))


def completion(reply: reading.Reply) -> dict:
    """``text``, ``tokens``, ``fingerprint`` and ``tokens_per_second`` of llama-server's answer, or ``error``."""
    if reply.status != 200:
        return {"error": _said(reply)}
    try:
        said = reading.parse(reply.text)
        speed = said.get("timings", {}).get("predicted_per_second")
        return {
            "text": printable(said["choices"][0]["text"]),
            "tokens": int(said["usage"]["completion_tokens"]),
            "fingerprint": said.get("system_fingerprint") and printable(said["system_fingerprint"]),
            "tokens_per_second": None if speed is None else float(speed),
        }
    except WRONG_FORM as error:
        return {
            "error": f"the answer is not one of llama-server ({printable(error, LINE)}): {printable(reply.text, LINE)}"
        }


# ------------------------------------------------------------------------------------------------- judgement, anywhere


LINES = [Text(longest=8192)]
FIGURE = Maybe(Number(real=True))
EVIDENCE = {
    "health": {"healthy": bool, "said": LINES[0]},
    "ends": {"number": Number(), "how": LINES[0], "log": LINES},
    "launched": bool,
    "log": LINES,
    "log_complete": bool,
    "handshakes": {
        "workers": Each(
            {"state": LINES[0], "detail": LINES[0], "protocol": Maybe(Text()), "devices": [{"total_mib": Number()}]}
        ),
        "error": Maybe(LINES[0]),
    },
    "links": Each(Maybe({"mbit_per_second": FIGURE, "round_trip_ms": FIGURE, "detail": LINES[0]})),
    "waits_for": Maybe(LINES),
    "load": typed_json.shape(Optional[serving_record.Load]),
    "fallback": Maybe({"name": Text(), "since": Number()}),
    "certificate": Maybe({"names": Maybe(LINES), "until": Maybe(LINES[0]), "error": Maybe(LINES[0])}),
}
HEALTHY = {
    "buffers": Each(Each([Number(real=True)])),
    "rdma": Number(),
    "completion": {"text": LINES[0], "tokens": Number(), "tokens_per_second": FIGURE},
}
"""The form of what collect returns: always, and of a server that is healthy."""


def check_evidence(head: str, evidence: Any) -> dict:
    """The evidence of collect, complete.

    :param head: name of the host.
    :raises Refusal: it has another form: a head that was taken over reports anything.
    """
    evidence = validation.reported(head, "the server", evidence, EVIDENCE)
    if evidence["health"]["healthy"]:
        failed = isinstance(evidence.get("completion"), dict) and "error" in evidence["completion"]
        form = {**HEALTHY, **({"completion": {"error": LINES[0]}} if failed else {})}
        evidence = validation.reported(head, "the server", evidence, form)
        if any(len(pair) != 2 for kinds in evidence["buffers"].values() for pair in kinds.values()):
            raise validation.another_form(
                head, "the server", validation.Problem("it.buffers", "has other lists than pairs")
            )
    return evidence


def _check(name: str, subject: str, passed: bool | None, evidence: str) -> dict:
    return {
        "name": name,
        "subject": subject,
        "status": {True: "passed", False: "failed", None: "not tested"}[passed],
        "evidence": printable(evidence),
    }


def _count(number: int, thing: str) -> str:
    return f"{number} {thing}" if number == 1 else f"{number} {thing}{'es' if thing.endswith('s') else 's'}"


def _releases(plan: dict, drifts: dict) -> list[dict]:
    checks = []
    for name, planned in plan["hosts"].items():
        drift = drifts.get(name)
        if drift is None:
            checks.append(
                _check("release", name, False, "the host does not answer: nothing was changed or compared there")
            )
            continue
        wrong = [
            f"{service['name']} is {drift['services'][service['name']]['state']}"
            for service in planned["services"]
            if drift["services"][service["name"]]["state"] != "running"
        ]
        wrong += [f"{service} runs, but is not planned" for service in drift["stale"]]
        wrong += drift.get("unlike", [])
        wrong += _held_by_others(planned, drift)
        checks.append(
            _check(
                "release",
                name,
                not wrong,
                ", ".join(wrong)
                or f"{_count(len(planned['services']), 'process')} of {', '.join(build['id'] for build in planned['builds'])} as planned",
            )
        )
    return checks


def _held_by_others(planned: dict, drift: dict) -> list[str]:
    """Workers to which something else than the head has a connection, as their own host sees it. A worker serves one client."""
    texts = []
    for service in planned["services"]:
        if service["kind"] == "worker":
            strangers = set(drift["services"][service["name"]]["clients"]) - set(_heads_addresses(planned, service))
            texts += [
                f"{service['name']} has a connection from {address}, which is not the head"
                for address in sorted(strangers)
            ]
    return texts


def _heads_addresses(planned: dict, service: dict) -> list[str]:
    address, port = service["listens"].rsplit(":", 1)
    rules = [rule for rule in planned["firewall"] if rule["port"] == int(port)]
    return [source for rule in rules for source in rule["sources"]] or [address]


def knock(endpoint: str) -> str | None:
    """Tries to connect and sends nothing; its own address, or None where the connection is refused or dropped."""
    address, port = endpoint.rsplit(":", 1)
    try:
        with socket.create_connection((address, int(port)), KNOCK_SECONDS) as connection:
            return connection.getsockname()[0]
    except OSError:
        return None


class Try(NamedTuple):
    """An attempt of somebody else than the head to connect to a worker, who reached its host."""

    by: str
    source: str
    is_open: bool


def _tries(drifts: dict, knocks: dict[str, str | None], counts: Callable[[str, str], bool]) -> dict[str, list[Try]]:
    """Endpoint → the attempts of the controller and of other hosts.

    :param counts: whether a host was asked to try an endpoint, and has tried after that endpoint's host was changed.
    """
    tries = {endpoint: [Try("the controller", source or "", source is not None)] for endpoint, source in knocks.items()}
    for name, drift in drifts.items():
        for knock in (drift or {}).get("knocks") or []:
            if counts(name, knock["endpoint"]):
                tries.setdefault(knock["endpoint"], []).append(Try(name, knock["source"], knock["open"]))
    return tries


def _closed(plan: dict, drifts: dict, knocks: dict[str, str | None], changed: Collection[str] = ()) -> list[dict]:
    checks = []
    accepted = {
        host
        for advisory in plan["advisories"]
        if advisory["id"] == "unprotected-worker" and advisory["accepted"]
        for host in advisory["hosts"]
    }
    owners = {worker["endpoint"]: name for name, planned in plan["hosts"].items() for worker in planned["workers"]}

    def counts(name: str, endpoint: str) -> bool:
        stale = owners.get(endpoint) in changed and name not in changed
        return endpoint in plan["hosts"][name]["knocks"] and not stale

    tries, own = _tries(drifts, knocks, counts), names.of(plan["cluster"])
    for name, planned in plan["hosts"].items():
        for worker in planned["workers"]:
            address = worker["listens"].rsplit(":", 1)[0]
            service = (drifts.get(name) or {"services": {}})["services"].get(
                own.service(f"worker-{worker['name']}"), {}
            )
            listening = service.get("addresses", [])
            if any(other != address for other in listening):
                judged: tuple[bool | None, str] = False, f"it listens on {', '.join(listening)}"
            elif is_loopback(address) and listening:
                judged = True, "listens on loopback only"
            else:
                judged = _judge_tries(planned, tries.get(worker["endpoint"], []), name in accepted)
            checks.append(_check("closed", worker["endpoint"], *judged))
    return [
        *checks,
        *(
            _check(
                "closed", worker["endpoint"], None, f"{worker['host']} runs it by itself: only a look there can tell"
            )
            for worker in plan["external_workers"]
        ),
    ]


def _judge_tries(planned: dict, tries: list[Try], accepted: bool) -> tuple[bool | None, str]:
    heads = {source for rule in planned["firewall"] for source in rule["sources"]}
    for attempt in tries:
        if attempt.is_open and attempt.source not in heads:
            if accepted:
                return None, "the port is open: llama_accept_advisories accepts that (unprotected-worker)"
            return False, f"{attempt.by} can connect from {attempt.source}: close the port to all hosts but the head"
    for attempt in tries:
        if not attempt.is_open:
            origin = f" from {attempt.source}" if attempt.source else ""
            return True, f"{attempt.by} reaches the host{origin}, but not this port"
    if tries:
        return None, "the controller is the head, and no other host could try to connect"
    return None, "the controller reaches the host at another address, and no other host could try to connect"


def _links(evidence: dict) -> list[dict]:
    """What the last measurement of each link gave. No threshold: what is enough depends on the model."""
    checks = []
    for name, measured in evidence["links"].items():
        texts = []
        if measured and measured["mbit_per_second"] is not None:
            texts.append(f"{measured['mbit_per_second']:.0f} Mbit/s")
        if measured and measured["round_trip_ms"] is not None:
            texts.append(f"round trip {measured['round_trip_ms']:.2f} ms")
        if measured and measured["detail"]:
            texts.append(measured["detail"])
        passed = None if not measured else measured["round_trip_ms"] is not None
        checks.append(
            _check("link", name, passed, ", ".join(texts) or "not measured yet: set llama_link_measure to true")
        )
    return checks


def _transport(plan: dict, evidence: dict) -> str:
    """How llama-server reaches the workers that it uses, as far as its log says."""
    used = sum(worker["used"] for planned in plan["hosts"].values() for worker in planned["workers"])
    if not evidence["log_complete"]:
        return "over TCP or RDMA: start.log on the head is incomplete"
    if not evidence["rdma"]:
        return "over TCP"
    return "over RDMA" if evidence["rdma"] >= used else f"over TCP or RDMA: {evidence['rdma']} of {used} use RDMA"


def _handshakes(plan: dict, evidence: dict) -> list[dict]:
    """Of workers that others run only those are asked that the plan uses: any other one may serve somebody else."""
    recorded = evidence["handshakes"]
    needed = {entry["endpoint"]: entry["capacity_mib"] for entry in plan["placement"]}
    own = [worker["endpoint"] for planned in plan["hosts"].values() for worker in planned["workers"]]
    used = [worker["endpoint"] for worker in plan["external_workers"] if worker["used"]]
    transport = _transport(plan, evidence)
    checks = [
        _check("handshake", endpoint, *_judge_answer(recorded, endpoint, needed.get(endpoint), transport))
        for endpoint in [*own, *used]
    ]
    return checks + [
        _check(
            "handshake", worker["endpoint"], None, f"{worker['host']} runs it by itself, and the plan does not use it"
        )
        for worker in plan["external_workers"]
        if not worker["used"]
    ]


def _judge_answer(recorded: dict, endpoint: str, needed: int | None, transport: str) -> tuple[bool, str]:
    """Whether a worker answered as planned, and what it said.

    :param needed: MiB that the plan may put there; None where it puts nothing there.
    :param transport: of the workers that the plan uses.
    """
    answer = recorded["workers"].get(endpoint)
    if not answer:
        missing = "the launcher on the head recorded no handshake before llama-server started"
        return False, recorded.get("error") or missing
    if answer["state"] != "ok":
        return False, f"{answer['state']}: {answer['detail']}"
    total = sum(device["total_mib"] for device in answer["devices"])
    answered = f"protocol {answer['protocol']}, {len(answer['devices'])} device, {total} MiB"
    answered += f", {transport}" if needed is not None else ""
    right = len(answer["devices"]) == 1 and total >= (needed or 0)
    return right, answered if right else f"{answered}, planned: 1 device with {needed or 0} MiB or more"


def _why_no_buffers(evidence: dict) -> str:
    """Why the log of the head says nothing of buffers that are missing in it; empty where it does."""
    if not evidence["log_complete"]:
        return "start.log on the head is incomplete, as where its disk is full"
    if not evidence["buffers"]:
        return "start.log on the head has no sizes of buffers: this llama-server does not log them, or logs them with a higher --log-verbosity only"
    return ""


def _buffers(plan: dict, evidence: dict) -> list[dict]:
    checks = []
    for entry in plan["placement"]:
        logged = {kind: Logged(*values) for kind, values in evidence["buffers"].get(entry["device"], {}).items()}
        wrong, bounds = [], ""
        for kind, key in (("model", "weights_mib"), ("KV", "kv_mib")):
            entries = logged.get(kind, Logged())
            size, rounding = entries.mib, entries.rounding + LOGGED_ROUNDING_MIB
            if key not in entry["exact"]:
                bounds += f", {kind} planned up to {entry[key]} MiB"
                if kind == "model" and entry[key] and not size:
                    wrong.append(f"{kind} {size} MiB, planned up to {entry[key]}")
            elif abs(size - entry[key]) > rounding + entry[key] / 1000:
                wrong.append(f"{kind} {size} MiB, planned {entry[key]}")
        sizes = ", ".join(f"{kind} {entries.mib} MiB" for kind, entries in logged.items()) + bounds
        unreadable = _why_no_buffers(evidence)
        if wrong and unreadable:
            checks.append(_check("buffers", entry["device"], None, unreadable))
        else:
            checks.append(_check("buffers", entry["device"], not wrong, "; ".join(wrong) or sizes))
    return checks


def _is_known(plan: dict) -> bool:
    return bool(plan["model"]["known_answer"]) or known_answer.is_name(plan["model"]["name"])


def _known_answer(plan: dict, evidence: dict) -> dict:
    subject = plan["head"]["url"]
    if not _is_known(plan):
        return _check("known answer", subject, None, f"{plan['model']['name']} is served, not the known-answer model")
    if "error" in evidence["completion"]:
        return _check("known answer", subject, False, evidence["completion"]["error"])
    expected, got = known_answer.SENTENCE.split(), evidence["completion"]["text"].split()
    if got == expected:
        return _check(
            "known answer",
            subject,
            True,
            f"{len(got)} of {len(expected)} words right, through {plan['model']['layers']} layers (small faults of attention go unnoticed)",
        )
    pairs = zip(expected, got)
    wrong = next((index for index, pair in enumerate(pairs) if pair[0] != pair[1]), min(len(expected), len(got)))
    evidence_text = (
        f"word {wrong + 1} is {' '.join(got[wrong : wrong + 1]) or 'missing'!r}, "
        f"expected {' '.join(expected[wrong : wrong + 1]) or 'the end'!r}: at least one layer computes wrong. "
        f"The answer is {evidence['completion']['text'][:300]!r}"
    )
    return _check("known answer", subject, False, evidence_text)


def _certificate(plan: dict, evidence: dict) -> list[dict]:
    """Of a server that speaks HTTPS: that a client who trusts it takes its certificate, and by which names."""
    shown = evidence.get("certificate")
    if not shown:
        return []
    subject = plan["head"]["tls_certificate_file"] or plan["head"]["url"]
    if shown.get("error"):
        return [_check("certificate", subject, False, f"{shown['error']}: clients refuse it")]
    named = f"for {', '.join(shown['names'])}" if shown.get("names") else "for no name, so that most clients refuse it"
    return [_check("certificate", subject, True, f"{named}; valid until {shown.get('until')}")]


def _completion(plan: dict, evidence: dict) -> dict:
    said = evidence["completion"]
    if "error" in said:
        return _check("completion", plan["head"]["url"], False, said["error"])
    speed = said["tokens_per_second"]
    return _check(
        "completion",
        plan["head"]["url"],
        said["tokens"] > 0,
        f"{said['tokens']} tokens" + (f", {speed:.1f} tokens per second" if speed else ""),
    )


def may_become_healthy(plan: dict, drifts: dict[str, dict | None]) -> bool:
    """Whether it makes sense to wait for the server: all workers run that it uses, or that a fallback of it needs."""
    if plan["staging"]:
        return True
    known = names.of(plan["cluster"])
    own: dict[str, bool] = {}
    needed: list[list[str]] = [[]]
    for name, planned in plan["hosts"].items():
        services = (drifts.get(name) or {"services": {}})["services"]
        for worker in planned["workers"]:
            service = services.get(known.service(f"worker-{worker['name']}"), {})
            own[worker["endpoint"]] = service.get("state") == "running"
            needed[0] += [worker["endpoint"]] if worker["used"] else []
    if plan["head"]["fallback_after"] is not None:
        needed += [entry["workers"] for entry in plan["fallbacks"]]
    return any(all(own.get(endpoint, True) for endpoint in endpoints) for endpoints in needed)


def _fallback(plan: dict, evidence: dict) -> list[dict]:
    """Whether the whole plan is served, where the head may serve on a fallback."""
    if plan["head"]["fallback_after"] is None:
        return []
    served = evidence.get("fallback")
    if not served:
        spared = f"{len(plan['fallbacks'])} of {len(plan['fallbacks']) + len(plan['no_fallback'])}"
        return [_check("fallback", plan["head"]["url"], True, f"not needed; planned for {spared} losses")]
    since = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(served["since"]))
    said = (
        f"the head serves without {served['name']} since {since} UTC, and with all workers again once that one answers"
    )
    return [_check("fallback", plan["head"]["url"], False, said)]


def _staging(plan: dict, staged: dict) -> dict:
    """What the instances on the staging ports proved.

    :param staged: ``reasons`` why they were not started, and ``checks`` of the report on them, where there is one.
    """
    subject = plan["release"]["ref"]
    if staged["reasons"]:
        return _check("staging", subject, None, "; ".join(staged["reasons"]))
    if "checks" not in staged:
        return _check("staging", subject, False, "its instances did not start: see the errors above")
    checks = staged["checks"]
    failed = [check for check in checks if check["status"] == "failed"]
    if failed:
        reasons = "; ".join(f"{check['name']} of {check['subject']}: {check['evidence']}" for check in failed)
        return _check("staging", subject, False, reasons)
    answer = next(check for check in checks if check["name"] == "known answer")
    devices = sum(check["name"] == "buffers" for check in checks)
    return _check(
        "staging", subject, True, f"{answer['evidence']}, on the staging ports of {_count(devices, 'worker')}"
    )


def gate(plan: dict, evidence: dict) -> str | None:
    """Why a head that was started does not serve, with the last lines of its log; None where it is healthy and has answered.

    :param plan: with ``head``, ``model`` and ``external_workers``.
    """
    if not evidence["health"]["healthy"]:
        waiting = evidence.get("waits_for") or []
        said = "; ".join(waiting or [evidence["health"]["said"]])
        help_for = f" {remedy(plan, waiting)}" if waiting else ""
        log = "".join(f"\n{line}" for line in evidence["log"])
        return f"llama-server is not healthy: {said}.{help_for}" + (f" Its log ends in:{log}" if log else "")
    checks = [_completion(plan, evidence), *([_known_answer(plan, evidence)] if _is_known(plan) else [])]
    wrong = [f"{check['name']}: {check['evidence']}" for check in checks if check["status"] == "failed"]
    return f"llama-server does not answer as it should: {'; '.join(wrong)}" if wrong else None


def judge(
    plan: dict,
    drifts: dict[str, dict | None],
    evidence: dict,
    knocks: dict[str, str | None],
    staged: dict | None = None,
    changed: Collection[str] = (),
) -> dict:
    """The report on a cluster.

    :param drifts: host → what state.drift found there, and ``unlike``, a sentence for each release that is not its builder's; None or absent
        where the host did not answer.
    :param evidence: what collect found on the head.
    :param knocks: endpoint at the address where the controller reaches the host → what knock said there.
    :param staged: where staging was asked for, ``reasons`` why there are no instances, and ``checks`` of the report on them.
    :param changed: hosts that the run changed, and that were compared again since.
    :returns: ``{"schema", "cluster", "passed", "checks"}``; passed says that no check failed.
    """
    checks = _fallback(plan, evidence) if evidence["health"]["healthy"] else []
    plan = as_served(plan, evidence)
    checks += (
        [] if plan["staging"] else _releases(plan, drifts) + _closed(plan, drifts, knocks, changed) + _links(evidence)
    )
    checks += [_staging(plan, staged)] if staged else []
    health = "; ".join(evidence.get("waits_for") or [evidence["health"]["said"]])
    checks.append(_check("health", plan["head"]["url"], evidence["health"]["healthy"], health))
    if evidence["health"]["healthy"]:
        checks += _certificate(plan, evidence) + _handshakes(plan, evidence) + _buffers(plan, evidence)
        checks += [_known_answer(plan, evidence), _completion(plan, evidence)]
    else:
        checks += [
            _check(name, plan["head"]["url"], None, "the server is not healthy")
            for name in ("handshake", "buffers", "known answer", "completion")
        ]
    return {
        "schema": SCHEMA,
        "cluster": plan["cluster"],
        "passed": not any(check["status"] == "failed" for check in checks),
        "checks": checks,
    }
