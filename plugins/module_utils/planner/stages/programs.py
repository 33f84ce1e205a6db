# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Which release each backend runs, which backends each host builds, and which of them serves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ansible_collections.llamacpp.cluster.plugins.module_utils.common.errors import Refusal
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp.words import BACKENDS
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.types import ReleasePlan
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner import server_settings
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.builds import automatic, releases
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.types import Catalogue, Cluster


class Programs(NamedTuple):
    """What is built on which host."""

    built: Mapping[str, tuple[str, ...]]
    """Host → backends."""
    releases: Mapping[str, ReleasePlan]
    """Backend → release."""
    serves: str
    """The backend whose llama-server runs on the head."""
    servers: Mapping[str, str]
    """Host → the backend whose llama-server would run there."""

    @property
    def release(self) -> ReleasePlan:
        """Of llama-server."""
        return self.releases[self.serves]

    def of_one_source(self) -> set[str]:
        """Backends whose workers llama-server can use."""
        return {backend for backend, release in self.releases.items() if releases.same_source(release, self.release)}


def choose(cluster: Cluster, catalogue: Catalogue) -> Programs:
    """:raises Refusal: there is no such release, or a host cannot build it."""
    built = automatic.backends_of_hosts(cluster, catalogue)
    facts = {name: host.facts for name, host in cluster.hosts.items()}
    wanted = releases.of_backends(cluster.releases, facts, _backends_in_use(built))
    known = {backend for own in built.values() for backend in own}
    for backend, release in wanted.items():
        builders = {name: cluster.hosts[name].facts.architecture for name, own in built.items() if backend in own}
        releases.check(backend, release, builders)
    servers = {name: server_settings.backend_of(cluster.server, own, known) for name, own in built.items()}
    return Programs(built, wanted, servers[cluster.head], servers)


def _backends_in_use(built: Mapping[str, Sequence[str]]) -> list[str]:
    return [backend for backend in BACKENDS if any(backend in own for own in built.values())]


def release_variables(cluster: Cluster, catalogue: Catalogue) -> list[str]:
    """The variables of the head that give a release of which some host has a build: what the controller has to look up.

    :raises Refusal: hosts give different releases, or a release has no valid form.
    """
    _check_same_release(cluster)
    used = _backends_in_use(automatic.backends_of_hosts(cluster, catalogue))
    return list(dict.fromkeys(releases.variable_of(backend, cluster.releases) for backend in used))


def _check_same_release(cluster: Cluster) -> None:
    """All hosts must give the same releases as the head."""
    for name, host in cluster.hosts.items():
        for variable, request in host.releases.items():
            own = cluster.releases[variable]
            if request != own:
                patched = request and own and request.fast_load != own.fast_load
                raise Refusal(
                    f"{'llama_build_fast_load' if patched else variable} of {name} differs from that of the head {cluster.head}, and head and workers need "
                    "the same release and patches: set it for the whole group, or llama_release_<backend> where backends differ"
                )
