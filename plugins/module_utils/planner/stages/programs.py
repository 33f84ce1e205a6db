# Copyright (c) 2026 the llamacpp.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""The release of each backend, the builds of each host, and the backend that serves."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import NamedTuple

from ansible_collections.llamacpp.cluster.plugins.module_utils.common.errors import Refusal
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp import backends
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.host_types import BuildPlan
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner import types
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.builds import automatic, releases


class Installation(NamedTuple):
    """Everything that hosts get, independent of the placement of the model."""

    cluster: types.Cluster
    programs: types.Programs
    equipped_hosts: Mapping[str, types.EquippedHost]
    runtime_id: str
    """Digest of the launcher's files."""

    @property
    def head(self) -> types.EquippedHost:
        return self.equipped_hosts[self.cluster.head]

    @property
    def serving_build(self) -> BuildPlan:
        """Return the build whose llama-server serves."""
        return self.head.builds[self.programs.serving_backend]

    @property
    def serving_environment(self) -> dict[str, str]:
        """Return the environment in which the serving build runs."""
        build = self.serving_build
        return backends.service_environment(build.backend, build.environment, not build.archives)

    def runtime_folder(self, prefix: str) -> str:
        return f"{prefix}/runtime/{self.runtime_id}"


def choose_programs(cluster: types.Cluster, catalogue: types.Catalogue) -> types.Programs:
    """Choose builds and releases, and for each host the backend whose llama-server it would run, and whose workers it prefers if a host has several.

    :raises Refusal: there is no such release, or a host cannot build it.
    """
    built_backends = automatic.backends_of_hosts(cluster, catalogue)
    requested_backend, all_backends = cluster.server.backend, set(itertools.chain(*built_backends.values()))
    if requested_backend and requested_backend not in all_backends:
        raise Refusal(
            f"llama_server_backend is {requested_backend!r}, for which no host has a build: use one of {', '.join(sorted(all_backends))}, or add "
            f"{requested_backend} to llama_backend"
        )
    server_backends = {
        name: requested_backend if requested_backend in host_backends else host_backends[0]
        for name, host_backends in built_backends.items()
    }
    serving_backend = server_backends[cluster.head]
    releases_by_backend = releases.releases_by_backend(cluster, built_backends)
    return types.Programs(
        built_backends,
        releases_by_backend,
        serving_backend,
        server_backends,
        usable_backends=releases.compatible_backends(releases_by_backend, serving_backend),
        tls_backend=serving_backend if cluster.server.uses_tls else None,
    )


def release_variables(cluster: types.Cluster, catalogue: types.Catalogue) -> list[str]:
    """Return the head's variables whose release some host builds. The controller has to look these releases up.

    :raises Refusal: hosts give different releases, or a release has no valid form.
    """
    _check_same_release(cluster)
    used_backends = releases.backends_in_use(automatic.backends_of_hosts(cluster, catalogue))
    return list(dict.fromkeys(releases.variable_of(backend, cluster.release_requests) for backend in used_backends))


def _check_same_release(cluster: types.Cluster) -> None:
    """Refuse hosts whose releases differ from those of the head."""
    for name, host in cluster.hosts.items():
        for variable, request in host.release_requests.items():
            head_request = cluster.release_requests[variable]
            if request != head_request:
                has_other_patch = request and head_request and request.fast_load != head_request.fast_load
                raise Refusal(
                    f"{'llama_build_fast_load' if has_other_patch else variable} for {name} differs from its value for the head {cluster.head}, but the "
                    "head and its workers need the same release and patches: set one value for all hosts; for a single backend, use llama_release_<backend>"
                )
