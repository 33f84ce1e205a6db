# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Plans that a host has recorded below its prefix, each the host's own part: before services change, and again when the plan served."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ansible_collections.llamacpp.cluster.plugins.module_utils.common import files, names, reading, validation
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.errors import Refusal
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan import history

MOST_FILES = 64
"""Files of the folder that are read."""


class History(NamedTuple):
    """What a host has recorded."""

    records: list[dict[str, Any]]
    """As RECORD, the newest first."""
    unreadable: list[str]
    """A sentence for each file that cannot be used."""


def folder(prefix: str) -> Path:
    return Path(prefix) / names.PLANS


def _path(prefix: str, identity: str) -> Path:
    if not re.fullmatch(history.ID.expression, identity):
        raise Refusal(f"{validation.show(identity)} is not the id of a plan: use one that the host has recorded")
    return folder(prefix) / f"{identity}.json"


def read_all(prefix: str) -> History:
    """:raises OSError: the folder cannot be read by this account."""
    records, unreadable = [], []
    try:
        entries = sorted(os.listdir(folder(prefix)))
    except FileNotFoundError:
        return History([], [])
    for name in [entry for entry in entries if entry.endswith(".json")][:MOST_FILES]:
        try:
            records.append(read(prefix, name[: -len(".json")]))
        except Refusal as refusal:
            unreadable.append(validation.printable(refusal))
    return History([dict(record) for record in history.newest_first(records)], unreadable)


def read(prefix: str, identity: str) -> dict[str, Any]:
    """One recorded plan.

    :raises Refusal: it is missing, torn, too large, or has another form; a link is not followed.
    """
    path = _path(prefix, identity)
    try:
        record = reading.read_object(path, history.RECORD_BYTES)
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else str(error)
        raise Refusal(f"{path} cannot be used: {why}") from None
    problem = history.problem(record)
    if not problem and record["id"] != identity:
        problem = validation.Problem("it.id", f"is {record['id']}")
    if problem:
        raise Refusal(f"{path} cannot be used: {problem.where[3:] or 'it'} {problem.why}")
    return record


def summaries(prefix: str) -> list[dict[str, Any]]:
    """As SUMMARY, the newest first; empty where this account may not read them."""
    try:
        return [summary(record) for record in read_all(prefix).records]
    except OSError:
        return []


def summary(record: Mapping[str, Any]) -> dict[str, Any]:
    release = record["release"]
    return {
        **{key: record[key] for key in ("id", "time", "state", "cluster", "hosts")},
        "release": release["ref"],
        "release_id": release["id"],
        "build": release.get("build"),
        "head": bool(record.get("head")),
        "declared": record.get("declared"),
        "spared": record.get("spared"),
    }


def serves(prefix: str, identity: str) -> bool:
    """Whether this is the plan that served last here."""
    return [plan["id"] for plan in history.served(summaries(prefix))[:1]] == [identity]


def builds(prefix: str) -> set[str]:
    """Ids of the builds with which this host can go back: of the newest plans that served."""
    try:
        records = read_all(prefix).records
    except OSError:
        return set()
    return {
        build["id"] for record in history.served(records)[: history.MOST_SERVED] for build in record["host"]["builds"]
    }


def record(prefix: str, plan: Mapping[str, Any], check: bool = False) -> bool:
    """Records a plan that is applied now, unless it is the one that served last; whether anything changes. At most history.MOST stay.

    :raises OSError: nothing is changed.
    """
    present = read_all(prefix).records
    if serves(prefix, plan["id"]):
        return False
    if not check:
        _write(prefix, {**plan, "state": history.APPLYING}, present)
        _remove_old(prefix)
    return True


def mark_served(prefix: str, identity: str, check: bool = False) -> bool:
    """Records that a plan serves; whether anything changes."""
    present = read_all(prefix).records
    if serves(prefix, identity) and present[0]["id"] == identity:
        return False
    if not check:
        _write(prefix, {**read(prefix, identity), "state": history.SERVED}, present)
        _remove_old(prefix)
    return True


def _write(prefix: str, record: Mapping[str, Any], present: list[dict[str, Any]]) -> None:
    """Its time is after those of all others, even where the clock was set back."""
    now = max(int(time.time()), *(other["time"] + 1 for other in present), 0)
    text = json.dumps({**record, "time": now}, separators=(",", ":"))
    if len(text.encode()) > history.RECORD_BYTES:
        raise Refusal(
            f"the plan has {len(text) >> 20} MiB for this host, and {history.RECORD_BYTES >> 20} MiB can be recorded"
        )
    files.replace_file(_path(prefix, record["id"]), text, 0o600)


def _remove_old(prefix: str) -> None:
    """What served last and before stays, and of the others the newest; what a killed run began to write goes."""
    records, needed = read_all(prefix).records, []
    needed += [record["id"] for record in history.served(records)[: history.MOST_SERVED]]
    needed += [record["id"] for record in records if record["id"] not in needed]
    for identity in needed[history.MOST :]:
        _path(prefix, identity).unlink(missing_ok=True)
    for left in folder(prefix).glob(files.TEMPORARY + "*"):
        left.unlink(missing_ok=True)
