# Copyright (c) 2026 the llamacpp.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""A bug bundle: one archive of a cluster's logs, status and plan, without secrets."""

import io
import json
import re
import tarfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Annotated, Any

from ansible_collections.llamacpp.cluster.plugins.module_utils.common import redaction, typed_json, validation
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp import options
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.types import Plan, Refused
from ansible_collections.llamacpp.cluster.plugins.module_utils.status.types import Status
from ansible_collections.llamacpp.cluster.plugins.plugin_utils.report import plan_text, status_text

PUBLIC_NAME_PATTERN = re.compile(
    r"(?:GGML|CUDA|HIP|HSA|ROCM|ROCR|ROCBLAS|AMD(?:GPU)?|GPU|VK|MESA|RADV|SYCL|ONEAPI|ZES?|UR|OMP|GOMP|KMP|NCCL|MTMD|CMAKE|BUILD)_\w+|LLAMA_(?!ARG|API)\w+"
    r"|PATH|LD_LIBRARY_PATH|HOME|LANG|LC_\w+|TMPDIR|CC|CXX|C(?:XX|UDA)?FLAGS"
)
"""Pattern for environment variables of processes, and variables of cmake, whose values are shown."""
ANSIBLE_NAME_PATTERN = re.compile(
    r"ansible_(?!\w*(?:args|env(?:ironment)?|executable)$)\w+|__llama_\w+|omit|environment"
)
"""Pattern for variables of Ansible and of the playbooks whose values are not secret."""
HARMLESS_PATTERN = re.compile(
    r"[-+]?\d[\d.]*|true|false|on|off|yes|no|auto|none|~?/[\w./+-]*", re.IGNORECASE | re.ASCII
)
"""Pattern for values that are shown for any variable: a number, a switch, a path."""
MIN_SECRET_LENGTH = 8
"""Minimum length of a value that is removed from all texts although no name marks it as a secret."""
DERIVED_KEYS = ("definition", "content")
"""Keys of the plan whose texts are derived from other values of the plan."""
README = "Read the bundle before you send it: it contains names and addresses of hosts, and paths on the controller."
LOG_TIP = "No log: set ANSIBLE_LOG_PATH before you run a playbook, or add the failed run's error message to your issue."
JSON_RECORDS = ("plan", "status", "facts", "controller")
"""Records that the bundle contains as JSON."""
ReportTexts = Mapping[str, Annotated[str, validation.Text("(?s).*", 1 << 20)]]
"""Type of the texts, by name, that host_report.read returned on a host."""


def find_secrets(variables: Mapping[str, Any], harmless_names: Collection[str], visible_text: str) -> dict[str, str]:
    """Return each secret text in an operator's variables, at any depth, with its kind.

    :param harmless_names: variables whose values are not secret.
    :param visible_text: text that the bundle shows: values in it are secret only if their names say so.
    """
    secrets = {}
    for variable, value in variables.items():
        is_secret = bool(redaction.SECRET_NAME_PATTERN.search(variable))
        if variable not in harmless_names and (is_secret or not ANSIBLE_NAME_PATTERN.fullmatch(variable)):
            kind = "Ansible password" if variable.startswith("ansible_") else f"value of {variable}"
            secrets.update(dict.fromkeys(_secret_lines(value, is_secret, visible_text), kind))
    return secrets


def _secret_lines(value: Any, is_secret: bool, visible_text: str) -> Iterator[str]:
    """Yield the lines of a value that may be secret."""
    if isinstance(value, Mapping):
        for name, element in value.items():
            yield from _secret_lines(
                element, is_secret or bool(redaction.SECRET_NAME_PATTERN.search(str(name))), visible_text
            )
    elif isinstance(value, (list, tuple)):
        for element in value:
            yield from _secret_lines(element, is_secret, visible_text)
    elif isinstance(value, (str, int)) and not isinstance(value, bool):
        for line in str(value).splitlines():
            if is_secret or (
                len(line) >= MIN_SECRET_LENGTH and line not in visible_text and not HARMLESS_PATTERN.fullmatch(line)
            ):
                yield line.strip()


def _plan_secrets(plan: Mapping[str, Any]) -> dict[str, str]:
    """Return the kind of each secret value among the arguments, environment variables and cmake options in a plan."""
    head = plan.get("head") or {"argv": []}
    secrets = dict(_process_secrets(plan))
    for argv in [head["argv"], *(model["argv"] for model in head.get("models") or ())]:
        secrets.update(_argument_secrets(argv[1:]))
    return secrets


def _argument_secrets(arguments: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield the value and kind of each argument of llama-server that may be secret."""
    for word, *values in options.group_words(arguments):
        option, (name, _equals, value) = options.by_word(word), word.partition("=")
        if not option or option.is_secret:
            for text in (value, *values):
                if not HARMLESS_PATTERN.fullmatch(text):
                    yield text, f"value of {name}"


def _process_secrets(value: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """Yield the value and kind of each environment variable, and of each extra argument, that may be secret."""
    if isinstance(value, list):
        if name.endswith("extra_args"):
            yield from _argument_secrets([str(element) for element in value])
        for element in value:
            yield from _process_secrets(element)
    elif isinstance(value, Mapping) and not name.endswith(("environment", "cmake_options")):
        for key, element in value.items():
            yield from _process_secrets(element, key)
    elif isinstance(value, Mapping):
        for variable, text in value.items():
            if not is_public(variable, str(text)):
                yield str(text), f"value of {variable}"


def is_public(variable: str, value: str) -> bool:
    """Return whether the value of an environment variable is known to be harmless."""
    match = PUBLIC_NAME_PATTERN.fullmatch(variable) or HARMLESS_PATTERN.fullmatch(value)
    return bool(match) and not redaction.SECRET_NAME_PATTERN.search(variable)


def _redact(value: Any, secrets: Mapping[str, str], name: str = "") -> Any:
    """Return a JSON value without secrets, and without texts that are derived from its other values."""
    if isinstance(value, Mapping):
        return {key: _redact(element, secrets, key) for key, element in value.items()}
    if isinstance(value, (list, tuple)):
        return [_redact(element, secrets, name) for element in value]
    if not isinstance(value, str):
        return value
    if name in DERIVED_KEYS or (redaction.SECRET_NAME_PATTERN.search(name) and not HARMLESS_PATTERN.fullmatch(value)):
        return redaction.marker(f"{len(value)} characters")
    return redaction.redact(value, secrets)


def make_bundle(records: Mapping[str, Any], secrets: Mapping[str, str]) -> str:
    """Return the archive as text, with undecodable bytes as surrogate escapes.

    :param records: ``plan`` and ``status`` as JSON; ``reports``, the result of host_status for each host; ``facts`` and ``controller``, which are only
        shown; ``log``, the end of Ansible's log.
    """
    plan_type: type[Plan | Refused] = Refused if records["plan"]["refused"] else Plan
    status = typed_json.parse(Status, records["status"])
    texts = {
        "README.txt": README,
        "plan.txt": plan_text.plan_page(typed_json.parse(plan_type, records["plan"])),
        "status.txt": status_text.text_of(status),
        "ansible.log": _printable_text(records["log"]) or LOG_TIP,
    }
    secrets = {**secrets, **_plan_secrets(records["plan"]), **dict(_process_secrets(records["controller"]))}
    for host, answer in records["reports"].items():
        for name, text in _report_texts(answer).items():
            texts[f"{host}/{re.sub(r'[^A-Za-z0-9_.-]', '_', name)}"] = _printable_text(text)
    redacted_texts = {name: redaction.redact(text, secrets) for name, text in texts.items()}
    redacted_texts |= {f"{name}.json": json.dumps(_redact(records[name], secrets), indent=1) for name in JSON_RECORDS}
    return _pack(f"{status.cluster.name}-bundle", redacted_texts, status.time)


def _report_texts(answer: Any) -> ReportTexts:
    """Return the texts of a host; none if its report is invalid."""
    report = answer.get("report") if isinstance(answer, Mapping) else None
    text_type: Any = ReportTexts
    with suppress(typed_json.Mismatch):
        return typed_json.parse(text_type, report)
    return {}


def _printable_text(text: str) -> str:
    """Return a text without control characters, except for its line breaks."""
    return "\n".join(validation.printable(line, None) for line in text.replace("\t", "    ").split("\n"))


def _pack(folder: str, texts: Mapping[str, str], mtime: int) -> str:
    """Return a .tar.gz of a folder with the texts that are not empty, readable by their owner only."""
    archive_bytes = io.BytesIO()
    with tarfile.open(fileobj=archive_bytes, mode="w:gz") as archive:
        for name, text in sorted(texts.items()):
            data, member = f"{text.rstrip()}\n".encode("utf-8", "replace"), tarfile.TarInfo(f"{folder}/{name}")
            member.size, member.mode, member.mtime = len(data), 0o600, mtime
            if text.strip():
                archive.addfile(member, io.BytesIO(data))
    return archive_bytes.getvalue().decode("utf-8", "surrogateescape")
