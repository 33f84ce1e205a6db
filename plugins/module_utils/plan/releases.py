# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The release that an inventory asks for, and the build of it for each kind of host."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable
from typing import Any

from ansible_collections.llamacpp.cluster.plugins.module_utils.common.refusal import Refusal
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp import backends, capabilities
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan import toolchains


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
WHOLE_COMMIT = r"[0-9a-f]{40}([0-9a-f]{24})?"
BUILD_TAG = r"b\d{3,6}"


def request_of(value: Any) -> dict:
    """What ``llama_release`` asks for, as a mapping, with everything checked that can be said without looking anything up.

    The controller looks up what is missing (plugin_utils/sources.py): ``commit`` and ``build`` of a branch or commit, and for each
    of the ``patches`` path, sha256 and files.
    """
    _no_secret_in(value)
    form = f"use a build like b8600, or a mapping with source: {', '.join(SOURCES)}"
    if isinstance(value, str) and re.fullmatch(BUILD_TAG, value):
        value = {"source": "git", "ref": value}
    if not isinstance(value, dict) or value.get("source") not in SOURCES:
        raise Refusal(f"llama_release is {value!r}, which is no known form: {form}")
    allowed = SOURCES[value["source"]]
    unknown = set(value) - allowed
    if unknown:
        raise Refusal(
            f"llama_release has {', '.join(sorted(unknown))}, which source: {value['source']} does not know: use {', '.join(sorted(allowed))}"
        )
    patches = value.get("patches", [])
    if (
        not isinstance(patches, list)
        or not all(patches)
        or not all(isinstance(patch, (str, dict)) for patch in patches)
    ):
        raise Refusal(f"llama_release has the patches {patches!r}: give a list of paths of files on the controller")
    if value.get("fork", capabilities.MAINLINE) not in capabilities.FORKS:
        raise Refusal(
            f"llama_release has the fork {value['fork']!r}: use one of {', '.join(capabilities.FORKS)}; any other runs as llama.cpp where it "
            "kept its options"
        )
    if value["source"] == "git":
        return _git_request(value)
    if value["source"] != "package" and not re.fullmatch(r"sha256:[0-9a-f]{64}", str(value.get("checksum"))):
        raise Refusal(
            f"llama_release has the checksum {value.get('checksum')!r}: give sha256: and the 64 hexadecimal digits of the archive"
        )
    if value["source"] == "pypi" and not re.fullmatch(r"\d+(\.\d+)+(\.?[a-z]+\d*)?", str(value.get("version"))):
        raise Refusal(
            f"llama_release has the version {value.get('version')!r}: give a version of llama-cpp-python, like 0.3.36"
        )
    if "commit" in value and not (
        isinstance(value["commit"], str) and re.fullmatch(r"[0-9a-f]{7,64}", value["commit"])
    ):
        raise Refusal(f"llama_release has the commit {value['commit']!r}: give 7 of its digits or more, in quotes")
    if value["source"] in ("archive", "binary") and bool(value.get("path")) == bool(value.get("url")):
        raise Refusal(
            f"llama_release with source: {value['source']} needs either path, a file on the controller, or url"
        )
    return dict(value)


def _no_secret_in(value: Any) -> None:
    """Before anything else, since other messages show the whole value."""
    remedies = {
        "repository": "give it to git's credential store on the controller",
        "url": "fetch the archive yourself and give its path",
    }
    for key, remedy in remedies.items():
        url = value.get(key) if isinstance(value, dict) else None
        if isinstance(url, str) and re.search(r"^https?://[^/]*@|://[^/@]*:[^/@]*@", url):
            raise Refusal(
                f"llama_release has a {key} with a password or a token in its URL, which would be shown in plans and logs: leave it out, and {remedy}"
            )


def _git_request(value: dict) -> dict:
    """With the repository, what its name tells (the fork), and what the form of the ref does: a whole commit is one, and b8600 is the tag
    of build 8600."""
    request = {"repository": capabilities.FORKS[value.get("fork", capabilities.MAINLINE)], **value}
    repository, ref, commit = (request.get(key) for key in ("repository", "ref", "commit"))
    if (
        not isinstance(repository, str)
        or not re.fullmatch(r"[^-\s]\S*( \S+)*", repository)
        or not repository.isprintable()
    ):
        raise Refusal(
            f"llama_release has the repository {repository!r}: give a URL that git knows, or the path of a repository on the controller"
        )
    if re.search(r"(^|[/:])ik_llama\.cpp(\.git)?/*$", repository):
        request.setdefault("fork", capabilities.IK_LLAMA)
    if not isinstance(ref, str) or not re.fullmatch(r"\w[\w./+=@#-]*", ref, re.ASCII) or ".." in ref:
        raise Refusal(
            f"llama_release has the ref {ref!r}: give a tag like b8600, a branch, or a commit by all its digits, in quotes"
        )
    if re.fullmatch(WHOLE_COMMIT, ref):
        commit = request.setdefault("commit", ref)
    elif re.fullmatch(BUILD_TAG, ref):
        request.setdefault("build", int(ref[1:]))
    if "commit" in request and (not isinstance(commit, str) or not re.fullmatch(WHOLE_COMMIT, commit)):
        raise Refusal(f"llama_release has the commit {commit!r}: give all its 40 digits, in quotes")
    return request


def release_of(value: Any, packaged: dict[str, str | None]) -> dict:
    """The release that ``llama_release`` asks for: source, what identifies it, and the build number that tells what it understands.

    :param value: what the operator gave, with what the controller has looked up.
    :param packaged: host → version of llama.cpp that its distribution packages, or None.
    """
    value = request_of(value)
    patches = [{key: patch[key] for key in ("path", "sha256", "files")} for patch in value.get("patches", [])]
    tree = {key: value[key] for key in ("build", "commit") if key in value}
    if value.get("fork", capabilities.MAINLINE) != capabilities.MAINLINE:
        tree["fork"] = value["fork"]
    if value["source"] == "package":
        return _identified({"source": "package"}, *_packaged_tree(value, packaged))
    if value["source"] == "git":
        return _identified({"source": "git"}, _git_origin(value), tree, patches)
    if value["source"] == "pypi":
        version = str(value["version"])
        tree = {**capabilities.PYPI_TREES.get(version, {}), **tree}
        origin = {
            "version": version,
            "ref": f"pypi-{version}",
            "member": f"llama_cpp_python-{version}/vendor/llama.cpp",
        }
    else:
        origin = {
            **{key: value[key] for key in ("path", "url") if key in value},
            "ref": f"{value['source']}-{value['checksum'][7:15]}",
            "member": "",
        }
    return _identified({"source": value["source"], "checksum": value["checksum"]}, origin, tree, patches)


def _git_origin(value: dict) -> dict:
    """A build's tag names its content for good, so that a plan needs no network; everything else is a commit."""
    commit, tag = value.get("commit"), re.fullmatch(BUILD_TAG, value["ref"])
    if not commit and not tag:
        raise Refusal(
            f"llama_release has the ref {value['ref']!r}, which was not looked up in {value['repository']}: give its commit too"
        )
    return {
        "repository": value["repository"],
        "revision": commit or f"refs/tags/{value['ref']}",
        "ref": value["ref"] if tag else f"git-{str(commit)[:8]}",
        "member": "",
    }


def renamed(refusal: Refusal, variable: str) -> Refusal:
    """The same, said of the variable of one backend."""
    return Refusal(str(refusal).replace("llama_release ", variable + " ", 1))


def variable_of(backend: str, variables: dict) -> str:
    """The variable that gives the release of a backend."""
    own = f"llama_release_{backend}"
    return own if variables[own] else "llama_release"


def sources_of(variables: dict) -> dict[str, str]:
    """Backend → source of its release, of all backends, for which nothing has to be looked up."""
    found = {}
    for backend in backends.BACKENDS:
        variable = variable_of(backend, variables)
        try:
            found[backend] = request_of(variables[variable])["source"]
        except Refusal as refusal:
            raise renamed(refusal, variable) from None
        if found[backend] == "package" and variable != "llama_release":
            raise Refusal(
                f"{variable} has source: package, which all backends of a distribution have in common: set llama_release to it"
            )
    return found


def of_backends(variables: dict, hosts: dict, used: Iterable[str]) -> dict[str, dict]:
    """Backend → release: ``llama_release_<backend>``, or else ``llama_release``.

    :param used: backends that some host has: of others nothing was looked up.
    """
    packaged = {name: (host["facts"].get("packaged") or {}).get("version") for name, host in hosts.items()}
    found = {}
    for backend in used:
        variable = variable_of(backend, variables)
        try:
            found[backend] = release_of(variables[variable], packaged)
        except Refusal as refusal:
            raise renamed(refusal, variable) from None
    return found


def possible(backend: str, release: dict, hosts: dict) -> None:
    """Refuses a backend that the fork does not have, and programs that are compiled already where hosts of the backend differ in their
    processors."""
    kinds = {name: host["facts"]["architecture"] for name, host in hosts.items() if backend in host["backends"]}
    if kinds and release.get("fork") == capabilities.IK_LLAMA and backend not in backends.IK_LLAMA_BACKENDS:
        raise Refusal(
            f"llama_release is one of {capabilities.IK_LLAMA}, which cannot be linked for {backend} as this collection installs it, and "
            f"{', '.join(kinds)} builds for that: set llama_backend there to cpu or vulkan, or llama_release to llama.cpp"
        )
    first = backends.RECORDS[backend].builds[0]
    if kinds and not backends.among(release["generation"], backends.RECORDS[backend].builds):
        raise Refusal(
            f"llama_release is build {release['generation']}, and {backend} is planned from build {first} on, while {', '.join(kinds)} builds for it: "
            "set llama_backend there to another one, or llama_release to a newer build"
        )
    if release["source"] == "binary" and len(set(kinds.values())) > 1:
        told = ", ".join(f"{name} {kind}" for name, kind in sorted(kinds.items()))
        raise Refusal(
            f"llama_release has source: binary, programs for one kind of processor, and the hosts differ ({told}): use source: git"
        )


def _packaged_tree(value: dict, packaged: dict[str, str | None]) -> tuple[dict, dict]:
    """Of the distribution's package: origin, and the tree it was built from. A version not known here is newer than all that are."""
    lacking = sorted(name for name, version in packaged.items() if not version)
    if lacking:
        raise Refusal(
            f"llama_release has source: package, and {', '.join(lacking)} is offered no package of llama.cpp with RPC: Debian has one from "
            "forky on (bring its list of packages up to date with apt update); elsewhere use source: pypi or archive"
        )
    versions = sorted({str(version) for version in packaged.values()})
    if len(versions) > 1:
        told = ", ".join(f"{name} {version}" for name, version in sorted(packaged.items()))
        raise Refusal(
            f"llama_release has source: package, and the hosts' packages differ ({told}): bring the distributions to one version, or use source: pypi"
        )
    newest = list(capabilities.PACKAGED_TREES.values())[-1]
    tree = capabilities.PACKAGED_TREES.get(versions[0], {"generation": newest["generation"]})
    if "build" in value:
        tree = {**tree, "build": value["build"], "generation": value["build"]}
    return {"version": versions[0], "ref": f"package-{versions[0]}"}, tree


def _identified(release: dict, origin: dict, tree: dict, patches: list[dict] | None = None) -> dict:
    """The whole release, with its id and what it understands. For the id the content counts, not where it or a patch lies."""
    generation = tree.get("generation") or tree.get("build")
    if not isinstance(generation, int) or isinstance(generation, bool) or generation < 1:
        raise Refusal(
            f"llama_release has the build {generation!r}: add build, the number of the llama.cpp build that {origin['ref']} holds"
        )
    release = {
        **release,
        **origin,
        "build": tree.get("build"),
        "commit": tree.get("commit", "unknown"),
        "generation": generation,
        **{key: tree[key] for key in ("fork",) if key in tree},
    }
    fork = tree.get("fork", capabilities.MAINLINE)
    able = capabilities.of_build(generation, tree.get("protocol"), fork)
    if fork != capabilities.MAINLINE and able["protocol"] is None:
        raise Refusal(
            f"llama_release has the build {generation} of {fork}, whose RPC cannot be told from what it answers: use "
            f"{capabilities.IK_LLAMA_PROTOCOLS[1][0]}, its commit of 8 June 2025, or a newer one"
        )
    places = {"path", "url"} if tree.get("commit", "unknown") == "unknown" else {"path", "url", "repository"}
    identity: dict[str, Any] = {key: value for key, value in release.items() if key not in places}
    if patches:
        identity["patches"] = [patch["sha256"] for patch in patches]
    return {
        **release,
        **({"patches": patches} if patches else {}),
        "protocol": able["protocol"],
        "id": f"{release['ref']}-{_sha(identity)}",
        "capabilities": able,
    }


def kept(name: str, number: int) -> int:
    """How many releases of each backend a host keeps, the planned one included."""
    if number < 1:
        raise Refusal(f"llama_build_keep of {name} is {number}: give 1 or more, the release that serves is one of them")
    return number


def builds(hosts: dict, releases: dict[str, dict], packaged: dict) -> None:
    """Adds to every host its builds, one for each of its backends; hosts of one kind with the same options get the same, with all
    programs that one of them needs.

    :param releases: backend → release.
    :param packaged: distribution family → what its packages of llama.cpp are called, from packages.yml.
    """
    server = next(host["variables"] for host in hosts.values() if "head" in host["groups"])
    cache_types = server["llama_server_cache_type_k"], server["llama_server_cache_type_v"]
    programs: dict[str, set[str]] = {}
    for name, host in hosts.items():
        host["builds"] = {}
        for backend in host["backends"]:
            release = releases[backend]
            tools, options = None, {}
            if release["source"] in COMPILED:
                prefix = host["variables"]["llama_build_toolchain"]
                beside = [other for other in host["backends"] if other != backend]
                tools = toolchains.chosen(name, backend, host["facts"], prefix, _architectures(host, backend), beside)
                options = _options(name, host, backend, release, cache_types, tools["toolkit"])
            kind = _sha(_kind(host, backend, tools))
            wanted = programs.setdefault(_sha([kind, release["id"], options]), set())
            if "worker" in host["groups"]:
                wanted.add(release["capabilities"]["worker_binary"])
            if "head" in host["groups"]:
                wanted.add("llama-server")
            host["builds"][backend] = {
                "release": release["id"],
                "backend": backend,
                "kind": kind,
                "cmake_options": options,
                "environment": tools["environment"] if tools else {},
                "targets": wanted,
            }
    for host in hosts.values():
        host["builds"] = {
            backend: _build(host, begun, releases[backend], packaged) for backend, begun in host["builds"].items()
        }


def _build(host: dict, begun: dict, release: dict, packaged: dict) -> dict:
    """One build of a host, whole.

    :param begun: the build as far as it does not depend on other hosts, and all its ``targets``.
    """
    targets = sorted(begun["targets"])
    paths: dict[str, str] = {}
    if release["source"] == "package":
        offered = packaged[host["facts"]["distribution"]["family"]]["programs"]
        paths = {
            target: offered[target]["path"].format(architecture=host["facts"]["architecture"]) for target in targets
        }
    identity = _sha(
        {"release": release["id"], "options": begun["cmake_options"], "kind": begun["kind"], "targets": targets}, 8
    )
    return {"id": f"{release['ref']}-{begun['backend']}-{identity}", **begun, "targets": targets, "packaged": paths}


def _kind(host: dict, backend: str, tools: dict | None) -> dict:
    """What hosts have in common that share a build.

    :param tools: what toolchains.chosen says; None where nothing is built.
    """
    facts = host["facts"]
    kind = {key: facts[key] for key in ("architecture", "distribution")} | {"backend": backend}
    if tools is None:
        return {**kind, "programs": host["groups"]}
    return {
        **kind,
        "cpu": facts["cpu"]["features_id"],
        "toolchain": tools["compiler"],
        "accelerators": tools["version"],
        "toolkit": tools["toolkit"]["prefix"] if tools["toolkit"] else None,
    }


def _architectures(host: dict, backend: str) -> list[str]:
    own = [device for device in host["facts"]["accelerators"] if device["backend"] == backend]
    return sorted({device["architecture"] for device in own})


def _options(
    name: str, host: dict, backend: str, release: dict, cache_types: tuple[str, str], toolkit: dict | None
) -> dict[str, str]:
    """Options for the build of a host, the operator's over ours."""
    architectures = _architectures(host, backend)
    fork = release.get("fork", capabilities.MAINLINE)
    all_quants = backends.needs_all_quants(*cache_types, fork)
    options = backends.cmake_options(backend, architectures, release["generation"], all_quants, fork)
    options.update({option: str(value) for option, value in host["variables"]["llama_build_cmake_options"].items()})
    if backends.is_on(options["BUILD_SHARED_LIBS"]):
        raise Refusal(
            f"llama_build_cmake_options of {name} has BUILD_SHARED_LIBS, and a release holds its programs alone: take it out, with what needs it "
            "(GGML_BACKEND_DL, GGML_CPU_ALL_VARIANTS)"
        )
    if backends.RECORDS[backend].rocwmma and backends.is_on(options.get(backends.ROCWMMA, "")):
        toolchains.check_rocwmma(name, toolkit, release["generation"], architectures)
    return options
