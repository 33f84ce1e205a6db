# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Whether the head's llama-server runs as one of its planned fallbacks. Its launcher says so in a file of the account of services, which is not
believed: a process counts that the launcher has started, with exactly the command line of the fallback that is named there."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from ansible_collections.llamacpp.cluster.plugins.module_utils.common import names, reading, validation
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.files import text_of

FILE_BYTES = 256 * 1024
ASLEEP = "asleep"
STATES = ("waiting", "loading", "serving", ASLEEP, "fallback")
FORM = {
    "state": STATES,
    "without": [validation.Text()],
    "since": validation.Number(),
    "process": validation.Number(),
}
"""Of what counts here in the file, as launcher/serving.py writes it; status/host_status.py adds what status shows."""


class Served(NamedTuple):
    """A fallback that is served, or loaded, now."""

    name: str
    since: int
    """Seconds since 1970."""
    process: int


def _parent(process: int) -> int | None:
    """Of a process (Linux)."""
    with suppress(IndexError, ValueError):
        return int(text_of(Path(f"/proc/{process}/stat")).rsplit(")", 1)[1].split()[1])
    return None


def said_in(folder: Path, launchers: Collection[int]) -> Mapping[str, Any] | None:
    """What one of these launchers wrote of what it serves; None where it wrote nothing that can be used."""
    with suppress(OSError, ValueError):
        said = reading.read_object(folder / names.SERVING, FILE_BYTES)
        if not validation.mismatch("it", said, FORM) and said["process"] in launchers:
            return said
    return None


def served(service: Mapping[str, Any], running: Mapping[int, list[str]], folder: Path) -> Served | None:
    """The fallback of a service of the head that runs now.

    :param service: of the plan.
    :param running: process → argv, of state.processes.
    :param folder: in which the launcher writes down what it does.
    """
    planned = {entry["name"]: entry["process"] for entry in service.get("fallbacks", ())}
    launchers = [pid for pid, argv in running.items() if argv == service["argv"]]
    said = said_in(folder, launchers) if planned else None
    if not said or said["state"] not in ("loading", "fallback"):
        return None
    for name in said["without"]:
        for pid, argv in running.items():
            if argv == planned.get(name) and _parent(pid) == said["process"]:
                return Served(name, said["since"], pid)
    return None


def stranger(service: Mapping[str, Any], running: Mapping[int, list[str]], accepted: Served | None) -> int | None:
    """A process of the head's launcher that is neither planned nor the fallback that is served.

    :param accepted: of served.
    """
    if service["kind"] != "head":
        return None
    launchers = [pid for pid, argv in running.items() if argv == service["argv"]]
    right = (service["process"], service["argv"])
    strange = (pid for pid, argv in running.items() if argv not in right and _parent(pid) in launchers)
    return next((pid for pid in strange if not accepted or pid != accepted.process), None)
