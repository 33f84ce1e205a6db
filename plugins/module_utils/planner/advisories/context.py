# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Values of advisories: what conditions look at, and what they find."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp.model.summary import ModelSummary
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.types import Plan, ReleasePlan
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.builds import releases
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.placement import devices
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.placement.candidate import Candidate
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.types import Cluster, Host, Server

Cases = list[tuple[Any, dict[str, Any]]]
"""For each case of a condition: host (or None), and the values for message and remedies. ``where`` says the place, if it is more than the
host; cases that differ in nothing else become one advisory."""


class AdvisoryContext(NamedTuple):
    """A plan, and the cluster and candidate of which it was made."""

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
    def used(self) -> Sequence[devices.Holder]:
        """Return the devices that hold a part of the model."""
        return self.candidate.holders()

    @property
    def server(self) -> Server:
        return self.candidate.workload.server

    @property
    def head(self) -> Host:
        return self.cluster.hosts[self.cluster.head]

    @property
    def on_head(self) -> list[devices.Holder]:
        """Devices of the head's host that get layers."""
        return [device for device in self.used if device.host == self.cluster.head]

    def variables_of(self, release: str) -> list[str]:
        """The variables that give a release: of all backends that have it."""
        built = [build for host in self.plan.hosts.values() for build in host.builds if build.release == release]
        return list(dict.fromkeys(releases.variable_of(build.backend, self.cluster.releases) for build in built))

    def backends_of(self, host: str) -> list[str]:
        """What a host builds for; nothing of one where others run the workers."""
        own = self.plan.hosts.get(host)
        return [build.backend for build in own.builds] if own else []


class Advisory(NamedTuple):
    """``severity`` is error where running would give no answer, a wrong one, or an open door; everything else is a warning.

    ``{where}`` of a message lists the places, ``{hosts}`` the hosts, of all cases that differ in nothing else.
    """

    id: str
    severity: str
    condition: Callable[[AdvisoryContext], Cases]
    message: str
    remedies: tuple[str, ...]
    """Clauses, of which any one is enough. One is left out where a value that it names is None."""
    reference: str


class Finding(NamedTuple):
    """An advisory that a plan meets: all its cases that differ in nothing but the place."""

    advisory: Advisory
    hosts: tuple[str, ...]
    """Where it is met; empty for the whole cluster."""
    values: Mapping[str, Any]
    """Of message and remedies."""

    @property
    def message(self) -> str:
        return self.advisory.message.format(**self.values)
