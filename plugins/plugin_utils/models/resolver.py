# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""Resolves the sources of a model to files and reads their headers: on the host where it has them already, and else where they come from."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from ansible_collections.llamacpp.cluster.plugins.module_utils.common import reading, typed_json, validation
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.errors import Refusal
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp.model import header_summary, projector
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp.model.summary import NamedFile
from ansible_collections.llamacpp.cluster.plugins.module_utils.models import download_record, ollama, web
from ansible_collections.llamacpp.cluster.plugins.module_utils.models.download_record import DownloadRecord, StoredFile
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan import host_types
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.host_types import ModelFilePlan
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.inputs import model_source
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.types import ModelRequest, ModelSource
from ansible_collections.llamacpp.cluster.plugins.plugin_utils.action import Action, why
from ansible_collections.llamacpp.cluster.plugins.plugin_utils.models import hub, lookup
from ansible_collections.llamacpp.cluster.plugins.plugin_utils.models.lookup import (
    Query,
    ResolvedSource,
    Summary,
)

MODULE = "llamacpp.cluster.model_info"


class Options(NamedTuple):
    """Of the module ``model_info``."""

    prefix: str | None = None
    """None where the host is not asked for models that can be downloaded."""
    account: str | None = None
    timeout: int = 120
    summary_is_enough: bool = False
    """Nothing is read of a model whose summary the variables have."""


class _Header(NamedTuple):
    """What a summary says of the files of a model."""

    files: tuple[NamedFile, ...] = ()


def token_server(requests: Iterable[ModelRequest]) -> str | None:
    """A URL of the one server that gets the token: that of the first source which takes one, as for the download."""
    return next(filter(None, (_server(source) for request in requests for source in request.sources())), None)


def resolve(action: Action, request: ModelRequest, options: Options, server: str | None = None) -> dict:
    """The result of the module ``model_info`` for one model.

    :param server: of token_server, where the model is one of several.
    :raises Refusal: it is not there, or cannot be read.
    """
    resolver = _Resolver(action, request, options, server or token_server([request]))
    sources = {source.role: resolver.source(source) for source in request.sources()}
    served = sources.get(host_types.MODEL, ResolvedSource(()))
    return {
        "changed": False,
        **({"summary": served.summary} if served.summary else {}),
        "closed": served.closed,
        "files": [typed_json.dump(file) for source in sources.values() for file in source.files],
        "offered": typed_json.dump(list(served.offered)),
        "auxiliary": {
            role: source.summary for role, source in sources.items() if source.summary and role != host_types.MODEL
        },
    }


class _Resolver:
    def __init__(self, action: Action, request: ModelRequest, options: Options, token_server: str | None) -> None:
        self.action, self.request, self.options, self.token_server = action, request, options, token_server
        self.folder = action.variables.get("inventory_dir") or ""
        self.on_host = self._ask_host()

    def source(self, source: ModelSource) -> ResolvedSource:
        if source.path:
            return self._in_place(source, _entry(self.on_host, "paths", source.path))
        if source.ollama:
            return self._of_ollama(source)
        stored = self._stored(source)
        if stored and not self._is_on_controller(source):
            return stored
        query = Query(source, self._token(source), self.folder)
        return lookup.look_up(query, self.options.timeout)

    def _is_on_controller(self, source: ModelSource) -> bool:
        path = Query(source, folder=self.folder).local_path
        return bool(source.copy and reading.from_disk(path, path.exists, self.options.timeout))

    def _token(self, source: ModelSource) -> str | None:
        """The token, for the one server that gets it."""
        server, allowed = _server(source), self.token_server
        if not self.request.token_file or not server or not allowed or not web.same_server(server, allowed):
            return None
        return hub.read_token(lookup.beside(self.folder, self.request.token_file))

    # ------------------------------------------------------------------------------------------------------------- the host

    def _ask_host(self) -> Mapping[str, Any]:
        """What the host has of the sources; nothing where there is nothing to ask for."""
        prefix, sources = self.options.prefix, self.request.sources()
        arguments = {
            "folders": [model_source.folder(prefix, one) for one in sources if prefix and model_source.is_brought(one)],
            "paths": [one.path for one in sources if one.path],
            "ollama": [one.ollama for one in sources if one.ollama],
        }
        if not any(arguments.values()):
            return {}
        account = {"account": self.options.account} if self.options.account else {}
        result = self.action.module(MODULE, **arguments, timeout=self.options.timeout, **account)
        if result.get("failed"):
            raise Refusal(why(result))
        return result

    def _in_place(self, source: ModelSource, entry: Mapping[str, Any], name: str = "") -> ResolvedSource:
        """Files that the host has, where they lie.

        :param name: of a single file, where its path does not end in it.
        :raises Refusal: they cannot be read here, or the service cannot read a projector or a draft model.
        """
        what, path, summary = source.ollama or source.path, str(entry.get("path", source.path)), _summary(source, entry)
        if entry.get("error") or (source.role == host_types.MODEL and summary is None):
            reason = validation.printable(entry.get("error") or header_summary.NOT_MODELS["mmproj"])
            remedy = ". Give the path of a complete GGUF file on the head" if source.path else ""
            raise Refusal(f"{source.variable} is {what}, which {reason}{remedy}")
        if entry.get("closed") and source.role != host_types.MODEL:
            raise Refusal(
                f"{source.variable} is {what}, but its service cannot read {validation.printable(entry['closed'])}: open it with chmod o+rX"
            )
        named = typed_json.reported(self.action.host, str(what), _Header, entry.get("summary") or {}).files
        files = [
            ModelFilePlan(
                name or file.name,
                source.role,
                path if name else f"{posixpath.dirname(path)}/{file.name}",
                bytes=file.bytes,
            )
            for file in named
        ]
        return ResolvedSource(files, summary, entry.get("closed"))

    def _of_ollama(self, source: ModelSource) -> ResolvedSource:
        """A blob that Ollama has on the host.

        :raises Refusal: it has none.
        """
        whole = str(source.ollama)
        entry = _entry(_entry(self.on_host, "ollama", whole), source.role)
        if not entry:
            raise Refusal(
                f"{source.variable} is {whole}, which Ollama on {self.action.host} does not have in a folder that the account which connects can read: "
                "run ollama pull there, open the folder, or set llama_model_huggingface to a repository with this model"
            )
        return self._in_place(source, entry, ollama.file_name(whole))

    def _stored(self, source: ModelSource) -> ResolvedSource | None:
        """What the host has of a source, so that no server is asked; None where it has nothing whole."""
        entry, files = self._download(source), self._recorded(source)
        summary = _summary(source, entry)
        if not files or entry.get("whole") is not True or (source.role == host_types.MODEL and not summary):
            return None
        return ResolvedSource(files, summary, entry.get("closed"))

    def _download(self, source: ModelSource) -> Mapping[str, Any]:
        """What the host reports of the folder of a source."""
        return _entry(self.on_host, "folders", model_source.folder(str(self.options.prefix), source))

    def _recorded(self, source: ModelSource) -> list[ModelFilePlan]:
        """The files of a source's record; none where it has something else."""
        try:
            files = typed_json.parse(DownloadRecord, self._download(source)).files
        except typed_json.Mismatch:
            return []
        wanted = hub.COMMIT if source.huggingface else ""
        if any(
            download_record.problem_of_name(file.name) or not re.fullmatch(wanted, file.revision or "")
            for file in files
        ):
            return []
        return [
            ModelFilePlan(file.name, source.role, "", self._url(source, file), file.bytes, file.sha256, file.revision)
            for file in files
        ]

    def _url(self, source: ModelSource, file: StoredFile) -> str:
        """Where a file of a record comes from: the host has no say in whom a token is sent to, or what leaves the controller."""
        name = download_record.base_name(file.name)
        if source.huggingface:
            return hub.url_of(source.huggingface, str(file.revision), file.name)
        if source.copy:
            return Query(source, folder=self.folder).local_path.with_name(name).as_uri()
        return web.sibling_url(str(source.url), name)


def _server(source: ModelSource) -> str | None:
    """A URL of the server that may ask for a token."""
    return hub.endpoint() if source.huggingface else source.url


def _entry(reported: Mapping[str, Any], *keys: Any) -> Mapping[str, Any]:
    """An entry of what a host reports, which may be anything."""
    for key in keys:
        found = reported.get(key)
        reported = found if isinstance(found, Mapping) else {}
    return reported


def _summary(source: ModelSource, entry: Mapping[str, Any]) -> Summary | None:
    """A summary that a host reports, which planning checks; None of a projector in place of a model, and the other way round."""
    summary = entry.get("summary")
    if not isinstance(summary, Mapping):
        return None
    is_projector = summary.get("architecture") == projector.ARCHITECTURE
    return summary if is_projector == (source.role == host_types.MMPROJ) else None
