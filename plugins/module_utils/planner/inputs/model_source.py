# Copyright (c) 2026 the llamacpp.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""The files of a model on the head, and reports and messages about their source."""

from __future__ import annotations

import hashlib
import json
import posixpath
import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, NamedTuple, cast

from ansible_collections.llamacpp.cluster.plugins.module_utils.common import names, service_managers, typed_json
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.errors import Refusal
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.validation import Text
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp import rpc_upload
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp.model import (
    header_summary,
    known_answer,
    split_files,
)
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp.model.projector import Projector
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp.model.summary import ModelSummary
from ansible_collections.llamacpp.cluster.plugins.module_utils.models import download_record
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan import host_types
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.host_types import ModelFilePlan
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.types import ModelPlan
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.facts import Facts
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.inputs import turns
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.types import (
    Cluster,
    Model,
    ModelReport,
    ModelRequest,
    ModelSource,
    Quantisation,
)

HIDDEN_FOLDERS = ("/tmp/", "/var/tmp/")
"""Folders of the host that a unit cannot see, because it has private ones (PrivateTmp)."""
AUXILIARY_OPTIONS = {host_types.MMPROJ: "projector", host_types.DRAFT: "draft"}
"""Role of a file → llama-server's option for it."""
MAX_NAME_LENGTH = 80
"""Characters of an alias, or of a folder's name before its digest."""
AUXILIARY_VARIABLES = {role: f"llama_model_{role}" for role in (host_types.MMPROJ, host_types.DRAFT)}
"""Role of an auxiliary model → its variable."""


def is_fetched(source: ModelSource) -> bool:
    """Return whether the files of a source are downloaded or copied to the head; other files are used in place."""
    return bool(source.huggingface or source.url or source.copy)


def model_folder(prefix: str, source: ModelSource) -> str:
    """Return the folder on the head for the files of a source. It depends only on the variables, and each source has a folder of its own."""
    digest = hashlib.sha256(json.dumps(source._replace(variable="")).encode()).hexdigest()[:8]
    name = re.sub("[/:]", "--", _readable_name(source))
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.")[:MAX_NAME_LENGTH]
    return f"{prefix}/{names.MODELS_FOLDER}/{name}-{digest}"


def _readable_name(source: ModelSource) -> str:
    """Return the name that a person would use for the model."""
    if source.huggingface:
        return ":".join(filter(None, (source.huggingface.repo, source.huggingface.quantisation)))
    if source.ollama:
        return source.ollama.rpartition("/")[2]
    name = (
        download_record.name_of_url(source.url) if source.url else posixpath.basename(str(source.path or source.copy))
    )
    return name.removesuffix(".gguf")


def alias_of(request: ModelRequest) -> str:
    """Return the model's name in llama-server, which clients see: as requested, or the name of the file or repository, without its path."""
    if request.alias is not None:
        return request.alias
    if not request.source:
        return "known-answer"
    name = re.sub(r"-00001-of-\d{5}$", "", _readable_name(request.source))
    return re.sub(r"[^A-Za-z0-9._/:@+-]+", "-", name).strip("-.")[:MAX_NAME_LENGTH] or "model"


class RawModelReport(NamedTuple):
    """The raw report of the module model_info."""

    files: tuple[ModelFilePlan, ...] = ()
    refused: Annotated[str | None, Text(max_length=8192)] = None
    offered: tuple[Quantisation, ...] = ()
    auxiliary: Mapping[str, Any] = {}
    summary: Any = None
    unreadable_path: str | None = None


def with_reports(cluster: Cluster, data: Mapping[str, Any]) -> Cluster:
    """Return the cluster with the report of the module model_info about its model, or about each of several models.

    :param data: result of the module; empty if it did not run. For several models it has ``models``: name → report.
    """
    entries = tuple(
        entry._replace(model=_with_report(entry.model, turns.report_of(data, entry.name)))
        for entry in cluster.model_entries
    )
    return cluster._replace(
        model=entries[0].model if entries else _with_report(cluster.model, data), model_entries=entries
    )


def _with_report(request: ModelRequest, data: Mapping[str, Any]) -> ModelRequest:
    report = parse_model_report(data)
    summary = request.summary if request.known_answer else report.summary or request.summary
    return request._replace(report=report, summary=summary)


def parse_model_report(data: Any) -> ModelReport:
    """Parse a report of the module model_info. If it is invalid, the result has only ``problem``."""
    try:
        raw_report = typed_json.parse(RawModelReport, data)
        draft, projector = (raw_report.auxiliary.get(role) for role in (host_types.DRAFT, host_types.MMPROJ))
        file_names = [file.name for file in raw_report.files]
        return ModelReport(
            problem=next(
                (f"{name!r} {problem}" for name in file_names if (problem := download_record.problem_of_name(name))), ""
            ),
            summary=header_summary.parse(raw_report.summary) if raw_report.summary else None,
            unreadable_path=raw_report.unreadable_path,
            refusal_text=raw_report.refused,
            files=raw_report.files,
            offered=raw_report.offered,
            draft=None if draft is None else header_summary.parse(draft),
            projector=None if projector is None else typed_json.parse(Projector, projector),
        )
    except typed_json.Mismatch as error:
        return ModelReport(str(error))


def files_of(request: ModelRequest, prefix: str) -> tuple[ModelFilePlan, ...]:
    """Return the files of a model: the reported files of each source, or without a report the files that the variables name.

    :raises Refusal: the names of its files are unknown.
    """
    files: list[ModelFilePlan] = []
    for source in request.sources():
        folder = model_folder(prefix, source)
        reported_files = [file for file in request.report.files if file.role == source.role]
        files += [
            file if file.path else file._replace(path=f"{folder}/{download_record.base_name(file.name)}")
            for file in reported_files or _files_from_variables(source, request.summary)
        ]
    return tuple(files)


def source_text(source: ModelSource, revision: str | None = None) -> str:
    if source.huggingface:
        return f"huggingface:{source.huggingface.repo}@{revision or source.huggingface.revision}"
    if source.ollama:
        return f"ollama:{source.ollama}"
    if source.url:
        return f"url:{source.url}"
    return f"copy:{source.copy}" if source.copy else f"path:{source.path}"


def scale_summary(summary: ModelSummary, size: int) -> ModelSummary:
    """Return the summary as if the files had this number of bytes, with every tensor scaled in proportion."""
    ratio = size / summary.size

    def scale(byte_count: int) -> int:
        return int(byte_count * ratio)

    largest_bytes, tensors = summary.largest_tensor_bytes, summary.tensors
    return summary._replace(
        input_bytes=scale(summary.input_bytes),
        output_bytes=scale(summary.output_bytes),
        layer_bytes=tuple(map(scale, summary.layer_bytes)),
        bytes=size,
        largest_tensor_bytes=None if largest_bytes is None else scale(largest_bytes),
        expert_bytes=tuple(map(scale, summary.expert_bytes)),
        tensors=None if tensors is None else tuple(row._replace(bytes=scale(row.bytes)) for row in tensors),
    )


def model_plan_of(model: Model) -> ModelPlan:
    large_tensor_bytes = {row.bytes for row in model.summary.tensor_groups if row.bytes > rpc_upload.CACHE_THRESHOLD}
    return ModelPlan(
        path=model.path,
        name=model.summary.name,
        architecture=model.summary.architecture,
        layers=model.summary.layers,
        large_tensor_bytes=tuple(sorted(large_tensor_bytes)),
        known_answer=model.known_answer,
        source=model.source,
        revision=model.revision,
        files=model.files,
        chat_template=None
        if model.known_answer or known_answer.is_model_name(model.summary.name)
        else model.summary.chat_template,
    )


def _files_from_variables(source: ModelSource, summary: ModelSummary | None) -> list[ModelFilePlan]:
    """Return the files of a source that was not looked up. Their sizes come from the summary, if at all."""
    files = summary.files if summary else ()
    if source.path:
        parent, name = posixpath.split(source.path)
        sizes = dict(files)
        part_names = split_files.part_names(name)
        return [
            ModelFilePlan(part, source.role, posixpath.join(parent, part), bytes=sizes.get(part)) for part in part_names
        ]
    file_names: Sequence[str] = ()
    if source.huggingface:
        file_names = source.huggingface.files
    elif source.url:
        file_names = split_files.part_names(download_record.name_of_url(source.url))
    elif source.copy:
        file_names = split_files.part_names(posixpath.basename(source.copy))
    if not file_names and source.role == host_types.MODEL:
        file_names = [name for name, _size in files]
    if not file_names:
        raise Refusal(
            f"{source.variable} is not looked up because llama_model_gguf_summary is set, so its file names are unknown: remove llama_model_gguf_summary, "
            "or name the file itself (path, URL or files)"
        )
    return [ModelFilePlan(name, source.role) for name in file_names]


def model_of(request: ModelRequest, facts: Facts) -> Model:
    """Return the model that the head serves.

    :raises Refusal: the files or the header are unknown, or services cannot read the files.
    """
    source, report, summary = next(iter(request.sources()), None), request.report, request.summary
    if source and report.problem:
        raise typed_json.refusal_of_report("the head", f"the model ({_source_clause(source)})", report.problem)
    if report.refusal_text:
        raise Refusal(report.refusal_text)
    if request.known_answer:
        problem = known_answer.problem(*request.known_answer)
        if problem:
            raise Refusal(f"llama_model_known_answer describes an impossible model: {problem}")
    elif summary is None:
        raise Refusal(
            f"{_source_clause(cast(ModelSource, request.source))}, but its header was not read: make the head reachable, or set llama_model_gguf_summary"
        )
    files = files_of(request, facts.prefix)
    model_file = next((file for file in files if file.role == host_types.MODEL), None)
    revision = model_file.revision if model_file else None
    path = known_answer.path_of(facts.prefix, *request.known_answer) if request.known_answer else ""
    model = Model(
        path=path or str(model_file and model_file.path),
        known_answer=request.known_answer,
        summary=cast(ModelSummary, summary),
        source=source_text(request.source, revision) if request.source else "known-answer",
        alias=alias_of(request),
        revision=revision,
        files=files,
        offered=report.offered,
        draft=report.draft if request.draft else None,
        projector=report.projector if request.mmproj else None,
    )
    if request.source:
        _check_readable(request.source, model, report, facts)
    return model


def _check_readable(source: ModelSource, model: Model, report: ModelReport, facts: Facts) -> None:
    """Refuse files that the service cannot read."""
    if facts.scope == "system" and report.unreadable_path:
        raise Refusal(
            f"{source.variable} is {model.path!r}, but the service account {names.ACCOUNT} cannot read {report.unreadable_path}: run "
            f"chmod o+rX {shlex.quote(report.unreadable_path)}, or move the model to /srv"
        )
    for file in model.files:
        if service_managers.MANAGERS[facts.service_manager].hides_homes and file.path.startswith(HIDDEN_FOLDERS):
            variable = source.variable if file.role == source.role else AUXILIARY_VARIABLES[file.role]
            raise Refusal(
                f"{variable} names {file.path!r}, but services cannot see the host's /{file.path.split('/')[1]}: move the model to /srv"
            )


def _source_clause(source: ModelSource) -> str:
    """Return the beginning of a sentence about a model."""
    return f"{source.variable} is {source.path!r}" if source.path else f"{source.variable} is {source_text(source)}"
