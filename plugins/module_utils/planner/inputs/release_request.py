# Copyright (c) 2026 the llamacpp.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""The release that ``llama_release`` requests."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from ansible_collections.llamacpp.cluster.plugins.module_utils.common.errors import Refusal
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp import capabilities, fast_load, prebuilt
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp.words import IK_LLAMA, MAINLINE
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.types import PatchPlan, ReleasePlan
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.types import ReleaseRequest

COMPILED_SOURCES = ("git", "pypi", "archive")
"""Sources that are compiled on the hosts."""
ACCEPTED_KEYS = {
    "git": {"source", "repository", "fork", "ref", "commit", "build", "patches"},
    "pypi": {"source", "version", "checksum", "build", "commit", "patches"},
    "archive": {"source", "path", "url", "checksum", "fork", "build", "commit", "patches"},
    "prebuilt": {"source", "build", "url", "checksums"},
    "binary": {"source", "path", "url", "checksum", "fork", "build", "commit"},
    "package": {"source", "build"},
    "auto": {"source", "url"},
}
"""Source of a release → keys that ``llama_release`` accepts for it."""
DEFAULT_RELEASE = {
    "source": "pypi",
    "version": "0.3.36",
    "checksum": "sha256:832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e",
}
"""Default of ``llama_release``, and the release that ``auto`` compiles."""
CHECKSUM_PATTERN = r"sha256:[0-9a-f]{64}"
"""Form of a checksum. KEY_RULES accepts upper case, too, because some programs print it."""
FULL_COMMIT_PATTERN = r"[0-9a-f]{40}([0-9a-f]{24})?"
BUILD_TAG_PATTERN = r"b\d{3,6}"
VERSION_TAG_PATTERN = r"v\d+\.\d+\.\d+"
"""Form of upstream's version tags, which exist since v0.1.0 (August 2026) in addition to build tags."""


def _key_rule(expression: str, remedy: str) -> tuple[re.Pattern[str], str]:
    return re.compile(expression, re.ASCII), remedy


KEY_RULES = {
    "checksum": _key_rule(f"(?i:{CHECKSUM_PATTERN})", "sha256: and the 64 hexadecimal digits of the archive's hash"),
    "version": _key_rule(r"\d+(\.\d+)+(\.?[a-z]+\d*)?", "a version of llama-cpp-python, like 0.3.36"),
    "commit": _key_rule(r"[0-9a-f]{7,64}", "at least the first 7 digits of the commit's hash, in quotes"),
    "git commit": _key_rule(FULL_COMMIT_PATTERN, "all digits of the commit's hash, in quotes"),
    "repository": _key_rule(r"[^-\s]\S*( \S+)*", "a git URL, or the path of a repository on the controller"),
    "ref": _key_rule(
        r"(?!.*\.\.)\w[\w./+=@#-]*", "a tag like b11434, a branch, or a commit with all its digits, in quotes"
    ),
    "archive path": _key_rule(r".+(?<!\.zip)", "the path of a tar archive on the controller (repack a .zip as tar)"),
    "archive url": _key_rule(
        r"https?://\S+(?<!\.zip)",
        "the http:// or https:// address of a tar archive (repack a .zip as tar, and set path instead)",
    ),
    "path": _key_rule(r".+", "the path of an archive on the controller"),
    "url": _key_rule(r"https?://\S+", "the http:// or https:// address of an archive"),
    "prebuilt url": _key_rule(
        r"https?://\S+",
        f"the address of a folder that contains folders like b{prebuilt.AUTO_BUILD}, for example {prebuilt.BASE_URL}",
    ),
    "fork": _key_rule(
        "|".join(map(re.escape, capabilities.FORKS)),
        f"{' or '.join(capabilities.FORKS)}; use llama.cpp for other forks with the options of llama.cpp",
    ),
}
"""Key of ``llama_release``, after the name of a source if only that source has this form → form, and what to use."""
REQUIRED_KEYS = {"git": ["ref"], "pypi": ["version", "checksum"], "archive": ["checksum"], "binary": ["checksum"]}


def request_of(value: Any) -> ReleaseRequest:
    """Return the release that ``llama_release`` requests, checked as far as possible without lookups.

    The controller (plugin_utils/sources/sources.py) looks up ``commit`` and ``build`` of a branch or commit, and sha256 and files of each patch.
    """
    if isinstance(value, str) and re.fullmatch(f"{BUILD_TAG_PATTERN}|{VERSION_TAG_PATTERN}", value):
        value = {"source": "git", "ref": value}
    value = {"source": value} if value == "auto" else value
    if not isinstance(value, dict) or str(value.get("source")) not in ACCEPTED_KEYS:
        remedy = f"use a build like b11434, a version like v0.4.1, auto, or a mapping whose source is one of {', '.join(ACCEPTED_KEYS)}"
        if isinstance(value, str) and value.startswith("{"):
            remedy = 'put keys and texts in quotes in an INI inventory, like llama_release={"source": "auto"} below [llama_cluster:vars]'
        if re.fullmatch(r"\d{3,6}", str(value)):
            remedy = f"use b{value}"
        raise Refusal(f"llama_release is {value!r}, which is not valid: {remedy}")
    fields = {str(key): field for key, field in value.items() if field is not None}
    source, known_keys = fields["source"], ACCEPTED_KEYS[fields["source"]]
    unknown_keys = set(fields) - known_keys
    if unknown_keys:
        raise Refusal(
            f"llama_release has {', '.join(sorted(unknown_keys))}, which source: {source} does not accept: use only these keys: {', '.join(sorted(known_keys))}"
        )
    _check_field_formats(fields)
    patches, checksums = fields.pop("patches", []), fields.pop("checksums", {})
    if "checksum" in fields:
        fields["checksum"] = fields["checksum"].lower()
    if source == "git":
        fields = _git_fields(fields)
    return ReleaseRequest(
        **fields,
        patches=tuple(PatchPlan(path, "", ()) for path in patches),
        checksums=tuple(sorted((name, checksum.lower()) for name, checksum in checksums.items())),
    )


def _check_field_formats(fields: Mapping[str, Any]) -> None:
    source, build = fields["source"], fields.get("build", 0)
    if not isinstance(build, int) or isinstance(build, bool):
        raise Refusal(f"llama_release sets build to {build!r}: use llama.cpp's build number, a whole number")
    for key in [*REQUIRED_KEYS.get(source, ()), *fields]:
        pattern, remedy = (
            KEY_RULES.get(f"{'prebuilt' if source == 'auto' else source} {key}") or KEY_RULES.get(key) or (None, "")
        )
        if pattern and not (
            isinstance(fields.get(key), str) and pattern.fullmatch(fields[key]) and fields[key].isprintable()
        ):
            value = f"sets {key} to {fields[key]!r}" if key in fields else f"has no {key}"
            raise Refusal(f"llama_release {value}: set {key} to {remedy}")
    if source in ("archive", "binary") and ("path" in fields) == ("url" in fields):
        problem = "both path and url" if "path" in fields else "neither path nor url"
        raise Refusal(f"llama_release has {problem}: set either path (a file on the controller) or url")
    if source == "prebuilt" and not build:
        raise Refusal(
            "llama_release has source: prebuilt but no build: add the number of an upstream build (versions like v0.4.1 have no archives)"
        )
    patches, checksums = fields.get("patches", []), fields.get("checksums", {})
    if not isinstance(patches, list) or not all(patch and isinstance(patch, str) for patch in patches):
        raise Refusal(f"llama_release sets patches to {patches!r}: use a list of paths on the controller")
    archive_pattern = rf"(cudart-)?llama-b{build}-bin-[\w.-]+\.tar\.gz"
    for name, checksum in checksums.items() if isinstance(checksums, dict) else [("", "")]:
        if not re.fullmatch(archive_pattern, str(name)) or not KEY_RULES["checksum"][0].fullmatch(str(checksum)):
            raise Refusal(
                f"llama_release sets checksums to {checksums!r}: map archive names like llama-b{build}-bin-ubuntu-x64.tar.gz to sha256: and 64 hexadecimal "
                "digits"
            )


def _git_fields(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields with the repository, the fork that its name implies, and the commit or build that the ref implies (b11434: build 11434)."""
    fork, ref = fields.get("fork", MAINLINE), fields["ref"]
    repository = fields.get("repository", capabilities.FORKS[fork])
    if "fork" not in fields and re.search(r"(^|[/:])ik_llama\.cpp(\.git)?/*$", repository):
        fork = IK_LLAMA
    defaults: dict[str, Any] = {"repository": repository, "fork": fork}
    if re.fullmatch(FULL_COMMIT_PATTERN, ref):
        defaults["commit"] = ref
    elif re.fullmatch(BUILD_TAG_PATTERN, ref):
        defaults["build"] = int(ref[1:])
    return {**defaults, **fields, "fork": fork}


def with_variable(refusal: Refusal, variable: str) -> Refusal:
    return Refusal(str(refusal).replace("llama_release ", variable + " ", 1))


def release_json(release: ReleasePlan) -> str:
    """Return the ``llama_release`` for a release of a plan, as JSON, which is also valid YAML."""
    fields: dict[str, Any] = {
        key: getattr(release, key, None) for key in sorted(ACCEPTED_KEYS[release.source]) if key != "commit"
    }
    if release.source == "git":
        fields["ref"] = str(release.revision).replace("refs/tags/", "", 1)
    patches = [patch.path for patch in release.patches if not fast_load.is_fast_load_patch(patch.sha256)]
    return json.dumps({key: value for key, value in {**fields, "patches": patches}.items() if value})
