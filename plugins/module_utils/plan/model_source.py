# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Where the files of a model lie on the head, and what is said of their source."""

from __future__ import annotations

import hashlib
import json
import posixpath
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from ansible_collections.llamacpp.cluster.plugins.module_utils.common import names, untrusted
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.refusal import Refusal
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.untrusted import Maybe, Number, Text
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp import gguf, model_files, parts, projector
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.values import (
    Model,
    ModelFile,
    ModelRequest,
    ModelSource,
    Quantisation,
)

CONTROLLER = "controller"
LONGEST_FOLDER = 80
"""Characters of a folder's name, before its digest."""
VARIABLES = {role: f"llama_model_{role}" for role in (model_files.MMPROJ, model_files.DRAFT)}
"""Role of a further model → its variable."""
FOUND = {
    "files": Maybe([{**model_files.NAMED, "role": model_files.ROLES, "path": Maybe(Text(r"/.*", 4096))}]),
    "sources": Maybe([{"role": model_files.ROLES, "source": Text(longest=4096), "revision": Maybe(Text())}]),
    "refused": Maybe(Text(longest=8192)),
    "offered": Maybe([{"quantisation": Text(), "bytes": Number()}]),
    "further": Maybe({}),
}
"""What the module model reports beside ``summary`` and ``closed``."""


def asked(source: ModelSource) -> dict[str, Any]:
    """What is asked of a source, as its record has it: the same for the same variables."""
    what: dict[str, Any] = {}
    if source.huggingface:
        what = {"huggingface": source.huggingface._asdict()}
        what["huggingface"]["files"] = list(source.huggingface.files)
    elif source.url:
        what = {"url": list(source.url), "checksum": list(source.checksum)}
    elif source.ollama:
        what = {"ollama": source.ollama}
    elif source.copy:
        what = {"copy": source.copy, **({"checksum": list(source.checksum)} if source.checksum else {})}
    return what if source.role == model_files.MODEL else {**what, "role": source.role}


def folder(prefix: str, source: ModelSource) -> str:
    """Folder on the head for the files of a source: a function of the variables alone, and no other source's."""
    digest = hashlib.sha256(json.dumps(asked(source), sort_keys=True).encode()).hexdigest()[:8]
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", _named(source)).strip("-.")[:LONGEST_FOLDER]
    return f"{prefix}/{names.MODELS}/{name}-{digest}"


def _named(source: ModelSource) -> str:
    """What a person calls it."""
    if source.huggingface:
        wanted = source.huggingface
        return "--".join(filter(None, (wanted.repo.replace("/", "--"), wanted.quantisation)))
    if source.ollama:
        return source.ollama.rpartition("/")[2].replace(":", "-")
    name = model_files.name_of_url(source.url[0]) if source.url else posixpath.basename(str(source.copy))
    return name.removesuffix(".gguf")


class Resolved(NamedTuple):
    """What the sources of a model were resolved to."""

    files: tuple[ModelFile, ...]
    records: tuple[Mapping[str, Any], ...]
    source: str
    revision: str | None
    offered: tuple[Quantisation, ...]
    fetched_by: str | None
    """head or controller; None where the head has everything."""


def check(report: Mapping[str, Any]) -> str | None:
    """Why a report of what was found is not one; None where it is."""
    given = {key: report.get(key) for key in FOUND}
    problem = untrusted.problem("", given) or untrusted.mismatch("", given, FOUND)
    if problem:
        return f"{problem.where.lstrip('.')} {problem.why}"
    for role, summary in (given["further"] or {}).items():
        judge = projector.problem if role == model_files.MMPROJ else gguf.problem
        wrong = judge(summary) if isinstance(summary, Mapping) else "is not a mapping"
        if wrong:
            return f"further.{role} {wrong}"
    named = [file["name"] for file in given["files"] or ()]
    return next((f"{name!r} {why}" for name in named if (why := model_files.problem_of_name(name))), None)


def resolve(request: ModelRequest, report: Mapping[str, Any], prefix: str) -> Resolved:
    """The files of a request, from what was found, or from the variables alone where nothing was looked for.

    :param report: of the shape FOUND.
    :raises Refusal: the names of its files are not known.
    """
    said = {entry["role"]: entry for entry in report.get("sources") or ()}
    files: list[ModelFile] = []
    records, fetched = [], []
    for source in request.sources():
        own = [file for file in report.get("files") or () if file["role"] == source.role]
        own = own or _from_variables(source, request.summary)
        where = folder(prefix, source)
        placed = [_placed(source, file, where) for file in own]
        files += placed
        fetched += [source for file in own if not file.get("path")]
        if any(file.url for file in placed):
            entry = said.get(source.role) or {"source": shown(source), "revision": None}
            records.append({"path": f"{where}/{model_files.RECORD}", **record(source, entry, own)})
    first = (request.source and said.get(model_files.MODEL)) or {}
    return Resolved(
        tuple(files),
        tuple(records),
        first.get("source") or (shown(request.source) if request.source else ""),
        first.get("revision"),
        tuple(Quantisation(entry["quantisation"], entry["bytes"]) for entry in report.get("offered") or ()),
        (CONTROLLER if all(source.copy for source in fetched) else request.fetched_by) if fetched else None,
    )


def record(source: ModelSource, said: Mapping[str, Any], files: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What is written beside the files of a source once they are whole."""
    return {
        "schema": model_files.SCHEMA,
        "asked": asked(source),
        "source": said["source"],
        "revision": said["revision"],
        "resolved": [{key: file.get(key) for key in model_files.RESOLVED} for file in files],
    }


def shown(source: ModelSource, revision: str | None = None) -> str:
    """A source for people."""
    if source.huggingface:
        return f"huggingface:{source.huggingface.repo}@{revision or source.huggingface.revision}"
    if source.ollama:
        return f"ollama:{source.ollama}"
    if source.url:
        return f"url:{source.url[0]}"
    return f"copy:{source.copy}" if source.copy else f"path:{source.path}"


def size_of(summary: Mapping[str, Any]) -> int:
    """Bytes of a model; of its tensors where the size of its files is not known."""
    tensors = sum(summary["layer_bytes"]) + summary["input_bytes"] + summary["output_bytes"]
    return int(summary.get("bytes") or tensors)


def scaled(summary: Mapping[str, Any], size: int) -> dict[str, Any]:
    """The same model as if its files had so many bytes: every tensor in proportion."""
    ratio = size / size_of(summary)
    changed = {
        **{key: int(summary[key] * ratio) for key in ("input_bytes", "output_bytes")},
        "layer_bytes": [int(layer * ratio) for layer in summary["layer_bytes"]],
        "bytes": size,
    }
    if "largest_tensor_bytes" in summary:
        changed["largest_tensor_bytes"] = int(summary["largest_tensor_bytes"] * ratio)
    if "expert_bytes" in summary:
        changed["expert_bytes"] = [int(layer * ratio) for layer in summary["expert_bytes"]]
    if "tensors" in summary:
        changed["tensors"] = [{**row, "bytes": int(row["bytes"] * ratio)} for row in summary["tensors"]]
    return {**summary, **changed}


def as_json(model: Model) -> dict[str, Any]:
    """What the plan says of the model."""
    return {
        "path": model.path,
        "known_answer": model.known_answer._asdict() if model.known_answer else None,
        **{key: model.summary[key] for key in ("name", "architecture", "layers")},
        "source": model.source,
        "revision": model.revision,
        "files": [file._asdict() for file in model.files],
        "records": list(model.records),
        "fetched_by": model.fetched_by,
    }


def _placed(source: ModelSource, file: Mapping[str, Any], where: str) -> ModelFile:
    path = file.get("path") or f"{where}/{model_files.base_name(file['name'])}"
    return ModelFile(file["name"], path, file.get("url"), file.get("bytes"), file.get("sha256"), source.role)


def _with_names(source: ModelSource) -> str:
    """What to do where nobody looks for a source, as the end of a sentence."""
    if source.huggingface:
        return f"or give files in {source.variable}"
    return "or give it files" if source.role == model_files.MODEL else f"or set url or path in {VARIABLES[source.role]}"


def _from_variables(source: ModelSource, summary: Mapping[str, Any] | None) -> list[dict[str, Any]]:
    """The files of a source that nobody looked for, without their sizes."""
    if source.path:
        where, name = posixpath.split(source.path)
        sizes = {file["name"]: file["bytes"] for file in (summary or {}).get("files") or ()}
        own = parts.siblings(name)
        return [{"name": part, "path": posixpath.join(where, part), "bytes": sizes.get(part)} for part in own]
    named: Sequence[str] = ()
    if source.huggingface:
        named = source.huggingface.files
    elif source.url:
        named = [model_files.name_of_url(url) for url in source.url]
    elif source.copy:
        named = parts.siblings(posixpath.basename(source.copy))
    if not named and summary and source.role == model_files.MODEL:
        named = [file["name"] for file in summary.get("files") or ()]
    if not named:
        raise Refusal(
            f"{source.variable} is not looked for where llama_model_gguf_summary is set, so the names of its files are not known: remove "
            f"llama_model_gguf_summary, {_with_names(source)}"
        )
    return [{"name": name, "url": None, "bytes": None, "sha256": None} for name in named]
