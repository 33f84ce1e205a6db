# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Whether the head's llama-server runs as one of its planned fallbacks: a process has exactly the command line of one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from ansible_collections.llamacpp.cluster.plugins.module_utils.host.drift import processes
from ansible_collections.llamacpp.cluster.plugins.module_utils.launcher.serving import said_to_build
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.host_types import ServicePlan


class Served(NamedTuple):
    """A fallback that is served, or loaded, now."""

    name: str
    since: int
    """Seconds since 1970."""
    process: int


def served(service: ServicePlan, running: Mapping[int, list[str]]) -> Served | None:
    """The fallback of a service of the head that runs now.

    :param running: process → argv, of processes.of_account.
    """
    for entry in service.fallbacks or ():
        process = said_to_build(entry.process)
        for pid, argv in running.items():
            if argv == process:
                return Served(entry.name, int(processes.started_at(pid) or 0), pid)
    return None
