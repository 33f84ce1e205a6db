# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Whether the head's llama-server runs as one of its planned fallbacks. Its launcher says so in a file of the account of services, which is not
believed: a process counts that the launcher has started, with exactly the command line of the fallback that is named there."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from ansible_collections.llamacpp.cluster.plugins.module_utils.common.files import text_of
from ansible_collections.llamacpp.cluster.plugins.module_utils.host.drift import serving_record
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.host_types import ServicePlan


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


def served(service: ServicePlan, running: Mapping[int, list[str]], folder: Path) -> Served | None:
    """The fallback of a service of the head that runs now.

    :param running: process → argv, of processes.of_account.
    :param folder: in which the launcher writes down what it does.
    """
    planned = {entry.name: list(entry.process) for entry in service.fallbacks or ()}
    launchers = _launchers(service, running)
    record = serving_record.of_launcher(folder, launchers) if planned else None
    if not record or record.state not in (serving_record.LOADING, serving_record.FALLBACK):
        return None
    for name in record.without:
        for pid, argv in running.items():
            if argv == planned.get(name) and _parent(pid) == record.process:
                return Served(name, record.since, pid)
    return None


def _launchers(service: ServicePlan, running: Mapping[int, list[str]]) -> list[int]:
    return [pid for pid, argv in running.items() if argv == list(service.argv)]


def unplanned_process(service: ServicePlan, running: Mapping[int, list[str]], accepted: Served | None) -> int | None:
    """A process of the head's launcher that is neither planned nor the fallback that is served.

    :param accepted: of served.
    """
    if service.kind != "head":
        return None
    launchers, planned = _launchers(service, running), (list(service.process), list(service.argv))
    children = (pid for pid, argv in running.items() if argv not in planned and _parent(pid) in launchers)
    return next((pid for pid in children if not accepted or pid != accepted.process), None)
