# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Compares what a cluster does with its plan, check by check.

A check is ``{"name", "subject", "status", "evidence"}``; status is passed, failed or not tested.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import socket
import stat
import time
from pathlib import Path
from typing import Any, NamedTuple

from ansible_collections.llamacpp.cluster.plugins.module_utils.apply import state
from ansible_collections.llamacpp.cluster.plugins.module_utils.launch import runtime
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp import known_answer, rpc

SCHEMA = 1
KNOCK_SECONDS = 1.0
MAX_REPLY_BYTES = 4 * 1024 * 1024
LOGGED_ROUNDING_MIB = 0.005
"""MiB by which a figure with two digits after the point may be wrong: one of the log, or of the plan."""
PROMPT = "The first three prime numbers are"
TOKENS = 16
SECONDS_FOR_ANSWER = 300
ENDS_BEFORE_GIVING_UP = 3
"""So often llama-server may end while verify waits for it."""


# ------------------------------------------------------------------------------------------------ evidence, on the head


def _request(url: str, path: str, key: str | None, body: dict | None = None, seconds: float = 5) -> tuple[int, Any]:
    """Status and JSON of a reply; status 0 and the reason when there is none."""
    headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {key}"} if key else {})}
    connection = http.client.HTTPConnection(url.split("//", 1)[1], timeout=seconds)
    try:
        connection.request("POST" if body else "GET", path, json.dumps(body) if body else None, headers)
        reply = connection.getresponse()
        text = reply.read(MAX_REPLY_BYTES).decode("utf-8", "replace")
        return reply.status, json.loads(text) if reply.status == 200 else text[:2000]
    except (OSError, http.client.HTTPException, ValueError) as error:
        return 0, str(error)
    finally:
        connection.close()


def read_untrusted(path: Path) -> str:
    """The beginning of a file in a folder of the services' account, which may have been replaced by whoever took that account over.

    :raises OSError: it does not exist, or is not a regular file.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    with os.fdopen(descriptor, "rb") as stream:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(f"{path} is not a regular file")
        return stream.read(runtime.START_LOG_BYTES).decode("utf-8", "replace")


def handshakes(path: Path) -> dict:
    """What the launcher recorded: ``workers``, endpoint → answer, and ``error`` where that cannot be read."""
    try:
        workers = json.loads(read_untrusted(path))["workers"]
        return {
            "workers": {
                str(endpoint): {
                    "state": str(answer["state"]),
                    "detail": str(answer["detail"]),
                    "protocol": str(answer["protocol"]),
                    "devices": [{"total_mib": int(device["total_mib"])} for device in answer["devices"]],
                }
                for endpoint, answer in workers.items()
            }
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return {"workers": {}, "error": str(error)}


def ends(path: Path) -> dict:
    """What the launcher recorded of the ends of llama-server: their ``number``, ``how`` the last one came, and the end of its ``log``."""
    try:
        recorded = json.loads(read_untrusted(path))
        return {
            "number": int(recorded["number"]),
            "how": str(recorded["how"]),
            "log": [str(line) for line in list(recorded["log"])[-runtime.LAST_LINES :]],
        }
    except (OSError, ValueError, KeyError, TypeError):
        return {"number": 0, "how": "", "log": []}


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


def first_key(path: str | None) -> str | None:
    return next((line.strip() for line in Path(path).read_text().splitlines() if line.strip()), None) if path else None


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
    for device, kind, size in re.findall(r": +(\S+)(?: +(model|KV|RS|compute))? buffer size =\s*([\d.]+) MiB", log):
        sizes = devices.setdefault(device.removesuffix("_Mapped"), {})
        kind = "KV" if kind == "RS" else kind or "model"
        sizes[kind] = sizes.get(kind, Logged()).plus(Logged(float(size), 1))
    return devices


def wait_for_health(url: str, seconds: float) -> dict:
    """``{"healthy", "said"}`` after at most so many seconds."""
    deadline = time.monotonic() + seconds
    while True:
        status, said = _request(url, "/health", None)
        if status == 200:
            return {"healthy": True, "said": "ok"}
        if time.monotonic() >= deadline:
            return {"healthy": False, "said": "the model is loading" if status == 503 else str(said)}
        time.sleep(0.5)


def _measured(path: Path) -> dict | None:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return None


def waits_for(answers: dict) -> list[str]:
    """What the head's launcher still waits for, a sentence for each worker."""
    return [
        f"it waits for worker {endpoint}: {answer['state']}, {answer['detail']}"
        for endpoint, answer in sorted(answers.items())
        if answer["state"] != "ok"
    ]


def collect(plan: dict, seconds: float) -> dict:
    """Everything that only the head knows.

    :param seconds: how long to wait for the server.
    """
    head = plan["head"]
    own = plan["hosts"][head["host"]]
    folder = Path(own["state"])
    evidence: dict = {"health": wait_for_health(head["url"], seconds)}
    running = state.processes(own["prefix"])
    evidence["ends"] = ends(folder / runtime.ENDS)
    evidence["launched"] = [*head["launcher"], "--", *head["argv"]] in running.values()
    try:
        log = read_untrusted(folder / runtime.START_LOG)
    except OSError:
        log = ""
    evidence["log"] = log.splitlines()[-20:]
    evidence["handshakes"] = handshakes(folder / runtime.HANDSHAKES)
    evidence["links"] = {name: _measured(Path(own["prefix"]) / "links" / f"{name}.json") for name in plan["links"]}
    if not evidence["health"]["healthy"]:
        evidence["waits_for"] = waits_for(evidence["handshakes"]["workers"])
        return evidence
    if not plan["staging"]:
        evidence["drift"] = state.drift(own)
    evidence["buffers"] = buffers(log)
    for worker in (worker for planned in plan["hosts"].values() for worker in planned["workers"] if not worker["used"]):
        address, port = worker["endpoint"].rsplit(":", 1)
        answer = rpc.probe(address, int(port), protocol=worker["protocol"])
        evidence["handshakes"]["workers"][worker["endpoint"]] = answer
    key = first_key(head["api_key_file"])
    question = (
        {"prompt": "", "temperature": 0}
        if plan["model"]["known_answer"]
        else {"prompt": PROMPT, "temperature": 0, "max_tokens": TOKENS}
    )
    status, said = _request(head["url"], "/v1/completions", key, question, SECONDS_FOR_ANSWER)
    if status == 200:
        evidence["completion"] = {
            "text": said["choices"][0]["text"],
            "tokens": said["usage"]["completion_tokens"],
            "fingerprint": said.get("system_fingerprint"),
            "tokens_per_second": said.get("timings", {}).get("predicted_per_second"),
        }
    else:
        evidence["completion"] = {"error": f"status {status}: {said}"}
    return evidence


# ------------------------------------------------------------------------------------------------- judgement, anywhere


def _check(name: str, subject: str, passed: bool | None, evidence: str) -> dict:
    return {
        "name": name,
        "subject": subject,
        "status": {True: "passed", False: "failed", None: "not tested"}[passed],
        "evidence": evidence,
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


def _closed(plan: dict, drifts: dict, knocks: dict[str, str | None]) -> list[dict]:
    checks = []
    accepted = {a["host"] for a in plan["advisories"] if a["id"] == "unprotected-worker" and a["accepted"]}
    for name, planned in plan["hosts"].items():
        for worker in planned["workers"]:
            address = worker["endpoint"].rsplit(":", 1)[0]
            service = (drifts.get(name) or {"services": {}})["services"].get(f"llamacpp-worker-{worker['name']}", {})
            listening = service.get("addresses", [])
            if any(other != address for other in listening):
                checks.append(_check("closed", worker["endpoint"], False, f"it listens on {', '.join(listening)}"))
            elif address.startswith("127.") and listening:
                checks.append(_check("closed", worker["endpoint"], True, "listens on loopback only"))
            else:
                checks.append(
                    _check(
                        "closed",
                        worker["endpoint"],
                        *_judge_knock(planned, worker["endpoint"], knocks, name in accepted),
                    )
                )
    return checks


def _judge_knock(
    planned: dict, endpoint: str, knocks: dict[str, str | None], accepted: bool
) -> tuple[bool | None, str]:
    if endpoint not in knocks:
        return None, "the controller reaches the host at another address, and no other host has tried to connect"
    source = knocks[endpoint]
    if source is None:
        return True, "the controller reaches the host, but not this port"
    if source in {source for rule in planned["firewall"] for source in rule["sources"]}:
        return None, "the controller is the head, and no other host has tried to connect"
    if accepted:
        return None, "the port is open: llama_accept_advisories accepts that (unprotected-worker)"
    return False, f"the controller can connect from {source}: close the port to all hosts but the head"


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


def _handshakes(plan: dict, evidence: dict) -> list[dict]:
    checks = []
    answers = evidence["handshakes"]["workers"]
    capacities = {entry["endpoint"]: entry["capacity_mib"] for entry in plan["placement"]}
    for planned in plan["hosts"].values():
        for worker in planned["workers"]:
            endpoint = worker["endpoint"]
            answer = answers.get(endpoint)
            if not answer:
                checks.append(
                    _check(
                        "handshake",
                        endpoint,
                        False,
                        "the launcher on the head recorded no handshake before llama-server started",
                    )
                )
            elif answer["state"] != "ok":
                checks.append(_check("handshake", endpoint, False, f"{answer['state']}: {answer['detail']}"))
            else:
                total = sum(device["total_mib"] for device in answer["devices"])
                needed = capacities.get(endpoint, 0)
                answered = f"protocol {answer['protocol']}, {len(answer['devices'])} device, {total} MiB"
                right = len(answer["devices"]) == 1 and total >= needed
                checks.append(
                    _check(
                        "handshake",
                        endpoint,
                        right,
                        answered if right else f"{answered}, planned: 1 device with {needed} MiB or more",
                    )
                )
    return checks


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
        checks.append(_check("buffers", entry["device"], not wrong, "; ".join(wrong) or sizes))
    return checks


def _known_answer(plan: dict, evidence: dict) -> dict:
    subject = plan["head"]["url"]
    if not plan["model"]["known_answer"]:
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
    """Whether it makes sense to wait for the server: all workers that it uses run."""
    if plan["staging"]:
        return True
    for name, planned in plan["hosts"].items():
        services = (drifts.get(name) or {"services": {}})["services"]
        for worker in planned["workers"]:
            service = services.get(f"llamacpp-worker-{worker['name']}", {})
            if worker["used"] and service.get("state") != "running":
                return False
    return True


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


def judge(
    plan: dict,
    drifts: dict[str, dict | None],
    evidence: dict,
    knocks: dict[str, str | None],
    staged: dict | None = None,
) -> dict:
    """The report on a cluster.

    :param drifts: host → what state.drift found there, and ``unlike``, a sentence for each release that is not its builder's; None or absent
        where the host did not answer.
    :param evidence: what collect found on the head.
    :param knocks: endpoint at the address where the controller reaches the host → what knock said there.
    :param staged: where staging was asked for, ``reasons`` why there are no instances, and ``checks`` of the report on them.
    :returns: ``{"schema", "cluster", "passed", "checks"}``; passed says that no check failed.
    """
    checks = [] if plan["staging"] else _releases(plan, drifts) + _closed(plan, drifts, knocks) + _links(evidence)
    checks += [_staging(plan, staged)] if staged else []
    health = "; ".join(evidence.get("waits_for") or [evidence["health"]["said"]])
    checks.append(_check("health", plan["head"]["url"], evidence["health"]["healthy"], health))
    if evidence["health"]["healthy"]:
        checks += _handshakes(plan, evidence) + _buffers(plan, evidence)
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
