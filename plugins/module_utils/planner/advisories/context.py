# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Values of advisories: what conditions look at, what they find, and how an operator may fix it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp.model.summary import ModelSummary
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.types import Plan
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.builds import releases
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.placement import devices
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.types import Cluster, Release, Server

Cases = list[tuple[Any, dict[str, Any]]]
"""For each case of a condition: host (or None), and the values for message and remedies. ``where`` says the place, if it is more than the
host; cases that differ in nothing else become one advisory."""


class AdvisoryContext(NamedTuple):
    """``release`` and ``summary`` are those that serve, ``used`` the devices that get layers."""

    plan: Plan
    cluster: Cluster
    release: Release
    summary: ModelSummary
    used: Sequence[devices.Holder]

    @property
    def generation(self) -> int:
        """Build number that stands for the features and faults of the release that serves."""
        return self.release.generation

    @property
    def server(self) -> Server:
        return self.cluster.server

    @property
    def release_variables(self) -> list[str]:
        """The variables that give the release that serves: of all backends that have it, since head and workers need the same."""
        return self.variables_of(self.release.id)

    def variables_of(self, release: str) -> list[str]:
        built = [build for host in self.plan.hosts.values() for build in host.builds]
        return list(
            dict.fromkeys(
                releases.variable_of(build.backend, self.cluster.releases)
                for build in built
                if build.release == release
            )
        )

    def backends_of(self, host: str) -> list[str]:
        """What a host builds for; nothing of one where others run the workers."""
        own = self.plan.hosts.get(host)
        return [build.backend for build in own.builds] if own else []


Change = Callable[[Cluster], Cluster]
"""Takes the cluster as the inventory and the facts describe it, and returns it as it is once the operator has acted."""


class Fix(NamedTuple):
    """One way to carry out a remedy: values for its text, and what it changes. Each change has to help.

    Without a change planning cannot try it.
    """

    values: Mapping[str, Any]
    changes: tuple[Change, ...] = ()
    accepts: bool = False
    """Whether it accepts the advisory, which changes nothing else."""


class Finding(NamedTuple):
    """An advisory that a plan meets: all its cases that differ in nothing but the place."""

    advisory: Advisory
    hosts: tuple[str, ...]
    """Where it is met; empty for the whole cluster."""
    values: Mapping[str, Any]
    """Of message and remedies."""


Fixes = Callable[[AdvisoryContext, Finding], Iterable[Fix]]


class Remedy(NamedTuple):
    """``text`` is a clause, as docs/plan.md has it. The first of its fixes that helps is shown."""

    text: str
    fixes: Fixes


class Advisory(NamedTuple):
    """``severity`` is error where running would give no answer, a wrong one, or an open door; everything else is a warning.

    ``{where}`` of a message lists the places, ``{hosts}`` the hosts, of all cases that differ in nothing else.
    """

    id: str
    severity: str
    condition: Callable[[AdvisoryContext], Cases]
    message: str
    remedies: tuple[Remedy, ...]
    reference: str
