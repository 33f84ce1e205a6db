# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""``llama_release: auto``: upstream's compiled programs where all hosts have them, else sources."""

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
COMPILING_ADDS = "compiling would add llama_build_fast_load, patches, and CUDA and HIP code for all pairs of llama_server_cache_type_k and _v"


def backends_of_hosts(cluster: Cluster, catalogue: Catalogue) -> dict[str, tuple[str, ...]]:
    """Host → its backends."""
    sources = releases.sources_of(cluster.releases)
    return {
        name: requirements.backends_of(
            host, sources, catalogue.llama.get(host.facts.distribution.family, {"libraries": {}})["libraries"]
        )
        for name, host in cluster.hosts.items()
    }


def resolve(cluster: Cluster, catalogue: Catalogue) -> Cluster:
    """The cluster with a release in place of ``auto``, which says why it is that one."""
    request = releases.requested(VARIABLE, cluster.releases)
    if request.source != "auto":
        return cluster
    compiled = _asking(cluster, release_request.request_of(release_request.DEFAULT), request)
    given = release_request.request_of({"source": "prebuilt", "build": prebuilt.TESTED})._replace(url=request.url)
    ready = _asking(cluster, given, request)
    obstacle = _obstacle(ready, compiled, catalogue)
    chosen = releases.requested(VARIABLE, (compiled if obstacle else ready).releases)
    why = obstacle or f"upstream has an archive for each host; {COMPILING_ADDS}"
    return _asking(cluster, chosen._replace(why=why), request)


def _asking(cluster: Cluster, given: ReleaseRequest, instead: ReleaseRequest) -> Cluster:
    request = given._replace(fast_load=instead.fast_load)
    return cluster._replace(releases={**cluster.releases, VARIABLE: request})


def _obstacle(ready: Cluster, compiled: Cluster, catalogue: Catalogue) -> str:
    """Why upstream's programs are not the release for all hosts; empty where they are."""
    request = releases.requested(VARIABLE, ready.releases)
    try:
        wanted = backends_of_hosts(compiled, catalogue)
    except Refusal:
        wanted = {}
    try:
        built = backends_of_hosts(ready, catalogue)
        releases.release_of(request, {})
        for name, host in ready.hosts.items():
            for backend in built[name]:
                if releases.variable_of(backend, ready.releases) == VARIABLE:
                    prebuilt_archives.archives_of(host, backend, int(request.build or 0), ready.server)
            worst = max(backends.RECORDS[backend].preference for backend in built[name])
            better = [one for one in wanted.get(name, ()) if backends.RECORDS[one].preference < worst]
            if set(better) - set(built[name]):
                return f"{name} can compile for {', '.join(better)}, which source: prebuilt does not have for it"
    except Refusal as refusal:
        return re.split(r"(?<!source): ", str(refusal))[0]
    return ""
