# Copyright (c) 2026 the llamacpp.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""The launcher's record of llama-server. The services' account owns the file, so the record is not trusted, and another launcher may have written it."""

from collections.abc import Collection
from pathlib import Path
from typing import Annotated, NamedTuple, Optional

from ansible_collections.llamacpp.cluster.plugins.module_utils.common import typed_json
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.validation import Text
from ansible_collections.llamacpp.cluster.plugins.module_utils.launcher.loading import LoadCounters
from ansible_collections.llamacpp.cluster.plugins.module_utils.launcher.serving import RECORD_FILE, STATES

MAX_RECORD_BYTES = 256 * 1024

Name = Annotated[str, Text()]


class Event(NamedTuple):
    """An action of the launcher with its reason."""

    time: int
    """seconds since 1970"""
    text: Annotated[str, Text(max_length=2000)]
    """line in its log"""


class ServingRecord(NamedTuple):
    """Record in the format of launcher/serving.py."""

    state: Annotated[str, STATES]
    """state of llama-server"""
    process: int
    """process id of the launcher"""
    since: int = 0
    """start of this state"""
    without: tuple[Name, ...] = ()
    """devices that the fallback does not use"""
    waiting_for: tuple[Name, ...] = ()
    """endpoints of workers"""
    restarts: int = 0
    """restarts of llama-server that nobody requested"""
    last: tuple[Event, ...] = ()
    """latest events, the newest last"""
    load: Optional[LoadCounters] = None
    """progress of loading; null if no model is loaded or the kernel does not report it"""


def read_record(folder: Path) -> Optional[ServingRecord]:
    """Return the record in the launcher's folder; None without a valid record."""
    record = typed_json.read_file(ServingRecord, folder / RECORD_FILE, MAX_RECORD_BYTES)
    is_invalid = record and record.load and min((record.load.read or 0, *record.load.sent.values())) < 0
    return None if is_invalid else record


def launcher_record(folder: Path, launcher_pids: Collection[int]) -> Optional[ServingRecord]:
    """Return the record if one of these launchers wrote it."""
    record = read_record(folder)
    return record if record and record.process in launcher_pids else None
