# Copyright (c) 2026 the llamacpp.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""The release that an inventory asks for, and its build for each kind of host."""

from __future__ import annotations

import functools
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Optional, cast

from ansible_collections.llamacpp.cluster.plugins.module_utils.common import typed_json
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.errors import Refusal
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp import (
    backends,
    capabilities,
    fast_load,
    options,
)
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp.words import BACKENDS, IK_LLAMA, MAINLINE
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.host_types import BuildPlan
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.types import PatchPlan, ReleasePlan
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner import types
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.builds import prebuilt_archives
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.inputs import release_request


def _short_sha(data: Any, digits: int = 12) -> str:
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()[:digits]


def _fast_load_patch(release: ReleasePlan) -> PatchPlan:
    """Return the collection's patch for a release.

    :raises Refusal: the collection has no patch for it, or the hosts do not compile it.
    """
    patch = fast_load.patch_of(release.protocol, release.mainline)
    if patch and release.source in release_request.COMPILED_SOURCES:
        return PatchPlan(patch.path, patch.sha256, (fast_load.PATCHED_FILE,))
    cause = (
        f"has source: {release.source}, whose programs are already compiled"
        if release.source not in release_request.COMPILED_SOURCES
        else f"is {release.ref} of {release.fork} with RPC protocol {release.protocol or 'unknown'}, which the patch does not support"
    )
    raise Refusal(
        f"llama_release {cause}, but llama_build_fast_load is true: remove llama_build_fast_load, or use a release with RPC protocol "
        f"{' or '.join(fast_load.PATCHES)} that the hosts compile, like {fast_load.EXAMPLE_RELEASE} (source: pypi)"
    )


def release_of(request: types.ReleaseRequest, package_versions: Mapping[str, str | None]) -> ReleasePlan:
    """Return the requested release: its source, its identity, and the build number that determines its capabilities.

    :param package_versions: host → version of llama.cpp that its distribution packages, or None.
    """
    package = _package_version(package_versions) if request.source == "package" else ""
    return _release_of(request, package)


@functools.lru_cache(maxsize=64)
def _release_of(request: types.ReleaseRequest, package: str) -> ReleasePlan:
    """Return the release. Its id depends on its content, not on the location of an archive or a patch."""
    ref, origin, known_values = _origin_of(request, package)
    fork, build = request.fork, request.build if request.build is not None else known_values.get("build")
    if build is None or build < 1:
        build_text = "has no build" if build is None else f"sets build to {build}"
        raise Refusal(f"llama_release {build_text}: set build to the {fork} build number of {ref}")
    if build < capabilities.OLDEST_BUILDS[fork]:
        raise Refusal(
            f"llama_release is build {build} of {fork}, but the oldest supported build is {capabilities.OLDEST_BUILDS[fork]}: use that build or a newer one"
            + (
                f"; if {build} is another project's number (such as Lemonade's), set build to llama.cpp's number"
                if fork == MAINLINE
                else ""
            )
        )
    release = ReleasePlan(
        source=request.source,
        ref=ref,
        build=build,
        id="",
        **origin,
        why=request.why or None,
        patches=request.patches,
        fork=fork,
        commit=request.commit or known_values.get("commit", "unknown"),
        protocol=capabilities.protocol_of(build, fork),
    )
    if request.fast_load:
        release = release._replace(patches=(*request.patches, _fast_load_patch(release)))
    excluded_keys = {
        "path",
        "url",
        "checksums",
        "why",
        "protocol",
        "id",
        *(["repository"] if release.commit != "unknown" else []),
    }
    content = {key: value for key, value in typed_json.dump(release).items() if key not in excluded_keys}
    content["generation"] = build  # a constant part of the ids of releases that hosts and caches already have
    if release.patches:
        content["patches"] = [patch.sha256 for patch in release.patches]
    return release._replace(id=f"{ref}-{_short_sha(content)}")


def _origin_of(request: types.ReleaseRequest, package: str) -> tuple[str, dict[str, Any], Mapping[str, Any]]:
    """Return short name, origin and known values of a release. The tag of a build never changes, so planning needs no network for it; any
    other ref of a repository needs a commit."""
    origin = {key: value for key, value in (("path", request.path), ("url", request.url)) if value is not None}
    if request.source == "package":
        return f"package-{package}", {"version": package}, {"build": capabilities.PACKAGED_BUILDS.get(package)}
    if request.source == "git":
        tag_match = re.fullmatch(release_request.BUILD_TAG_PATTERN, request.ref)
        if not request.commit and not tag_match:
            raise Refusal(
                f"llama_release asks for {request.ref!r}, whose commit was not looked up in {request.repository}: add commit to llama_release"
            )
        tag = f"refs/tags/{request.ref}"
        origin = {"repository": request.repository, "revision": request.commit or tag, "member": ""}
        return request.ref if tag_match else f"git-{str(request.commit)[:8]}", origin, {}
    if request.source == "pypi":
        version = request.version
        member = f"llama_cpp_python-{version}/vendor/llama.cpp"
        origin = {"checksum": request.checksum, "version": version, "member": member}
        return f"pypi-{version}", origin, capabilities.PYPI_TREES.get(version, {})
    if request.source == "prebuilt":
        checksums = {"checksums": dict(request.checksums)} if request.checksums else {}
        return f"prebuilt-{request.build}", {**origin, **checksums}, {}
    return f"{request.source}-{request.checksum[7:15]}", {"checksum": request.checksum, **origin, "member": ""}, {}


Requests = Mapping[str, Optional[types.ReleaseRequest]]
"""Variable → the operator's request."""


def variable_of(backend: str, requests: Requests) -> str:
    variable = f"llama_release_{backend}"
    return variable if requests[variable] else "llama_release"


def requested_release(variable: str, requests: Requests) -> types.ReleaseRequest:
    """Return the request of a variable that ``variable_of`` returned."""
    return cast(types.ReleaseRequest, requests[variable])


def sources_of(cluster: types.Cluster) -> dict[str, str]:
    """Return the source of each backend's release, without looking anything up."""
    sources = {}
    for backend in BACKENDS:
        variable = variable_of(backend, cluster.release_requests)
        sources[backend] = requested_release(variable, cluster.release_requests).source
        if sources[backend] in ("package", "auto") and variable != "llama_release":
            raise Refusal(
                f"{variable} has source: {sources[backend]}, which applies to all backends: use this source only in llama_release"
            )
    return sources


def releases_by_backend(cluster: types.Cluster, built_backends: Mapping[str, Sequence[str]]) -> dict[str, ReleasePlan]:
    """Return the release of each backend: ``llama_release_<backend>``, or else ``llama_release``. The controller looked up nothing for other backends.

    :param built_backends: host → its backends.
    """
    package_versions = {
        name: host.facts.packaged.version if host.facts.packaged else None for name, host in cluster.hosts.items()
    }
    releases = {}
    for backend in backends_in_use(built_backends):
        variable = variable_of(backend, cluster.release_requests)
        try:
            releases[backend] = release_of(requested_release(variable, cluster.release_requests), package_versions)
        except Refusal as refusal:
            raise release_request.with_variable(refusal, variable) from None
        names = [name for name in cluster.hosts if backend in built_backends[name]]
        _check_release(backend, releases[backend], {name: cluster.hosts[name].facts.architecture for name in names})
    return releases


def backends_in_use(built_backends: Mapping[str, Sequence[str]]) -> list[str]:
    return [backend for backend in BACKENDS if any(backend in names for names in built_backends.values())]


def _check_release(backend: str, release: ReleasePlan, architectures: Mapping[str, str]) -> None:
    """Refuse a backend that the fork lacks, and compiled programs for hosts with different processors.

    :param architectures: host that builds for the backend → architecture of its processor.
    """
    if architectures and release.fork == IK_LLAMA and backend not in backends.IK_LLAMA_BACKENDS:
        raise Refusal(
            f"llama_release is a release of {IK_LLAMA}, which the collection cannot build for {backend} ({', '.join(architectures)}): set llama_backend to "
            "cpu or vulkan for those hosts, or llama_release to a release of llama.cpp"
        )
    if release.source == "binary" and len(set(architectures.values())) > 1:
        kinds_text = ", ".join(f"{name} {architecture}" for name, architecture in sorted(architectures.items()))
        raise Refusal(
            f"llama_release has source: binary, whose programs run on one kind of processor only, but the hosts have several ({kinds_text}): use source: git"
        )


def _package_version(package_versions: Mapping[str, str | None]) -> str:
    versions = set(package_versions.values())
    if len(versions) > 1 or None in versions:
        versions_text = ", ".join(f"{name} {version or 'none'}" for name, version in sorted(package_versions.items()))
        raise Refusal(
            f"llama_release has source: package, but the hosts have no common llama.cpp package ({versions_text}): "
            "run apt update on the hosts, upgrade them to Debian forky or newer, or use source: pypi"
        )
    return str(versions.pop())


def compatible_backends(releases: Mapping[str, ReleasePlan], serving_backend: str) -> frozenset[str]:
    """Return the backends whose release comes from the same tree with the same patches as llama-server's, so that their workers are compatible
    with the head. One release may be sources and the other compiled programs."""
    serving_release = releases[serving_backend]
    return frozenset(
        backend
        for backend, release in releases.items()
        if _tree_of(release) == _tree_of(serving_release)
        and ("unknown" in (serving_release.commit, release.commit) or serving_release.commit[:7] == release.commit[:7])
    )


def _tree_of(release: ReleasePlan) -> tuple[str, int, set[str]]:
    return release.fork, release.build, {patch.sha256 for patch in release.patches}


def with_builds(
    cluster: types.Cluster,
    equipped_hosts: Mapping[str, types.EquippedHost],
    programs: types.Programs,
    catalogue: types.Catalogue,
) -> dict[str, types.EquippedHost]:
    """Return the hosts with their builds. Hosts of one kind with the same options share a build with the programs that any of them needs.
    Builds for accelerators take longest to compile, so they include all programs, and hosts may change their roles."""
    builds = {
        (name, backend): _host_build(cluster, entry, backend, programs)
        for name, entry in equipped_hosts.items()
        for backend in entry.backends
    }
    targets_by_key: dict[str, set[str]] = {}
    for build in builds.values():
        targets_by_key.setdefault(_shared_key(build), set()).update(build.targets)
    sharing_hosts: dict[str, list[types.Host]] = {}
    for (name, backend), build in builds.items():
        host, release = equipped_hosts[name].host, programs.releases[backend]
        build = _with_programs(build, release, host, sorted(targets_by_key[_shared_key(build)]), catalogue)
        builds[name, backend] = build
        if host.shares_builds and equipped_hosts[name].build_tools[backend]:
            sharing_hosts.setdefault(build.id, []).append(host)
    for (name, backend), build in builds.items():
        peers = sharing_hosts.get(build.id, [])
        builders = _trusted_builders(peers) if equipped_hosts[name].host in peers else (name,)
        builds[name, backend] = build._replace(builder=builders[0], trusted_builders=builders)
    return {
        name: entry._replace(builds={backend: builds[name, backend] for backend in entry.backends})
        for name, entry in equipped_hosts.items()
    }


def _trusted_builders(peers: Sequence[types.Host]) -> tuple[str, ...]:
    """Return the hosts whose builds are trusted, the builder of a shared build first: ``llama_build_host``, or the head, or the first of the inventory. Unless
    the operator names the builder, the other hosts follow, because builds that they compiled before the head moved stay valid."""
    names = [host.name for host in sorted(peers, key=lambda host: not host.is_head)]
    builders = sorted({host.build_host for host in peers if host.build_host})
    named_builders = [name for name in builders if name in names]
    if len(named_builders) > 1:
        raise Refusal(
            f"llama_build_host is {' and '.join(named_builders)} for hosts that share a build ({', '.join(names)}): name the same host for all of them, or "
            "set llama_build_share to false"
        )
    return tuple([*named_builders, *names][:1] if builders else names)


def _shared_key(build: BuildPlan) -> str:
    return _short_sha([build.kind, build.release, build.cmake_options])


def _with_programs(
    build: BuildPlan, release: ReleasePlan, host: types.Host, targets: list[str], catalogue: types.Catalogue
) -> BuildPlan:
    paths: dict[str, str] = {}
    if release.source == "package":
        packages = catalogue.llama[host.facts.distribution.family]["programs"]
        for target in targets:
            if target not in packages:
                raise Refusal(
                    f"llama_benchmark_programs is true, but no known package of {host.name}'s distribution contains {target}: use another source in "
                    "llama_release, or set llama_benchmark_programs to false"
                )
        paths = {target: packages[target]["path"].format(architecture=host.facts.architecture) for target in targets}
    ui = build.ui if options.SERVER in targets else None
    content = {"release": release.id, "options": build.cmake_options, "kind": build.kind, "targets": targets}
    identity = _short_sha({**content, **({"ui": True} if ui == "true" else {})}, 8)
    return build._replace(id=f"{release.ref}-{build.backend}-{identity}", packaged=paths, ui=ui, targets=tuple(targets))


def _host_build(cluster: types.Cluster, entry: types.EquippedHost, backend: str, programs: types.Programs) -> BuildPlan:
    """Return the build that hosts of one kind share, with the programs that this host needs."""
    host, facts, server = entry.host, entry.host.facts, cluster.server
    release, tools = programs.releases[backend], entry.build_tools[backend]
    _check_rdma(host, release)
    kind: dict[str, Any] = {
        "architecture": facts.architecture,
        "distribution": facts.distribution._asdict(),
        "backend": backend,
    }
    cmake_options: Mapping[str, str] = {}
    environment: Mapping[str, str] = {}
    archives: tuple[str, ...] | None = None
    if tools:
        kind.update(
            cpu=facts.cpu.features_id, toolchain=tools.compiler, accelerators=tools.version, toolkit=tools.prefix
        )
        cmake_options = _cmake_options(host, backend, release, server, backend == programs.tls_backend)
        environment = tools.environment
    else:
        kind["programs"] = ["head"] * host.is_head + ["worker"] * host.is_worker
    if release.source == "prebuilt":
        archives = kind["archives"] = prebuilt_archives.archives_of(host, backend, release.build, server)
        environment = prebuilt_archives.environment(facts, backend)
    has_all_programs = bool(tools) and backend != backends.CPU.name
    targets = [
        *[capabilities.WORKER_BINARIES[release.fork]] * (host.is_worker or has_all_programs),
        *[options.SERVER] * (host.is_head or has_all_programs),
    ]
    targets += [options.BENCH] * (options.SERVER in targets and cluster.builds_benchmark and release.mainline)
    return BuildPlan(
        id="",
        release=release.id,
        backend=backend,
        cmake_options=cmake_options,
        environment=environment,
        packaged={},
        builder=host.name,
        trusted_builders=(),
        archives=archives,
        ui=server.ui,
        kind=_short_sha(kind),
        targets=tuple(targets),
    )


def _cmake_options(
    host: types.Host, backend: str, release: ReleasePlan, server: types.Server, uses_tls: bool
) -> dict[str, str]:
    """Return the cmake options of a host's build. The operator's options override those of the collection.

    :param uses_tls: whether llama-server speaks TLS: then all hosts build it with TLS, since hosts of one kind share a build.
    """
    for option in backends.TLS_OPTIONS[release.fork] if uses_tls and host.is_head else ():
        if not backends.is_enabled(host.cmake_options.get(option, "ON")):
            raise Refusal(
                f"llama_build_cmake_options for {host.name} turns {option} off, but llama_server_tls_certificate_file needs that option: remove the option "
                "there, or serve without TLS"
            )
    architectures = host.facts.architectures_of(backend)
    needs_all_quants = backends.needs_all_quants(server.cache_type_k, server.cache_type_v, release.fork)
    return {
        **backends.cmake_options(backend, architectures, needs_all_quants, release.fork, uses_tls),
        **host.cmake_options,
        **backends.exclusion_options(host.facts.cpu.unusable or (), host.cmake_options),
    }


def _check_rdma(host: types.Host, release: ReleasePlan) -> None:
    """Refuse RDMA if the programs of this release do not support it."""
    if not host.uses_rdma or (release.source in release_request.COMPILED_SOURCES and release.mainline):
        return
    raise Refusal(
        f"llama_transport is rdma, but llama_release for {host.name} ({release.ref}) is not compiled with RDMA: use llama.cpp with source: pypi, git "
        "or archive, or set llama_transport to plain"
    )
