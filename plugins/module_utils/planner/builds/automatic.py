# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""``llama_release: auto``: upstream's compiled programs, else the distribution's package, else sources, whichever all hosts have."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

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


def settled(cluster: Cluster, catalogue: Catalogue) -> Cluster:
    """The cluster with a release in place of ``auto``, which says why it is that one."""
    request = releases.requested(VARIABLE, cluster.releases)
    if request.source != "auto":
        return cluster
    compiled = _asking(cluster, release_request.request_of(release_request.DEFAULT), request)
    try:
        wanted = backends_of_hosts(compiled, catalogue)
    except Refusal:
        wanted = {}
    ready = release_request.request_of({"source": "prebuilt", "build": prebuilt.TESTED})._replace(url=request.url)
    packaged = release_request.request_of({"source": "package"})
    reasons: list[str] = []
    for given, title in (
        (ready, "upstream has an archive for each host"),
        (packaged, "all hosts offer the same package"),
    ):
        chosen = _asking(cluster, given, request)
        reason = _obstacle(chosen, catalogue, wanted)
        reasons.append(reason or f"{title}; {COMPILING_ADDS}")
        if not reason:
            break
    else:
        chosen = compiled
    return _asking(cluster, releases.requested(VARIABLE, chosen.releases)._replace(why="; ".join(reasons)), request)


def _asking(cluster: Cluster, given: ReleaseRequest, instead: ReleaseRequest) -> Cluster:
    request = given._replace(fast_load=instead.fast_load)
    return cluster._replace(releases={**cluster.releases, VARIABLE: request})


def _obstacle(cluster: Cluster, catalogue: Catalogue, wanted: Mapping[str, tuple[str, ...]]) -> str:
    """Why a release is not the one for all hosts; empty where it is.

    :param wanted: host → backends that it would compile for: another release is no better without them.
    """
    request = releases.requested(VARIABLE, cluster.releases)
    try:
        built = backends_of_hosts(cluster, catalogue)
        packaged = {
            name: host.facts.packaged.version if host.facts.packaged else None for name, host in cluster.hosts.items()
        }
        releases.release_of(request, packaged)
        for name, host in cluster.hosts.items():
            if request.source == "prebuilt":
                for backend in built[name]:
                    if releases.variable_of(backend, cluster.releases) == VARIABLE:
                        prebuilt_archives.archives_of(host, backend, int(request.build or 0), cluster.server)
            lost = _lost(wanted.get(name, ()), built[name])
            if lost:
                return f"{name} can compile for {', '.join(lost)}, which source: {request.source} does not have for it"
    except Refusal as refusal:
        return re.split(r"(?<!source): ", str(refusal))[0]
    return ""


def _lost(wanted: Sequence[str], built: Sequence[str]) -> list[str]:
    """Backends that would drive a device better than one of those that are built, or one that these leave idle."""
    worst = max(backends.RECORDS[backend].preference for backend in built)
    fewer = len(built) < len(wanted)
    return [
        backend
        for backend in wanted
        if backend not in built and (fewer or backends.RECORDS[backend].preference < worst)
    ]
