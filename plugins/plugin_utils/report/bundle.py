# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A bug bundle: one archive of what hosts and playbooks said of a cluster, without secrets."""

from __future__ import annotations

import io
import json
import re
import tarfile
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from typing import Annotated, Any

from ansible_collections.llamacpp.cluster.plugins.module_utils.common import redaction, typed_json, validation
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp import options
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.types import Plan, Refused
from ansible_collections.llamacpp.cluster.plugins.module_utils.status.types import Status
from ansible_collections.llamacpp.cluster.plugins.plugin_utils.report import plan_text, status_text

KNOWN_VARIABLE = re.compile(
    r"(?:GGML|CUDA|HIP|HSA|ROCM|ROCR|ROCBLAS|AMD(?:GPU)?|GPU|VK|MESA|RADV|SYCL|ONEAPI|ZES?|UR|OMP|GOMP|KMP|NCCL|MTMD|CMAKE|BUILD)_\w+|LLAMA_(?!ARG|API)\w+"
    r"|PATH|LD_LIBRARY_PATH|HOME|LANG|LC_\w+|TMPDIR|CC|CXX|C(?:XX|UDA)?FLAGS"
)
"""Of the environment of a process, and of cmake: its value is shown."""
KNOWN_ANSIBLE = re.compile(r"ansible_(?!\w*(?:args|env(?:ironment)?|executable)$)\w+|__llama_\w+|omit|environment")
"""Variables of Ansible whose values are no secrets, and those of playbooks here."""
PLAIN = re.compile(r"[-+]?\d[\d.]*|true|false|on|off|yes|no|auto|none|~?/[\w./+-]*", re.IGNORECASE | re.ASCII)
"""A value that is shown whatever it is of: a number, a word of switches, a path."""
LEAST = 8
"""Characters of a value that is taken out of all texts though no name says that it is a secret."""
DERIVED = ("definition", "content")
"""Keys of the plan whose texts are made from its other values."""
BEFORE_SENDING = "Read it before you send it: it has names and addresses of hosts, and paths of the controller."
Texts = Mapping[str, Annotated[str, validation.Text("(?s).*", 1 << 20)]]
"""What host_report.read returned on a host."""


def secrets_of(variables: Mapping[str, Any], known: Collection[str], shown: str) -> dict[str, str]:
    """Secret → its kind: the texts in an operator's variables, however deep.

    :param known: variables whose values are no secrets.
    :param shown: what stays in the bundle: a value in it is none, unless a name says so.
    """
    found = {}
    for variable, value in variables.items():
        named = bool(redaction.NAME.search(variable))
        if variable not in known and (named or not KNOWN_ANSIBLE.fullmatch(variable)):
            kind = "Ansible password" if variable.startswith("ansible_") else f"value of {variable}"
            found.update(dict.fromkeys(_secret_lines(value, named, shown), kind))
    return found


def _secret_lines(value: Any, named: bool, shown: str) -> Iterator[str]:
    """:param named: whether a name above it says that it is a secret."""
    if isinstance(value, Mapping):
        for name, part in value.items():
            yield from _secret_lines(part, named or bool(redaction.NAME.search(str(name))), shown)
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from _secret_lines(part, named, shown)
    elif isinstance(value, (str, int)) and not isinstance(value, bool):
        for line in str(value).splitlines():
            if named or (len(line) >= LEAST and line not in shown and not PLAIN.fullmatch(line)):
                yield line.strip()


def _given(plan: Mapping[str, Any]) -> dict[str, str]:
    """Value → its kind, of what operators gave to processes and cmake, of which nobody knows that it may be shown."""
    head = plan.get("head") or {"argv": []}
    found = dict(_of_processes(plan))
    for argv in [head["argv"], *(one["argv"] for one in head.get("models") or ())]:
        for word, *values in options.pairs(argv[1:]):
            option, (name, _equals, value) = options.by_word(word), word.partition("=")
            if not option or option.secret:
                found.update(
                    dict.fromkeys([text for text in (value, *values) if not PLAIN.fullmatch(text)], f"value of {name}")
                )
    return found


def _of_processes(value: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """:param name: of the key that holds it."""
    if isinstance(value, list):
        for part in value:
            yield from _of_processes(part)
    elif isinstance(value, Mapping) and name not in ("environment", "cmake_options"):
        for key, part in value.items():
            yield from _of_processes(part, key)
    elif isinstance(value, Mapping):
        for variable, text in value.items():
            if not is_shown(variable, text):
                yield text, f"value of {variable}"


def is_shown(variable: str, value: str) -> bool:
    """Whether the value of a variable of an environment is known to be no secret."""
    known = KNOWN_VARIABLE.fullmatch(variable) or PLAIN.fullmatch(value)
    return bool(known) and not redaction.NAME.search(variable)


def _clean(value: Any, known: Mapping[str, str], name: str = "") -> Any:
    """A JSON value without secrets, and without texts that are made from others of it.

    :param name: of the key that holds it.
    """
    if isinstance(value, Mapping):
        return {key: _clean(part, known, key) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [_clean(part, known, name) for part in value]
    if not isinstance(value, str):
        return value
    if name in DERIVED or (redaction.NAME.search(name) and not PLAIN.fullmatch(value)):
        return redaction.marker(f"{len(value)} characters")
    return redaction.redact(value, known)


def make(found: Mapping[str, Any], known: Mapping[str, str]) -> str:
    """The archive, whose bytes are surrogates.

    :param found: ``plan`` and ``status`` as JSON; host → ``reports``, what host_status returned there, and ``facts``, which are only shown.
    :param known: secret → its kind.
    """
    record: type[Plan | Refused] = Refused if found["plan"]["refused"] else Plan
    status = typed_json.parse(Status, found["status"])
    texts = {
        "README.txt": BEFORE_SENDING,
        "plan.txt": plan_text.plan_page(typed_json.parse(record, found["plan"])),
        "status.txt": status_text.text_of(status),
    }
    known = {**known, **_given(found["plan"])}
    for host, answer in found["reports"].items():
        for name, text in _texts(answer).items():
            texts[f"{host}/{re.sub(r'[^A-Za-z0-9_.-]', '_', name)}"] = _lines(text)
    redacted = {name: redaction.redact(text, known) for name, text in texts.items()}
    redacted |= {
        f"{name}.json": json.dumps(_clean(found[name], known), indent=1) for name in ("plan", "status", "facts")
    }
    return _pack(f"{status.cluster.name}-bundle", redacted, status.time)


def _texts(answer: Any) -> Texts:
    """Nothing of a host that reports something else than the module does."""
    report = answer.get("report") if isinstance(answer, Mapping) else None
    form: Any = Texts
    with suppress(typed_json.Mismatch):
        return typed_json.parse(form, report)
    return {}


def _lines(text: str) -> str:
    """What a host wrote, without what controls a terminal."""
    return "\n".join(validation.printable(line, None) for line in text.replace("\t", "    ").split("\n"))


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
