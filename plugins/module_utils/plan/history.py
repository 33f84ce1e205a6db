# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The record that a host has of a plan: its own part, as it was applied. Readers do not trust it."""

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, NamedTuple, Optional, TypeVar, Union

from ansible_collections.llamacpp.cluster.plugins.module_utils.common import typed_json, validation
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.validation import Number, Problem, Text
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.host_types import HostPlan, Line, PlanId
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.types import HeadPlan, ModelPlan, ReleasePlan

SCHEMA = 1
APPLYING, SERVED = "applying", "served"
MOST, MOST_SERVED = 5, 2
"""Recorded plans of a host, and those that served among them which are never removed: what runs, and what to go back to."""
RECORD_BYTES = 32 << 20
"""The head's facts are most of it, about 20 kB for each host."""

Time = Annotated[int, Number()]
State = Annotated[str, (APPLYING, SERVED)]
HostName = Annotated[str, Text()]


class PlanSummary(NamedTuple):
    """What a host reports of a plan that it has recorded."""

    id: PlanId
    time: Time
    state: State
    release: Line
    release_id: Line
    cluster: Line
    hosts: tuple[HostName, ...]
    head: bool
    """whether this host is the head"""
    build: Optional[Time] = None
    """number of the release; null where it is not known"""
    declared: Optional[Line] = None
    """what llama_release has to be for it"""
    spared: Optional[Mapping[str, bool]] = None
    """of the head: hosts that may be away → whether it serves on a fallback then, as it is with hosts of which it uses something"""


class PlanRecord(NamedTuple):
    """What a host has recorded of a plan."""

    schema: Annotated[int, Number(SCHEMA, SCHEMA)]
    id: PlanId
    cluster: Line
    time: Time
    state: State
    name: HostName
    """of this host"""
    hosts: tuple[HostName, ...]
    release: ReleasePlan
    model: ModelPlan
    host: HostPlan
    """the host's part of the plan"""
    head: Optional[HeadPlan] = None
    """on the head's host"""
    declared: Optional[Line] = None
    spared: Optional[Mapping[str, bool]] = None
    """as in PlanSummary"""


Plan = TypeVar("Plan", bound=Union[PlanSummary, PlanRecord])


def newest_first(plans: Iterable[Plan]) -> list[Plan]:
    return sorted(plans, key=lambda plan: plan.time, reverse=True)


def served(plans: Iterable[Plan]) -> list[Plan]:
    """Those that served, the newest first."""
    return [plan for plan in newest_first(plans) if plan.state == SERVED]


def summary(record: PlanRecord) -> PlanSummary:
    return PlanSummary(
        **{name: getattr(record, name) for name in ("id", "time", "state", "cluster", "hosts", "declared", "spared")},
        release=record.release.ref,
        release_id=record.release.id,
        build=record.release.build,
        head=record.head is not None,
    )


def digest(part: HostPlan) -> str:
    """What a host's part of a plan has, in 16 digits. Where the controller has a file, or its text, does not count."""
    plain = part._replace(files=tuple(file._replace(source=None, content=None) for file in part.files))
    return hashlib.sha256(json.dumps(typed_json.dump(plain), sort_keys=True).encode()).hexdigest()[:16]


def problem(record: Any) -> Optional[Problem]:
    """Why a record cannot be used; None where it can. Definitions and contents of files are the only texts with several lines."""
    if not isinstance(record, Mapping):
        return Problem("it", "is not a mapping")
    part, blocks = _without_blocks(record.get("host"))
    found = validation.problem("it", {**record, "host": part}) or typed_json.problem("it", record, PlanRecord)
    if found:
        return found
    if not all(validation.is_plain(line) for text in blocks for line in text.replace("\t", " ").split("\n")):
        return Problem("it", "has a control character in a definition or a file")
    return _outside(typed_json.parse(PlanRecord, record).host)


def _without_blocks(part: Any) -> tuple[Any, list[str]]:
    """A host's part without definitions and contents of files, and these."""
    blocks: list[str] = []
    rest = dict(part) if isinstance(part, Mapping) else part
    for group, key in (("services", "definition"), ("files", "content")):
        entries = rest.get(group) if isinstance(rest, dict) else None
        if isinstance(entries, list) and all(isinstance(entry, Mapping) for entry in entries):
            blocks += [entry[key] for entry in entries if isinstance(entry.get(key), str)]
            rest[group] = [{name: value for name, value in entry.items() if name != key} for entry in entries]
    return rest, blocks


def _outside(part: HostPlan) -> Optional[Problem]:
    """A file that is not below the installation."""
    for file in part.files:
        for path in filter(None, (file.path, file.record)):
            if os.path.normpath(path) != path or not path.startswith(part.prefix + "/"):
                return Problem("it.host.files", f"has {validation.show(path)}, which is not below {part.prefix}")
    for folder in part.folders:
        if os.path.normpath(folder.path) != folder.path:
            return Problem("it.host.folders", f"has {validation.show(folder.path)}")
    return None
