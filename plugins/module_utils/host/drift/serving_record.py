# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What the head's launcher records of llama-server. The file belongs to the account of the services, so it may hold anything, or be of another launcher."""

from collections.abc import Collection
from pathlib import Path
from typing import Annotated, NamedTuple, Optional

from ansible_collections.llamacpp.cluster.plugins.module_utils.common import reading, typed_json
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.validation import Text
from ansible_collections.llamacpp.cluster.plugins.module_utils.launcher.loading import Load
from ansible_collections.llamacpp.cluster.plugins.module_utils.launcher.serving import FILE, STATES

FILE_BYTES = 256 * 1024

Name = Annotated[str, Text()]


class Event(NamedTuple):
    """Something that the launcher did, and why."""

    time: int
    """seconds since 1970"""
    text: Annotated[str, Text(longest=2000)]
    """a line of its log"""


class ServingRecord(NamedTuple):
    """The file as launcher/serving.py writes it."""

    state: Annotated[str, STATES]
    """of llama-server"""
    process: int
    """the launcher"""
    since: int = 0
    """when this state began"""
    without: tuple[Name, ...] = ()
    """devices that the fallback does not use"""
    waiting_for: tuple[Name, ...] = ()
    """endpoints of workers"""
    restarts: int = 0
    """of llama-server, without those that were asked for"""
    last: tuple[Event, ...] = ()
    """the newest last"""
    load: Optional[Load] = None
    """null while no model is loaded, and where the kernel does not report it"""


def read(folder: Path) -> Optional[ServingRecord]:
    """:param folder: where the launcher writes; None is returned where it holds no such file."""
    try:
        record = typed_json.parse(ServingRecord, reading.read_object(folder / FILE, FILE_BYTES))
    except (OSError, ValueError):
        return None
    return None if record.load and min((record.load.read or 0, *record.load.sent.values())) < 0 else record


def of_launcher(folder: Path, launchers: Collection[int]) -> Optional[ServingRecord]:
    """The record, where one of these processes wrote it."""
    record = read(folder)
    return record if record and record.process in launchers else None
