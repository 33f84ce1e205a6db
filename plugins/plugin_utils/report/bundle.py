# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A bug bundle: one archive of what hosts and playbooks said of a cluster, without secrets."""

from __future__ import annotations

import io
import json
import re
import tarfile
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, NamedTuple

from ansible_collections.llamacpp.cluster.plugins.module_utils.common import redaction, typed_json, validation
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan import plan_text
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.types import Plan, Refused
from ansible_collections.llamacpp.cluster.plugins.module_utils.status import status_text
from ansible_collections.llamacpp.cluster.plugins.module_utils.status.types import Status

SECRET_NAME = re.compile(r"pass(word|wd|phrase)?$|token$|secret|vault|(api|private)_?keys?$|credential", re.IGNORECASE)
"""Of a variable with a secret."""
LOG_LINES = 40
"""Of the head's log, in the text for an issue."""


class Report(NamedTuple):
    """What host_report.read returned on a host."""

    texts: Mapping[str, Annotated[str, validation.Text("(?s).*", 1 << 20)]]
    removed: Mapping[str, int]


class Found(NamedTuple):
    """What is known of a cluster."""

    plan: Mapping[str, Any]
    status: Status
    reports: Mapping[str, Any]
    """Host → what the module host_status returned there."""
    facts: Mapping[str, Any]
    """Host → its facts, which are only shown."""


def secrets_of(variables: Mapping[str, Any], below: str = "") -> dict[str, str]:
    """Secret → its kind, of variables by their names, however deep.

    :param below: name of the secret variable that holds these.
    """
    found = {}
    for name, value in variables.items():
        secret = below or (name if SECRET_NAME.search(name) else "")
        if isinstance(value, Mapping):
            found.update(secrets_of({str(key): part for key, part in value.items()}, secret))
        elif isinstance(value, (list, tuple)):
            found.update(secrets_of({str(index): part for index, part in enumerate(value)}, secret))
        elif secret and isinstance(value, str):
            found[str(value)] = "Ansible password" if secret.startswith("ansible_") else f"value of {secret}"
    return found


def make(data: Mapping[str, Any], known: Mapping[str, str]) -> tuple[str, dict[str, int]]:
    """The archive, whose bytes are surrogates, and kind of secret → how many were taken out.

    :param data: a Found.
    :param known: secret → its kind.
    """
    found = typed_json.parse(Found, data)
    record: type[Plan | Refused] = Refused if found.plan["refused"] else Plan
    plan = typed_json.parse(record, found.plan)
    reports = {name: _report(answer) for name, answer in found.reports.items()}
    texts = {
        "issue.md": "\n".join(_issue(plan, found, reports)),
        "plan.txt": plan_text.plan_page(plan),
        "plan.json": json.dumps(found.plan, indent=1),
        "status.txt": status_text.text_of(found.status),
        "status.json": json.dumps(typed_json.dump(found.status), indent=1),
        "facts.json": json.dumps(found.facts, indent=1),
    }
    removed: dict[str, int] = {}
    for host, report in reports.items():
        removed = redaction.plus(removed, report.removed)
        texts.update(
            {f"{host}/{re.sub(r'[^A-Za-z0-9_.-]', '_', name)}": _lines(report.texts[name]) for name in report.texts}
        )
    for name, text in texts.items():
        texts[name], kinds = redaction.redact(text, known)
        removed = redaction.plus(removed, kinds)
    texts["README.txt"] = (
        "Read this bundle before you send it: names and addresses of hosts are in it. issue.md is for a new issue of llama.cpp.\n"
        f"Taken out: {counts(removed)}."
    )
    return _pack(f"{found.status.cluster.name}-bundle", texts, found.status.time), removed


def _report(answer: Any) -> Report:
    """Nothing of a host that says something else than the module does."""
    report = answer.get("report") if isinstance(answer, Mapping) else None
    return typed_json.parse(Report, report) if report and not typed_json.problem("", report, Report) else Report({}, {})


def _lines(text: str) -> str:
    """What a host wrote, without what controls a terminal."""
    return "\n".join(validation.printable(line, None) for line in text.replace("\t", "    ").split("\n"))


def counts(removed: Mapping[str, int]) -> str:
    return validation.printable(", ".join(f"{kind}: {number}" for kind, number in sorted(removed.items())) or "nothing")


def _issue(plan: Plan | Refused, found: Found, reports: Mapping[str, Report]) -> list[str]:
    """A text for a new issue of llama.cpp."""
    if isinstance(plan, Refused):
        return ["There is no plan.", *plan.reasons]
    release, head = plan.release, plan.head.host
    about = f"{release.ref}, build {release.build or 'unknown'}, commit {release.commit}, RPC protocol {release.protocol or 'unknown'}"
    service = next(service.name for service in plan.hosts[head].services if service.kind == "head")
    log = _lines(reports.get(head, Report({}, {})).texts.get(f"{service}.log", "")).splitlines()[-LOG_LINES:]
    commands = (
        line
        for one in plan_text.commands(plan)
        for line in (f"# {one.host} {one.name}", *plan_text.command_lines(one.argv, one.environment, ""))
    )
    return [
        *("### Name and version", f"llama.cpp {about}", ""),
        *("### Hosts and devices", *(_host(plan, name, found.facts.get(name)) for name in plan.hosts), ""),
        *("### Command lines", *_block(commands), ""),
        *("### What happened", "(Add what you did, and the newest build that does it right.)"),
        *(f"{problem.rstrip('.')}." for problem in found.status.problems),
        *("", "### End of the log of llama-server", *_block(log)),
    ]


def _block(lines: Iterable[str]) -> list[str]:
    return ["```", *(line.replace("```", "'''") for line in lines), "```"]


def _host(plan: Plan, name: str, facts: Any) -> str:
    known = facts if isinstance(facts, Mapping) else {}
    shown = json.dumps({key: known.get(key) for key in ("distribution", "kernel", "cpu", "memory_mib", "accelerators")})
    lent = [
        f"{worker.name} ({worker.backend} {worker.device}) at {worker.endpoint}" for worker in plan.hosts[name].workers
    ]
    role = "head, " if name == plan.head.host else ""
    return validation.printable(f"- {name}: {role}workers {', '.join(lent) or 'none'}; {shown}")


def _pack(folder: str, texts: Mapping[str, str], time: int) -> str:
    """A .tar.gz of one folder with those files that are not empty, for their owner alone."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        for name, text in sorted(texts.items()):
            data, entry = f"{text.rstrip()}\n".encode("utf-8", "replace"), tarfile.TarInfo(f"{folder}/{name}")
            entry.size, entry.mode, entry.mtime = len(data), 0o600, time
            if text.strip():
                archive.addfile(entry, io.BytesIO(data))
    return packed.getvalue().decode("utf-8", "surrogateescape")
