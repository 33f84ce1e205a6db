# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What ``llama_release`` asks for."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from ansible_collections.llamacpp.cluster.plugins.module_utils.common.errors import Refusal
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp import (
    capabilities,
    fast_load,
    prebuilt,
)
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp.words import IK_LLAMA, MAINLINE
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.types import ReleasePlan
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.types import PatchRequest, ReleaseRequest

COMPILED = ("git", "pypi", "archive")
"""Sources that are compiled on the hosts."""
SOURCES = {
    "git": {"source", "repository", "fork", "ref", "commit", "build", "patches"},
    "pypi": {"source", "version", "checksum", "build", "commit", "patches"},
    "archive": {"source", "path", "url", "checksum", "fork", "build", "commit", "patches"},
    "prebuilt": {"source", "build", "url", "checksums"},
    "binary": {"source", "path", "url", "checksum", "fork", "build", "commit"},
    "package": {"source", "build"},
    "auto": {"source", "url"},
}
"""Source of a release → what ``llama_release`` may say of it."""
DEFAULT = {
    "source": "pypi",
    "version": "0.3.36",
    "checksum": "sha256:832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e",
}
"""Of ``llama_release``, and what ``auto`` has compiled."""
SHA256 = r"sha256:[0-9a-f]{64}"
"""In capitals, too: some programs print them so."""
WHOLE_COMMIT = r"[0-9a-f]{40}([0-9a-f]{24})?"
BUILD_TAG = r"b\d{3,6}"
VERSION_TAG = r"v\d+\.\d+\.\d+"
"""Upstream's tags besides those of builds, from v0.1.0 of August 2026 on."""


def request_of(value: Any) -> ReleaseRequest:
    """What ``llama_release`` asks for, with everything checked that can be said without looking anything up.

    The controller looks up what is missing (plugin_utils/sources/sources.py): ``commit`` and ``build`` of a branch or commit, and for each
    of the ``patches`` sha256 and files.
    """
    form = f"use a build like b11434, a version like v0.4.1, auto, or a mapping with source: {', '.join(SOURCES)}"
    if isinstance(value, str) and re.fullmatch(f"{BUILD_TAG}|{VERSION_TAG}", value):
        value = {"source": "git", "ref": value}
    value = {"source": value} if value == "auto" else value
    if not isinstance(value, dict) or str(value.get("source")) not in SOURCES:
        raise Refusal(f"llama_release is {value!r}, which is not a valid form: {form}")
    source, allowed = value["source"], SOURCES[value["source"]]
    unknown = set(value) - allowed
    if unknown:
        raise Refusal(
            f"llama_release has {', '.join(sorted(map(str, unknown)))}, which source: {source} does not accept: use {', '.join(sorted(allowed))}"
        )
    patches = _patches(value.get("patches", []))
    if str(value.get("fork", MAINLINE)) not in capabilities.FORKS:
        raise Refusal(
            f"llama_release has the fork {value['fork']!r}: use one of {', '.join(capabilities.FORKS)}; other forks run as llama.cpp if they "
            "kept its options"
        )
    _refuse_zip(value)
    request = ReleaseRequest(
        source,
        build=_build(value.get("build")),
        fork=value.get("fork", MAINLINE),
        path=_text(value, "path"),
        url=_text(value, "url"),
        patches=patches,
    )
    if source == "git":
        return _git_request(request, value)
    if source == "package":
        return request
    if request.url is not None and source in ("prebuilt", "auto") and not re.fullmatch(r"https?://\S+", request.url):
        raise Refusal(
            f"llama_release has the url {request.url!r}: use the address of a folder with folders like b{prebuilt.TESTED}, as {prebuilt.URL} is one"
        )
    if source == "auto":
        return request
    if source == "prebuilt":
        return _prebuilt_request(request, value)
    checksum = str(value.get("checksum")).lower()
    if not re.fullmatch(SHA256, checksum):
        raise Refusal(
            f"llama_release has the checksum {value.get('checksum')!r}: use sha256: and the 64 hexadecimal digits of the archive"
        )
    if source == "pypi" and not re.fullmatch(r"\d+(\.\d+)+(\.?[a-z]+\d*)?", str(value.get("version"))):
        raise Refusal(
            f"llama_release has the version {value.get('version')!r}: use a version of llama-cpp-python, like 0.3.36"
        )
    commit = value.get("commit")
    if "commit" in value and not (isinstance(commit, str) and re.fullmatch(r"[0-9a-f]{7,64}", commit)):
        raise Refusal(f"llama_release has the commit {commit!r}: use 7 of its digits or more, in quotes")
    if source in ("archive", "binary") and bool(request.path) == bool(request.url):
        raise Refusal(f"llama_release with source: {source} needs either path, a file on the controller, or url")
    return request._replace(checksum=checksum, version=str(value.get("version", "")), commit=commit)


def _prebuilt_request(request: ReleaseRequest, value: Mapping[str, Any]) -> ReleaseRequest:
    if request.build is None:
        raise Refusal(
            "llama_release has source: prebuilt and no build: add the number of one of upstream's builds; versions like v0.4.1 have no archives"
        )
    given = value.get("checksums", {})
    names = rf"(cudart-)?llama-b{request.build}-bin-[\w.-]+\.tar\.gz"
    for name, checksum in given.items() if isinstance(given, dict) else [(None, given)]:
        if not re.fullmatch(names, str(name)) or not re.fullmatch(SHA256, str(checksum).lower()):
            raise Refusal(
                f"llama_release has the checksums {given!r}: use a mapping from names like llama-b{request.build}-bin-ubuntu-x64.tar.gz to sha256: and the "
                "64 hexadecimal digits of that archive"
            )
    return request._replace(checksums=tuple(sorted((name, checksum.lower()) for name, checksum in given.items())))


def _patches(given: Any) -> tuple[PatchRequest, ...]:
    if not isinstance(given, list) or not all(given) or not all(isinstance(patch, (str, dict)) for patch in given):
        raise Refusal(f"llama_release has the patches {given!r}: give a list of paths of files on the controller")
    return tuple(
        PatchRequest(patch)
        if isinstance(patch, str)
        else PatchRequest(str(patch.get("path")), str(patch.get("sha256")), tuple(map(str, patch.get("files", ()))))
        for patch in given
    )


def _build(given: Any) -> int | None:
    if given is not None and (not isinstance(given, int) or isinstance(given, bool)):
        raise Refusal(f"llama_release has the build {given!r}: use a whole number, the build number of llama.cpp")
    return given


def _text(value: Mapping[str, Any], key: str) -> str | None:
    given = value.get(key)
    if given is not None and not isinstance(given, str):
        wanted = "the path of a file on the controller" if key == "path" else "the address of an archive"
        raise Refusal(f"llama_release has the {key} {given!r}: use {wanted}")
    return given


def name_variable(refusal: Refusal, variable: str) -> Refusal:
    """The same, said of the variable of one backend."""
    return Refusal(str(refusal).replace("llama_release ", variable + " ", 1))


def declaration(release: ReleasePlan) -> str:
    """What ``llama_release`` has to be for a release of a plan, as JSON, which YAML reads too."""
    given: dict[str, Any] = {
        key: getattr(release, key, None) for key in sorted(SOURCES[release.source]) if key != "commit"
    }
    if release.source == "git":
        given["ref"] = str(release.revision).replace("refs/tags/", "", 1)
    own = [patch.path for patch in release.patches or () if not fast_load.is_ours(patch.sha256)]
    return json.dumps({key: value for key, value in {**given, "patches": own}.items() if value})


def _refuse_zip(value: Mapping[str, Any]) -> None:
    """Refuses zip archives of sources."""
    for key in ("path", "url"):
        place = value.get(key)
        if value["source"] != "binary" and isinstance(place, str) and re.search(r"\.zip($|[?#])", place):
            raise Refusal(
                f"llama_release has the {key} {place!r}, a zip archive, of which hosts unpack compiled programs only (source: binary): pack its content "
                "with tar, and give that as path with its own checksum"
            )


def _git_request(request: ReleaseRequest, value: Mapping[str, Any]) -> ReleaseRequest:
    """With the repository, what its name says (the fork), and what the form of the ref does: a whole commit is one, and b11434 is the tag
    of build 11434."""
    repository = value.get("repository", capabilities.FORKS[request.fork])
    ref, commit, build = value.get("ref"), value.get("commit"), request.build
    if (
        not isinstance(repository, str)
        or not re.fullmatch(r"[^-\s]\S*( \S+)*", repository)
        or not repository.isprintable()
    ):
        raise Refusal(
            f"llama_release has the repository {repository!r}: use a URL that git knows, or the path of a repository on the controller"
        )
    named = "fork" not in value and re.search(r"(^|[/:])ik_llama\.cpp(\.git)?/*$", repository)
    if not isinstance(ref, str) or not re.fullmatch(r"\w[\w./+=@#-]*", ref, re.ASCII) or ".." in ref:
        raise Refusal(
            f"llama_release has the ref {ref!r}: use a tag like b11434, a branch, or a commit with all its digits, in quotes"
        )
    if re.fullmatch(WHOLE_COMMIT, ref):
        commit = value.get("commit", ref)
    elif re.fullmatch(BUILD_TAG, ref) and "build" not in value:
        build = int(ref[1:])
    if commit is not None and (not isinstance(commit, str) or not re.fullmatch(WHOLE_COMMIT, commit)):
        raise Refusal(f"llama_release has the commit {commit!r}: use all its 40 digits, in quotes")
    fork = IK_LLAMA if named else request.fork
    return request._replace(repository=repository, ref=ref, commit=commit, build=build, fork=fork)
