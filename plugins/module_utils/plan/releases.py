# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The release that an inventory asks for, and the build of it for each kind of host."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from ansible_collections.llamacpp.cluster.plugins.module_utils.common.refusal import Refusal
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp import (
    backends,
    capabilities,
    fast_load,
    options,
)
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan import toolchains
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.values import (
    Build,
    Catalogue,
    Equipped,
    Facts,
    Host,
    Patch,
    Release,
    Server,
)


def _sha(data: Any, digits: int = 12) -> str:
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()[:digits]


COMPILED = ("git", "pypi", "archive")
"""Sources that are compiled on the hosts."""
SOURCES = {
    "git": {"source", "repository", "fork", "ref", "commit", "build", "patches"},
    "pypi": {"source", "version", "checksum", "build", "commit", "patches"},
    "archive": {"source", "path", "url", "checksum", "fork", "build", "commit", "patches"},
    "binary": {"source", "path", "url", "checksum", "fork", "build", "commit"},
    "package": {"source", "build"},
}
"""Source of a release → what ``llama_release`` may say of it."""
TREE = "tree"
"""What the controller adds to these where it has looked into the tree itself, a SourceTree."""
WHOLE_COMMIT = r"[0-9a-f]{40}([0-9a-f]{24})?"
BUILD_TAG = r"b\d{3,6}"
VERSION_TAG = r"v\d+\.\d+\.\d+"
"""Upstream's tags besides those of builds, from v0.1.0 of August 2026 on."""
LEMONADE = r"lemonade-sdk/llamacpp-rocm\b|\bllama-b\d+-ubuntu-rocm-gfx\w+-x64"
"""In an address or a name: builds of Lemonade, whose tags are numbers of its own, like b1274 with llama.cpp b9247."""


FAST_LOAD = "fast_load"
"""What entry adds to these where ``llama_build_fast_load`` is true, a FastLoad."""


class FastLoad(NamedTuple):
    """The collection's patch for loads is asked for."""


class SourceTree(NamedTuple):
    """What a tree says of itself; None where it does not.

    :param generation: about its build number, by its day.
    """

    commit: str | None
    generation: int | None
    protocol: str | None


def request_of(value: Any) -> dict[str, Any]:
    """What ``llama_release`` asks for, as a mapping, with everything checked that can be said without looking anything up.

    The controller looks up what is missing (plugin_utils/sources.py): ``commit`` and ``build`` of a branch or commit, and for each
    of the ``patches`` path, sha256 and files.
    """
    form = f"use a build like b8600, a version like v0.4.1, or a mapping with source: {', '.join(SOURCES)}"
    if isinstance(value, str) and re.fullmatch(f"{BUILD_TAG}|{VERSION_TAG}", value):
        value = {"source": "git", "ref": value}
    if not isinstance(value, dict) or str(value.get("source")) not in SOURCES:
        if isinstance(value, dict):
            value = {key: part for key, part in value.items() if not isinstance(part, FastLoad)}
        raise Refusal(f"llama_release is {value!r}, which is not a valid form: {form}")
    allowed = SOURCES[value["source"]]
    own = {key for key, kind in ((TREE, SourceTree), (FAST_LOAD, FastLoad)) if isinstance(value.get(key), kind)}
    unknown = set(value) - allowed - own
    if unknown:
        raise Refusal(
            f"llama_release has {', '.join(sorted(map(str, unknown)))}, which source: {value['source']} does not accept: use {', '.join(sorted(allowed))}"
        )
    patches = value.get("patches", [])
    if (
        not isinstance(patches, list)
        or not all(patches)
        or not all(isinstance(patch, (str, dict)) for patch in patches)
    ):
        raise Refusal(f"llama_release has the patches {patches!r}: give a list of paths of files on the controller")
    if str(value.get("fork", capabilities.MAINLINE)) not in capabilities.FORKS:
        raise Refusal(
            f"llama_release has the fork {value['fork']!r}: use one of {', '.join(capabilities.FORKS)}; other forks run as llama.cpp if they "
            "kept its options"
        )
    _check_place(value)
    if value["source"] == "git":
        return _git_request(value)
    if value["source"] != "package" and not re.fullmatch(r"sha256:[0-9a-f]{64}", str(value.get("checksum"))):
        raise Refusal(
            f"llama_release has the checksum {value.get('checksum')!r}: use sha256: and the 64 hexadecimal digits of the archive"
        )
    if value["source"] == "pypi" and not re.fullmatch(r"\d+(\.\d+)+(\.?[a-z]+\d*)?", str(value.get("version"))):
        raise Refusal(
            f"llama_release has the version {value.get('version')!r}: use a version of llama-cpp-python, like 0.3.36"
        )
    if "commit" in value and not (
        isinstance(value["commit"], str) and re.fullmatch(r"[0-9a-f]{7,64}", value["commit"])
    ):
        raise Refusal(f"llama_release has the commit {value['commit']!r}: use 7 of its digits or more, in quotes")
    if value["source"] in ("archive", "binary") and bool(value.get("path")) == bool(value.get("url")):
        raise Refusal(
            f"llama_release with source: {value['source']} needs either path, a file on the controller, or url"
        )
    return dict(value)


def declaration(release: Mapping[str, Any]) -> str:
    """What ``llama_release`` has to be for a release of a plan, as JSON, which YAML reads too.

    :param release: as Release.as_json returns it.
    """
    given = {key: release.get(key) for key in sorted(SOURCES[release["source"]]) if key != "commit"}
    if release["source"] == "git":
        given["ref"] = release["revision"].replace("refs/tags/", "", 1)
    own = [patch["path"] for patch in release.get("patches", ()) if not fast_load.is_ours(patch["sha256"])]
    return json.dumps({key: value for key, value in {**given, "patches": own}.items() if value})


def with_fast_load(value: Any) -> Any:
    """What ``llama_release`` asks for, with the collection's patch for loads."""
    if isinstance(value, str) and re.fullmatch(f"{BUILD_TAG}|{VERSION_TAG}", value):
        value = {"source": "git", "ref": value}
    return {**value, FAST_LOAD: FastLoad()} if isinstance(value, dict) and value else value


def wants_fast_load(value: Any) -> bool:
    """Whether a request has what with_fast_load adds."""
    return isinstance(value, dict) and isinstance(value.get(FAST_LOAD), FastLoad)


def _fast_load_patch(release: Release) -> Patch:
    """The collection's patch for a release.

    :raises Refusal: it has none, or is compiled already.
    """
    known = fast_load.known(release.protocol, release.mainline)
    if known and release.source in COMPILED:
        return Patch(known.path, known.sha256, (fast_load.CHANGED,))
    cause = (
        f"has source: {release.source}, programs that are compiled already"
        if release.source not in COMPILED
        else f"is {release.ref} of {release.fork} with RPC protocol {release.protocol or 'unknown'}, which the patch does not know"
    )
    raise Refusal(
        f"llama_release {cause}, but llama_build_fast_load is true: remove llama_build_fast_load, or use a release with RPC protocol "
        f"{', '.join(fast_load.PATCHES)} that the hosts compile, like {fast_load.EXAMPLE} (source: pypi)"
    )


def _check_place(value: Mapping[str, Any]) -> None:
    """Refuses zip archives, and numbers of Lemonade's where those of llama.cpp are meant."""
    for key in ("path", "url", "repository"):
        place = value.get(key)
        if not isinstance(place, str):
            continue
        if key != "repository" and re.search(r"\.zip($|[?#])", place):
            raise Refusal(
                f"llama_release has the {key} {place!r}, a zip archive, which hosts do not unpack: pack its content with tar, and give that as path "
                "with its own checksum"
            )
        own = re.search(r"\bb(\d{3,6})\b", str(value.get("ref", place)))
        given = value.get("build")
        if re.search(LEMONADE, place) and (given is None or (own and str(given) == own[1])):
            raise Refusal(
                f"llama_release has the {key} {place!r} of Lemonade, whose numbers are not llama.cpp's: add build, the llama.cpp build number that its "
                "release notes name"
            )


def _git_request(value: Mapping[str, Any]) -> dict[str, Any]:
    """With the repository, what its name says (the fork), and what the form of the ref does: a whole commit is one, and b8600 is the tag
    of build 8600."""
    request = {"repository": capabilities.FORKS[value.get("fork", capabilities.MAINLINE)], **value}
    repository, ref, commit = (request.get(key) for key in ("repository", "ref", "commit"))
    if (
        not isinstance(repository, str)
        or not re.fullmatch(r"[^-\s]\S*( \S+)*", repository)
        or not repository.isprintable()
    ):
        raise Refusal(
            f"llama_release has the repository {repository!r}: use a URL that git knows, or the path of a repository on the controller"
        )
    if re.search(r"(^|[/:])ik_llama\.cpp(\.git)?/*$", repository):
        request.setdefault("fork", capabilities.IK_LLAMA)
    if not isinstance(ref, str) or not re.fullmatch(r"\w[\w./+=@#-]*", ref, re.ASCII) or ".." in ref:
        raise Refusal(
            f"llama_release has the ref {ref!r}: use a tag like b8600, a branch, or a commit with all its digits, in quotes"
        )
    if re.fullmatch(WHOLE_COMMIT, ref):
        commit = request.setdefault("commit", ref)
    elif re.fullmatch(BUILD_TAG, ref):
        request.setdefault("build", int(ref[1:]))
    if "commit" in request and (not isinstance(commit, str) or not re.fullmatch(WHOLE_COMMIT, commit)):
        raise Refusal(f"llama_release has the commit {commit!r}: use all its 40 digits, in quotes")
    return request


def release_of(value: Any, packaged: Mapping[str, str | None]) -> Release:
    """The release that ``llama_release`` asks for: source, what identifies it, and the build number that says what it understands.

    :param value: what the operator gave, with what the controller has looked up.
    :param packaged: host → version of llama.cpp that its distribution packages, or None.
    """
    request = request_of(value)
    patches = tuple(
        Patch(patch["path"], patch["sha256"], tuple(patch["files"])) for patch in request.get("patches", [])
    )
    tree: dict[str, Any] = {key: request[key] for key in ("build", "commit") if key in request}
    tree["fork"] = request.get("fork", capabilities.MAINLINE)
    tree[FAST_LOAD] = wants_fast_load(request)
    if TREE in request:
        tree = {**{key: known for key, known in request[TREE]._asdict().items() if known}, **tree}
    source = request["source"]
    if source == "package":
        ref, origin, packaged_tree = _packaged_tree(request, packaged)
        return _with_id(source, ref, origin, {**packaged_tree, FAST_LOAD: tree[FAST_LOAD]})
    if source == "git":
        return _with_id(source, *_git_origin(request), tree, patches)
    checksum = {"checksum": request["checksum"]}
    if source == "pypi":
        version = str(request["version"])
        origin = {**checksum, "version": version, "member": f"llama_cpp_python-{version}/vendor/llama.cpp"}
        return _with_id(
            source, f"pypi-{version}", origin, {**capabilities.PYPI_TREES.get(version, {}), **tree}, patches
        )
    place: dict[str, str] = {key: request[key] for key in ("path", "url") if key in request}
    return _with_id(source, f"{source}-{request['checksum'][7:15]}", {**checksum, **place, "member": ""}, tree, patches)


def _git_origin(request: Mapping[str, Any]) -> tuple[str, dict[str, str]]:
    """Short name and origin. A build's tag names its content for good, so that a plan needs no network; everything else is a commit."""
    commit, tag = request.get("commit"), re.fullmatch(BUILD_TAG, request["ref"])
    if not commit and not tag:
        raise Refusal(
            f"llama_release has the ref {request['ref']!r}, which was not looked up in {request['repository']}: add its commit"
        )
    return request["ref"] if tag else f"git-{str(commit)[:8]}", {
        "repository": request["repository"],
        "revision": commit or f"refs/tags/{request['ref']}",
        "member": "",
    }


def name_variable(refusal: Refusal, variable: str) -> Refusal:
    """The same, said of the variable of one backend."""
    return Refusal(str(refusal).replace("llama_release ", variable + " ", 1))


def variable_of(backend: str, requests: Mapping[str, Any]) -> str:
    """The variable that gives the release of a backend.

    :param requests: variable → what the operator gave.
    """
    own = f"llama_release_{backend}"
    return own if requests[own] else "llama_release"


def sources_of(requests: Mapping[str, Any]) -> dict[str, str]:
    """Backend → source of its release, of all backends, for which nothing has to be looked up."""
    sources = {}
    for backend in backends.BACKENDS:
        variable = variable_of(backend, requests)
        try:
            sources[backend] = request_of(requests[variable])["source"]
        except Refusal as refusal:
            raise name_variable(refusal, variable) from None
        if sources[backend] == "package" and variable != "llama_release":
            raise Refusal(
                f"{variable} has source: package, which counts for all backends of a distribution: set llama_release to it"
            )
    return sources


def of_backends(requests: Mapping[str, Any], facts: Mapping[str, Facts], used: Iterable[str]) -> dict[str, Release]:
    """Backend → release: ``llama_release_<backend>``, or else ``llama_release``.

    :param facts: of each host.
    :param used: backends that some host has: of others nothing was looked up.
    """
    packaged = {name: known.packaged.version if known.packaged else None for name, known in facts.items()}
    wanted = {}
    for backend in used:
        variable = variable_of(backend, requests)
        try:
            wanted[backend] = release_of(requests[variable], packaged)
        except Refusal as refusal:
            raise name_variable(refusal, variable) from None
    return wanted


def supports(backend: str, release: Release) -> bool:
    """Whether a release has a backend in a form that is planned for."""
    linked = release.fork != capabilities.IK_LLAMA or backend in backends.IK_LLAMA_BACKENDS
    return linked and backends.among(release.generation, backends.RECORDS[backend].builds)


def check(backend: str, release: Release, architectures: Mapping[str, str]) -> None:
    """Refuses a backend that the fork does not have, and programs that are compiled already where hosts of the backend differ in their
    processors.

    :param architectures: host that builds for the backend → architecture of its processor.
    """
    if architectures and release.fork == capabilities.IK_LLAMA and backend not in backends.IK_LLAMA_BACKENDS:
        raise Refusal(
            f"llama_release is one of {capabilities.IK_LLAMA}, which this collection cannot link for {backend}, but "
            f"{', '.join(architectures)} builds for it: set llama_backend there to cpu or vulkan, or llama_release to llama.cpp"
        )
    record = backends.RECORDS[backend]
    if architectures and release.mainline and release.generation < capabilities.RPC_SINCE:
        raise Refusal(
            f"llama_release is build {release.generation}, which is older than RPC (b{capabilities.RPC_SINCE}): use a newer build; where the number is "
            "one of another project (Lemonade's are), add build, llama.cpp's own"
        )
    if architectures and not backends.among(release.generation, record.builds):
        raise Refusal(
            f"llama_release is build {release.generation}, but {backend} is supported from build {record.builds[0]} on, and "
            f"{', '.join(architectures)} builds for it: set llama_backend there to another backend, or llama_release to a newer build"
        )
    if release.source == "binary" and len(set(architectures.values())) > 1:
        kinds = ", ".join(f"{name} {kind}" for name, kind in sorted(architectures.items()))
        raise Refusal(
            f"llama_release has source: binary, programs for one kind of processor, but the hosts differ ({kinds}): use source: git"
        )


def _packaged_tree(
    request: Mapping[str, Any], packaged: Mapping[str, str | None]
) -> tuple[str, dict[str, str], dict[str, Any]]:
    """Of the distribution's package: short name, origin, and the tree it was built from. A version not known here is newer than all that
    are."""
    without = sorted(name for name, version in packaged.items() if not version)
    if without:
        raise Refusal(
            f"llama_release has source: package, but the distribution of {', '.join(without)} has no package of llama.cpp with RPC: Debian has one from "
            "forky on (update the package list with apt update; site.yml fetches a missing list); elsewhere use "
            "source: pypi or archive"
        )
    versions = sorted({str(version) for version in packaged.values()})
    if len(versions) > 1:
        offers = ", ".join(f"{name} {version}" for name, version in sorted(packaged.items()))
        raise Refusal(
            f"llama_release has source: package, but the hosts' packages differ ({offers}): update the distributions to one version, or use source: pypi"
        )
    newest = list(capabilities.PACKAGED_TREES.values())[-1]
    tree = capabilities.PACKAGED_TREES.get(versions[0], {"generation": newest["generation"] + 1})
    if "build" in request:
        tree = {**tree, "build": request["build"], "generation": request["build"]}
    return f"package-{versions[0]}", {"version": versions[0]}, tree


def _with_id(
    source: str, ref: str, origin: dict[str, str], tree: Mapping[str, Any], patches: tuple[Patch, ...] = ()
) -> Release:
    """The whole release, with its id and what it understands. For the id the content counts, not where it or a patch lies.

    :param tree: ``build``, ``commit``, ``generation``, ``protocol`` and ``fork``, as far as they are known, and whether ``fast_load`` is asked for.
    """
    generation = tree.get("generation") or tree.get("build")
    if not isinstance(generation, int) or isinstance(generation, bool) or generation < 1:
        raise Refusal(f"llama_release has the build {generation!r}: add build, the llama.cpp build number of {ref}")
    fork, commit = tree.get("fork", capabilities.MAINLINE), tree.get("commit", "unknown")
    protocol = tree.get("protocol")
    if not capabilities.tells_protocol(generation):
        protocol = protocol or capabilities.protocol_of_commit(commit)
    able = capabilities.of_build(generation, protocol, fork)
    if fork != capabilities.MAINLINE and able["protocol"] is None:
        raise Refusal(
            f"llama_release has the build {generation} of {fork}, whose RPC protocol cannot be detected: use "
            f"{capabilities.IK_LLAMA_PROTOCOLS[1][0]}, its commit of 8 June 2025, or a newer one"
        )
    release = Release(
        "", source, ref, tree.get("build"), commit, generation, fork, able["protocol"], origin, patches, able
    )
    if tree.get(FAST_LOAD):
        patches = (*patches, _fast_load_patch(release))
        release = release._replace(patches=patches)
    places = {"path", "url", "protocol", "id"} | ({"repository"} if commit != "unknown" else set())
    identity = {key: value for key, value in release.as_json().items() if key not in places}
    if patches:
        identity["patches"] = [patch.sha256 for patch in patches]
    return release._replace(id=f"{ref}-{_sha(identity)}")


def same_source(one: Release, other: Release) -> bool:
    """Whether programs of two releases are of the same tree with the same patches, so that head and worker understand each other. They may
    have come as sources and as programs."""
    if one.id == other.id:
        return True
    patches = [{patch.sha256 for patch in release.patches} for release in (one, other)]
    if (one.fork, one.protocol, patches[0]) != (other.fork, other.protocol, patches[1]):
        return False
    commits = sorted((one.commit, other.commit), key=len)
    if "unknown" not in commits:
        return commits[1].startswith(commits[0])
    usual = [release.origin.get("repository") in (None, capabilities.FORKS[release.fork]) for release in (one, other)]
    return one.build is not None and one.build == other.build and all(usual)


class _Kind(NamedTuple):
    """A build as far as it does not depend on other hosts."""

    kind: str
    cmake_options: Mapping[str, str]
    environment: Mapping[str, str]
    tls: bool


def builds(
    equipped: Mapping[str, Equipped],
    wanted: Mapping[str, Release],
    server: Server,
    catalogue: Catalogue,
    secured: str | None,
    measures: bool = False,
) -> dict[str, dict[str, Build]]:
    """Host → backend → build. Hosts of one kind with the same options get the same build, with all programs that one of them needs.

    :param wanted: backend → release.
    :param secured: backend whose llama-server speaks TLS. All hosts have it built so, since hosts of one kind share a build.
    :param measures: whether the head has the program that measures, too.
    """
    kinds = {
        (name, backend): _kind(host, backend, wanted[backend], server, backend == secured)
        for name, host in equipped.items()
        for backend in host.backends
    }
    programs: dict[str, set[str]] = {}
    for (name, backend), kind in kinds.items():
        targets = programs.setdefault(_shared_key(kind, wanted[backend]), set())
        if equipped[name].host.is_worker:
            targets.add(wanted[backend].capabilities["worker_binary"])
        if equipped[name].host.is_head:
            targets.add("llama-server")
            targets.update([options.MEASURING[wanted[backend].fork]] if measures else [])
    planned = {
        name: {
            backend: _build(
                host.host,
                backend,
                kinds[name, backend],
                wanted[backend],
                sorted(programs[_shared_key(kinds[name, backend], wanted[backend])]),
                catalogue,
            )
            for backend in host.backends
        }
        for name, host in equipped.items()
    }
    sharing: dict[str, list[Host]] = {}
    for name, own in planned.items():
        for backend, build in own.items():
            if equipped[name].host.share_builds and wanted[backend].source in COMPILED:
                sharing.setdefault(build.id, []).append(equipped[name].host)
    builders = {
        (host.name, identity): _builder(identity, alike) for identity, alike in sharing.items() for host in alike
    }
    return {
        name: {backend: build._replace(builder=builders.get((name, build.id), name)) for backend, build in own.items()}
        for name, own in planned.items()
    }


def _builder(identity: str, alike: Sequence[Host]) -> str:
    """The host that ``llama_build_host`` names, or the head, or the first of the inventory, of those that share a build."""
    names = [host.name for host in alike]
    wanted = {host.build_host: host.name for host in alike if host.build_host in names}
    if len(wanted) > 1:
        given = ", ".join(f"{builder} (of {name})" for builder, name in wanted.items())
        raise Refusal(
            f"llama_build_host is {given}, but these hosts share the build {identity}: name one host, or set llama_build_share to false"
        )
    return next(iter(wanted), None) or next((host.name for host in alike if host.is_head), names[0])


def _shared_key(kind: _Kind, release: Release) -> str:
    return _sha([kind.kind, release.id, kind.cmake_options])


def _build(host: Host, backend: str, kind: _Kind, release: Release, targets: list[str], catalogue: Catalogue) -> Build:
    paths: dict[str, str] = {}
    if release.source == "package":
        offered = catalogue.llama[host.facts.distribution.family]["programs"]
        missing = [target for target in targets if target not in offered]
        if missing:
            raise Refusal(
                f"llama_benchmark_programs is true, but no package of {host.name}'s distribution is known to have {missing[0]}: use another source in "
                "llama_release"
            )
        paths = {target: offered[target]["path"].format(architecture=host.facts.architecture) for target in targets}
    identity = _sha({"release": release.id, "options": kind.cmake_options, "kind": kind.kind, "targets": targets}, 8)
    return Build(
        id=f"{release.ref}-{backend}-{identity}",
        release=release.id,
        backend=backend,
        kind=kind.kind,
        cmake_options=kind.cmake_options,
        environment=kind.environment,
        targets=tuple(targets),
        packaged=paths,
        builder=host.name,
        tls=kind.tls and "llama-server" in targets,
    )


def _kind(equipped: Equipped, backend: str, release: Release, server: Server, tls: bool) -> _Kind:
    """What hosts have in common that share a build, and how they build.

    :param tls: whether llama-server has to speak it. Programs that are compiled already are tried again for it, as another build.
    """
    host, facts = equipped.host, equipped.host.facts
    kind: dict[str, Any] = {
        "architecture": facts.architecture,
        "distribution": facts.distribution._asdict(),
        "backend": backend,
    }
    if release.source not in COMPILED:
        groups = [group for group, member in (("head", host.is_head), ("worker", host.is_worker)) if member]
        return _Kind(_sha({**kind, "programs": groups, **({"tls": True} if tls else {})}), {}, {}, tls)
    beside = [other for other in equipped.backends if other != backend]
    tools = toolchains.choose(host.name, backend, facts, host.toolchain, facts.architectures(backend), beside)
    toolkit = tools["toolkit"]
    kind.update(
        cpu=facts.cpu["features_id"],
        toolchain=tools["compiler"],
        accelerators=tools["version"],
        toolkit=toolkit["prefix"] if toolkit else None,
    )
    return _Kind(_sha(kind), _options(host, backend, release, server, toolkit, tls), tools["environment"], tls)


def _options(
    host: Host, backend: str, release: Release, server: Server, toolkit: Mapping[str, Any] | None, tls: bool
) -> dict[str, str]:
    """Options for the build of a host, the operator's over ours."""
    architectures = host.facts.architectures(backend)
    all_quants = backends.needs_all_quants(server.cache_type_k, server.cache_type_v, release.fork)
    options = {
        **backends.cmake_options(backend, architectures, release.generation, all_quants, release.fork, tls),
        **host.cmake_options,
        **backends.without(host.facts.cpu.get("unusable", []), host.cmake_options),
    }
    without = [name for name in backends.TLS_OPTIONS if not backends.is_on(host.cmake_options.get(name, "ON"))]
    if tls and without:
        raise Refusal(
            f"llama_build_cmake_options of {host.name} has {without[0]}: {host.cmake_options[without[0]]!r}, so llama-server would be built without TLS, but "
            "llama_server_tls_certificate_file is set: remove one of them"
        )
    if backends.is_on(options["BUILD_SHARED_LIBS"]):
        raise Refusal(
            f"llama_build_cmake_options of {host.name} has BUILD_SHARED_LIBS, but a release holds programs without shared libraries: remove it, and what "
            "needs it (GGML_BACKEND_DL, GGML_CPU_ALL_VARIANTS)"
        )
    if backends.RECORDS[backend].rocwmma and backends.is_on(options.get(backends.ROCWMMA, "")):
        toolchains.check_rocwmma(host.name, toolkit, release.generation, architectures)
    return options
