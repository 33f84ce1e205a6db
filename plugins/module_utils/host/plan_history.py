# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Plans that a host has recorded below its prefix, each the host's own part: before services change, and again when the plan served."""

from __future__ import annotations

import json
import os
import re
import time
from pathlib import Path
from typing import NamedTuple

from ansible_collections.llamacpp.cluster.plugins.module_utils.common import (
    files,
    names,
    reading,
    typed_json,
    validation,
)
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.errors import Refusal
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan import history
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.history import PlanRecord, PlanSummary

MOST_FILES = 64
"""Files of the folder that are read."""


class History(NamedTuple):
    """What a host has recorded."""

    records: list[PlanRecord]
    """The newest first."""
    unreadable: list[str]
    """A sentence for each file that cannot be used."""


def folder(prefix: str) -> Path:
    return Path(prefix) / names.PLANS


def _path(prefix: str, identity: str) -> Path:
    if not re.fullmatch("[0-9a-f]{16}", identity):
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
    return History(history.newest_first(records), unreadable)


def read(prefix: str, identity: str) -> PlanRecord:
    """One recorded plan.

    :raises Refusal: it is missing, torn, too large, or has another form; a link is not followed.
    """
    path = _path(prefix, identity)
    try:
        data = reading.read_object(path, history.RECORD_BYTES)
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else str(error)
        raise Refusal(f"{path} cannot be used: {why}") from None
    problem = history.problem(data)
    if not problem and data["id"] != identity:
        problem = validation.Problem("it.id", f"is {data['id']}")
    if problem:
        raise Refusal(f"{path} cannot be used: {problem.where[3:] or 'it'} {problem.why}")
    return typed_json.parse(PlanRecord, data)


def summaries(prefix: str) -> list[PlanSummary]:
    """The newest first; empty where this account may not read them."""
    try:
        return [history.summary(record) for record in read_all(prefix).records]
    except OSError:
        return []


def newest(prefix: str) -> PlanRecord | None:
    """What was recorded last; None where this account may not read it."""
    try:
        return next(iter(read_all(prefix).records), None)
    except OSError:
        return None


def serves(prefix: str, identity: str) -> bool:
    """Whether this is the plan that served last here."""
    return [plan.id for plan in history.served(summaries(prefix))[:1]] == [identity]


def builds(prefix: str) -> set[str]:
    """Ids of the builds with which this host can go back: of the newest plans that served."""
    try:
        records = read_all(prefix).records
    except OSError:
        return set()
    return {build.id for record in history.served(records)[: history.MOST_SERVED] for build in record.host.builds}


def record(prefix: str, plan: PlanRecord, check: bool = False) -> bool:
    """Records a plan that is applied now, unless it is the one that served last; whether anything changes. At most history.MOST stay.

    :raises OSError: nothing is changed.
    """
    present = read_all(prefix).records
    known = next(iter(history.served(present)), None)
    if known and known.id == plan.id:
        # Not all that a host's part has is in the id of the plan: facts that are left on the head are not.
        changed = known.host != plan.host
        if changed and not check:
            _write(prefix, known._replace(host=plan.host))
        return changed
    if not check:
        _write(prefix, plan._replace(state=history.APPLYING, time=_after(present)))
        _remove_old(prefix)
    return True


def mark_served(prefix: str, identity: str, check: bool = False) -> bool:
    """Records that a plan serves; whether anything changes."""
    present = read_all(prefix).records
    if serves(prefix, identity) and present[0].id == identity:
        return False
    if not check:
        _write(prefix, read(prefix, identity)._replace(state=history.SERVED, time=_after(present)))
        _remove_old(prefix)
    return True


def _after(present: list[PlanRecord]) -> int:
    """A time after those of all others, even where the clock was set back."""
    return max(int(time.time()), *(other.time + 1 for other in present), 0)


def _write(prefix: str, plan: PlanRecord) -> None:
    text = json.dumps(typed_json.dump(plan), separators=(",", ":"))
    if len(text.encode()) > history.RECORD_BYTES:
        raise Refusal(
            f"the plan has {len(text) >> 20} MiB for this host, and {history.RECORD_BYTES >> 20} MiB can be recorded"
        )
    files.replace_file(_path(prefix, plan.id), text, 0o600)


def _remove_old(prefix: str) -> None:
    """What served last and before stays, and of the others the newest; what a killed run began to write goes."""
    records, needed = read_all(prefix).records, []
    needed += [record.id for record in history.served(records)[: history.MOST_SERVED]]
    needed += [record.id for record in records if record.id not in needed]
    for identity in needed[history.MOST :]:
        _path(prefix, identity).unlink(missing_ok=True)
    for left in folder(prefix).glob(files.TEMPORARY + "*"):
        left.unlink(missing_ok=True)
