# Copyright (c) 2026 the llamacpp.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Types of advisories: the input of their conditions, and their findings."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp.model.summary import ModelSummary
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.types import Plan, ReleasePlan
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.builds import releases
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.placement.candidate import Candidate
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.types import Cluster, Device, Host, Server

Cases = list[tuple[Any, dict[str, Any]]]
"""Host (or None) and values for message and remedies, for each case that a condition finds. ``where`` is the place, if it is more than the host;
cases whose other values are equal become one finding."""


class AdvisoryContext(NamedTuple):
    """A plan, its cluster, and a candidate: the planned candidate, or that of a fallback."""

    plan: Plan
    cluster: Cluster
    candidate: Candidate

    @property
    def release(self) -> ReleasePlan:
        return self.candidate.release

    @property
    def summary(self) -> ModelSummary:
        return self.candidate.summary

    @property
    def devices(self) -> Sequence[Device]:
        """Return the devices that hold a part of the model."""
        return self.candidate.layout.devices

    @property
    def server(self) -> Server:
        return self.candidate.workload.server

    @property
    def head(self) -> Host:
        return self.cluster.hosts[self.cluster.head]

    def variables_of(self, release_id: str) -> list[str]:
        """Return the variables that set a release, for all backends that use it."""
        builds = [build for host in self.plan.hosts.values() for build in host.builds if build.release == release_id]
        return list(
            dict.fromkeys(releases.variable_of(build.backend, self.cluster.release_requests) for build in builds)
        )

    def backends_of(self, host: str) -> list[str]:
        """Return the backends that a host builds for; none for a host with external workers."""
        planned_host = self.plan.hosts.get(host)
        return [build.backend for build in planned_host.builds] if planned_host else []


class Advisory(NamedTuple):
    """A known problem. Its severity is error if the server would give no answer, give wrong answers or let strangers in, and warning otherwise.

    In message and remedies, ``{where}`` lists the places and ``{hosts}`` the hosts of all cases in a finding.
    """

    id: str
    severity: str
    find_cases: Callable[[AdvisoryContext], Cases]
    message: str
    remedies: tuple[str, ...]
    """Alternatives. A remedy is omitted if one of its placeholders has the value None."""
    reference: str


class Finding(NamedTuple):
    """An advisory that applies to a plan, with all its cases whose values are equal except for the place."""

    advisory: Advisory
    hosts: tuple[str, ...]
    """Affected hosts; empty for the whole cluster."""
    values: Mapping[str, Any]
    """Values for message and remedies."""

    @property
    def message(self) -> str:
        return self.advisory.message.format(**self.values)
