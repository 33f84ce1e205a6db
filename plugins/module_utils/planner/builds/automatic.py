# Copyright (c) 2026 the llamacpp.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""``llama_release: auto``: upstream's compiled programs if all hosts can run them, else sources."""

from __future__ import annotations

import re

from ansible_collections.llamacpp.cluster.plugins.module_utils.common.errors import Refusal
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp import backends, prebuilt
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.builds import (
    prebuilt_archives,
    releases,
    requirements,
)
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.inputs import release_request
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.types import Catalogue, Cluster, ReleaseRequest

VARIABLE = "llama_release"
COMPILING_BENEFITS = "compiling would allow llama_build_fast_load, patches, and CUDA and HIP kernels for all pairs of llama_server_cache_type_k and _v"


def backends_of_hosts(cluster: Cluster, catalogue: Catalogue) -> dict[str, tuple[str, ...]]:
    sources = releases.sources_of(cluster)
    return {name: requirements.backends_of(host, sources, catalogue) for name, host in cluster.hosts.items()}


def resolve_release(cluster: Cluster, catalogue: Catalogue) -> Cluster:
    """Return the cluster with a release instead of ``auto``, and the reason for it."""
    request = releases.requested_release(VARIABLE, cluster.release_requests)
    if request.source != "auto":
        return cluster
    compiled_request = release_request.request_of(release_request.DEFAULT_RELEASE)
    archive_request = release_request.request_of({"source": "prebuilt", "build": prebuilt.AUTO_BUILD})
    archive_request = archive_request._replace(url=request.url)
    archive_cluster, compiled_cluster = (
        _with_release(cluster, choice._replace(fast_load=request.fast_load))
        for choice in (archive_request, compiled_request)
    )
    obstacle = _archive_obstacle(archive_cluster, compiled_cluster, catalogue)
    reason = obstacle or f"upstream has an archive for each host; {COMPILING_BENEFITS}"
    choice = releases.requested_release(VARIABLE, (compiled_cluster if obstacle else archive_cluster).release_requests)
    return _with_release(cluster, choice._replace(why=reason))


def _with_release(cluster: Cluster, request: ReleaseRequest) -> Cluster:
    return cluster._replace(release_requests={**cluster.release_requests, VARIABLE: request})


def _archive_obstacle(archive_cluster: Cluster, compiled_cluster: Cluster, catalogue: Catalogue) -> str:
    """Return why not all hosts can run upstream's programs; empty if they can."""
    request = releases.requested_release(VARIABLE, archive_cluster.release_requests)
    try:
        compilable_backends = backends_of_hosts(compiled_cluster, catalogue)
    except Refusal:
        compilable_backends = {}
    try:
        archive_backends = backends_of_hosts(archive_cluster, catalogue)
        releases.release_of(request, {})
        for name, host in archive_cluster.hosts.items():
            for backend in archive_backends[name]:
                if releases.variable_of(backend, archive_cluster.release_requests) == VARIABLE:
                    prebuilt_archives.archives_of(host, backend, int(request.build or 0), archive_cluster.server)
            worst_rank = max(backends.BY_NAME[backend].preference_rank for backend in archive_backends[name])
            better_backends = [
                backend
                for backend in compilable_backends.get(name, ())
                if backends.BY_NAME[backend].preference_rank < worst_rank
            ]
            if set(better_backends) - set(archive_backends[name]):
                return f"{name} can compile for {', '.join(better_backends)}, but upstream has no such archive for this host"
    except Refusal as refusal:
        return re.split(r"(?<!source): ", str(refusal))[0]
    return ""
