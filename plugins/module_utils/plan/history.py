# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The form of a plan that a host has recorded: its own part, as it was applied. Readers do not trust it."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any

from ansible_collections.llamacpp.cluster.plugins.module_utils.common import names, service_managers, validation
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.validation import (
    Each,
    Maybe,
    Number,
    Problem,
    Text,
)

SCHEMA = 1
APPLYING, SERVED = "applying", "served"
MOST, MOST_SERVED = 5, 2
"""Recorded plans of a host, and those that served among them which are never removed: what runs, and what to go back to."""
RECORD_BYTES, TEXT_CHARACTERS = 32 << 20, 16 << 20
"""Of a record, and of a definition or a file in it. The head's facts are most of it, about 20 kB for each host."""

ID = Text(r"[0-9a-f]{16}", 16)
WORD = Text(r"[A-Za-z0-9_][A-Za-z0-9_.+@-]*")
"""Of which file names are made: never a folder."""
LINE = Text(longest=4096)
PATH = Text(r"/.*", 4096)
PORT = Number(1, 65535)
ADDRESS = Text(r"[0-9./]+")
SUMMARY: dict[str, Any] = {
    "id": ID,
    "time": Number(),
    "state": (APPLYING, SERVED),
    "release": LINE,
    "release_id": LINE,
    "build": Maybe(Number()),
    "cluster": LINE,
    "hosts": [Text()],
    "head": bool,
    "declared": Maybe(LINE),
    "spared": Maybe(Each(bool)),
}
"""What a host reports of each plan that it has recorded. ``declared`` is what llama_release has to be for it; ``spared`` says which hosts may be away, and
whether the head serves on a fallback then, as it is with hosts of which it uses something."""
SERVICE = {
    "name": WORD,
    "kind": ("worker", "head"),
    "temporary": bool,
    "listens": Text(r"[0-9.]+:[0-9]+"),
    "protocol": Maybe(Text(r"[0-9.]*")),
    "argv": [LINE],
    "process": [LINE],
    "environment": Each(LINE),
    "reads": [PATH],
}
PART: dict[str, Any] = {
    "scope": ("system", "user"),
    **dict.fromkeys(("prefix", "cache", "units", "state"), PATH),
    "service_manager": tuple(service_managers.MANAGERS),
    "account": Maybe(WORD),
    "names": Each(LINE),
    "host_settings": bool,
    "firewall_manager": Maybe(names.FIREWALLS),
    "firewall": [{"port": PORT, "protocol": ("tcp",), "sources": [ADDRESS], "address": ADDRESS}],
    "links": [
        {
            "address": LINE,
            "manage": bool,
            **dict.fromkeys(("interface", "peer"), Maybe(LINE)),
            "mtu": Maybe(Number(names.MTU[0], names.MTU[-1])),
        }
    ],
    "knocks": [Text(r"[0-9.]+:[0-9]+")],
    "tuning": {"parameters": Each(LINE), "profile": LINE, "reboot": bool},
    "accounts": [{"name": WORD, "groups": [WORD]}],
    "folders": [{"path": PATH, "owner": Maybe(WORD), "mode": Maybe(Text(r"0[0-7]{3}"))}],
    "builds": [{"id": WORD, "targets": [WORD]}],
    "keep_releases": Number(1),
    "workers": [{"name": WORD, "endpoint": Text(), "used": bool, "protocol": Maybe(Text(r"[0-9.]*"))}],
    "services": [SERVICE],
    "files": [
        {
            "path": PATH,
            "bytes": Number(),
            "mode": Maybe(Text(r"0[0-7]{3}")),
            "sha256": Maybe(Text(r"[0-9a-f]{64}")),
            "record": Maybe(PATH),
        }
    ],
}
"""The host's part, as far as going back to it reads it."""
HEAD = {
    "host": Text(),
    "argv": [LINE],
    "launcher": [LINE],
    "url": LINE,
    "own_url": Text(r"https?://[0-9.]+:[0-9]+"),
    "start_timeout": Number(1, 7 * 86400),
    "fallback_after": Maybe(Number(1, 7 * 86400)),
    "api_key_file": Maybe(PATH),
    "tls_certificate_file": Maybe(PATH),
}
RECORD: dict[str, Any] = {
    "schema": (SCHEMA,),
    "id": ID,
    "cluster": LINE,
    "time": Number(),
    "state": (APPLYING, SERVED),
    "name": Text(),
    "hosts": [Text()],
    "release": {"id": LINE, "ref": LINE, "build": Maybe(Number())},
    "model": {"path": PATH, "known_answer": Maybe({})},
    "declared": Maybe(LINE),
    "spared": Maybe(Each(bool)),
    "host": PART,
    "head": Maybe(HEAD),
}


def newest_first(plans: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """:param plans: of the shape SUMMARY or RECORD."""
    return sorted(plans, key=lambda plan: int(plan["time"]), reverse=True)


def served(plans: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Those that served, the newest first."""
    return [plan for plan in newest_first(plans) if plan["state"] == SERVED]


def problem(record: Any) -> Problem | None:
    """Why a record cannot be used; None where it can. Definitions and files are the only texts with several lines."""
    if not isinstance(record, Mapping):
        return Problem("it", "is not a mapping")
    part = record.get("host")
    blocks: list[Any] = []
    if isinstance(part, Mapping):
        part, blocks = _without_texts(part)
    read = {**record, "host": part}
    found = validation.problem("it", read) or _schema(record) or validation.mismatch("it", read, _SHAPE)
    if found:
        return found
    bad = next((text for text in blocks if not _is_text(text)), None)
    if bad is not None:
        return Problem("it", "has a definition or a file that is no text")
    return _outside(read["host"])


_SHAPE = {key: shape for key, shape in RECORD.items() if key != "schema"}


def _schema(record: Mapping[str, Any]) -> Problem | None:
    schema = record.get("schema")
    same = isinstance(schema, int) and not isinstance(schema, bool) and schema == SCHEMA
    return None if same else Problem("it.schema", f"is {validation.show(record.get('schema'))}, not {SCHEMA}")


def _without_texts(part: Mapping[str, Any]) -> tuple[dict[str, Any], list[Any]]:
    """A part without the definitions and the contents of its files, and these."""
    texts: list[Any] = []
    rest = dict(part)
    for group, key in (("services", "definition"), ("files", "content")):
        entries = part.get(group)
        if isinstance(entries, list) and all(isinstance(entry, Mapping) for entry in entries):
            texts += [entry.get(key, "" if group == "files" else None) for entry in entries]
            rest[group] = [{name: value for name, value in entry.items() if name != key} for entry in entries]
    return rest, texts


def _is_text(text: Any) -> bool:
    if not isinstance(text, str) or len(text) > TEXT_CHARACTERS:
        return False
    return all(validation.is_plain(line) for line in text.replace("\t", " ").split("\n"))


def _outside(part: Mapping[str, Any]) -> Problem | None:
    """A file that is not where the installation is."""
    for file in part["files"]:
        for path in filter(None, (file["path"], file.get("record"))):
            if os.path.normpath(path) != path or not path.startswith(part["prefix"] + "/"):
                return Problem("it.host.files", f"has {validation.show(path)}, which is not below {part['prefix']}")
    for folder in part["folders"]:
        if os.path.normpath(folder["path"]) != folder["path"]:
            return Problem("it.host.folders", f"has {validation.show(folder['path'])}")
    return None
