# Copyright (c) 2026 the llamacpp.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Looks up a model at its origin: finds its files, and reads their headers, over HTTP with range requests."""

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

from ansible_collections.llamacpp.cluster.plugins.module_utils.common import reading
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.errors import Refusal
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp.model import gguf, header_summary, projector
from ansible_collections.llamacpp.cluster.plugins.module_utils.models import web
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan import host_types
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.host_types import ModelFilePlan
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner import types
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.inputs import model_source
from ansible_collections.llamacpp.cluster.plugins.plugin_utils.models import hub

Summary = Mapping[str, Any]
"""JSON of header_summary.summarize or projector.summarize."""


class ResolvedSource(NamedTuple):
    files: Sequence[ModelFilePlan]
    summary: Summary | None = None
    unreadable_path: str | None = None
    """Folder or file whose mode prevents the service from reading the model."""
    quantisations: Sequence[types.Quantisation] = ()


class Query(NamedTuple):
    """A source, and the settings of its lookup."""

    source: types.ModelSource
    token: str | None = None
    folder: str = ""
    """Base folder of the operator's relative paths."""

    @property
    def local_path(self) -> Path:
        return Path(join_path(self.folder, str(self.source.copy))).absolute()


def join_path(folder: str, path: str) -> str:
    return os.path.join(folder, os.path.expanduser(path))


def look_up(query: Query, limit_seconds: float) -> ResolvedSource:
    source = query.source
    look_up_source = _look_up_huggingface if source.huggingface else _look_up_copy if source.copy else _look_up_url
    try:
        return cast(ResolvedSource, reading.run_within(limit_seconds, lambda: look_up_source(query)))
    except reading.TooSlowError as error:
        raise Refusal(
            f"{source.variable} {error}: check the network and the server or disk that holds {model_source.source_text(source)}, then try again"
        ) from None


def _read_headers(
    query: Query, read_headers: Callable[[], gguf.ModelHeader], location: str
) -> tuple[Sequence[Mapping[str, Any]], Summary | None]:
    """Return the names and sizes of a model's files, and the model's summary."""
    source = query.source
    try:
        model = read_headers()
        if source.role == host_types.MMPROJ:
            return model.files, projector.summarize(model) if projector.is_projector(model) else None
        return model.files, header_summary.summarize(model)
    except web.RemoteError as error:
        reason = web.explain_error(error, query.token)
    except gguf.GGUFError as error:
        reason = str(error)
    raise Refusal(f"{source.variable} is {location}, which {reason}")


def _look_up_huggingface(query: Query) -> ResolvedSource:
    source, repository = query.source, cast(types.HuggingFace, query.source.huggingface)
    listing = hub.list_files(source, query.token)
    files = hub.choose_files(listing, source)
    url, name = str(files[0].url), files[0].name
    _files, summary = _read_headers(query, lambda: web.read_header(url, query.token), f"{repository.repo}, {name}")
    return ResolvedSource(files, summary, quantisations=hub.quantisations(listing, source, name))


def _look_up_url(query: Query) -> ResolvedSource:
    source, url = query.source, str(query.source.url)
    files, summary = _read_headers(query, lambda: web.read_header(url, query.token), web.printable_url(url))
    return ResolvedSource(
        _model_files(source, files, web.printable_url(url), lambda name: web.sibling_url(url, name)), summary
    )


def _model_files(
    source: types.ModelSource, files: Sequence[Mapping[str, Any]], location: str, url_of_name: Callable[[str], str]
) -> list[ModelFilePlan]:
    """Return the files of a model, with the operator's checksums if there are any."""
    if source.checksum and len(source.checksum) != len(files):
        raise Refusal(
            f"{source.variable} is {location}, a model with {len(files)} parts, but has {len(source.checksum)} checksums: set a checksum for each part, "
            "in order"
        )
    return [
        ModelFilePlan(file["name"], source.role, url=url_of_name(file["name"]), bytes=file["bytes"], sha256=checksum)
        for file, checksum in zip(files, source.checksum or (None,) * len(files))
    ]


def _look_up_copy(query: Query) -> ResolvedSource:
    source, path = query.source, query.local_path
    location = f"{path} on the controller"
    try:
        files, summary = _read_headers(query, lambda: gguf.read_local_headers(str(path)), location)
    except OSError as error:
        raise Refusal(
            f"{source.variable} is {location}, which cannot be read ({error.strerror}): correct the path, or make the file readable for your account"
        ) from None
    return ResolvedSource(_model_files(source, files, location, lambda name: path.with_name(name).as_uri()), summary)
