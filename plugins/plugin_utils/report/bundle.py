# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""A bug bundle: one archive of what hosts and playbooks said of a cluster, without secrets."""

from __future__ import annotations

import io
import json
import re
import tarfile
from collections.abc import Mapping
from contextlib import suppress
from typing import Annotated, Any

from ansible_collections.llamacpp.cluster.plugins.module_utils.common import redaction, typed_json, validation
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan import plan_text
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.types import Plan, Refused
from ansible_collections.llamacpp.cluster.plugins.module_utils.status import status_text
from ansible_collections.llamacpp.cluster.plugins.module_utils.status.types import Status

SECRET_NAME = re.compile(r"pass(word|wd|phrase)?$|token$|secret|vault|(api|private)_?keys?$|credential", re.IGNORECASE)
"""Of a variable with a secret."""
Texts = Mapping[str, Annotated[str, validation.Text("(?s).*", 1 << 20)]]
"""What host_report.read returned on a host."""


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


def make(found: Mapping[str, Any], known: Mapping[str, str]) -> str:
    """The archive, whose bytes are surrogates.

    :param found: ``plan`` and ``status`` as JSON; host → ``reports``, what host_status returned there, and ``facts``, which are only shown.
    :param known: secret → its kind.
    """
    record: type[Plan | Refused] = Refused if found["plan"]["refused"] else Plan
    status = typed_json.parse(Status, found["status"])
    texts = {
        "README.txt": "Read this bundle before you send it: names and addresses of hosts are in it.",
        "plan.txt": plan_text.plan_page(typed_json.parse(record, found["plan"])),
        "status.txt": status_text.text_of(status),
        **{f"{name}.json": json.dumps(found[name], indent=1) for name in ("plan", "status", "facts")},
    }
    for host, answer in found["reports"].items():
        for name, text in _texts(answer).items():
            texts[f"{host}/{re.sub(r'[^A-Za-z0-9_.-]', '_', name)}"] = _lines(text)
    redacted = {name: redaction.redact(text, known) for name, text in texts.items()}
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
