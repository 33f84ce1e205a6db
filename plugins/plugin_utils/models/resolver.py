# Copyright (c) 2026 the llamacpp.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Resolves a model's sources to files, and reads their headers: on the host if it has the files, or else at their origin."""

import posixpath
import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from ansible_collections.llamacpp.cluster.plugins.module_utils.common import reading, typed_json, validation
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.errors import Refusal
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp.model import header_summary, projector
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp.model.summary import ModelFile
from ansible_collections.llamacpp.cluster.plugins.module_utils.models import download_record, ollama, web
from ansible_collections.llamacpp.cluster.plugins.module_utils.models.download_record import DownloadRecord, StoredFile
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan import host_types
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.host_types import ModelFilePlan
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.inputs import model_source
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.types import ModelRequest, ModelSource
from ansible_collections.llamacpp.cluster.plugins.plugin_utils.action import Action, failure_reason
from ansible_collections.llamacpp.cluster.plugins.plugin_utils.models import hub, lookup
from ansible_collections.llamacpp.cluster.plugins.plugin_utils.models.lookup import Query, ResolvedSource, Summary

MODULE_NAME = "llamacpp.cluster.model_info"


class LookupOptions(NamedTuple):
    """Arguments of the module ``model_info``."""

    prefix: str | None = None
    """Installation folder; None to skip the host's copies of models that can be downloaded."""
    account: str | None = None
    service_manager: str | None = None
    timeout: int = 120
    summary_is_enough: bool = False
    """Whether to skip reading the model if the variables have a summary."""


class _Files(NamedTuple):
    """Part of a model's summary that lists its files."""

    files: tuple[ModelFile, ...] = ()


def token_server_url(requests: Iterable[ModelRequest]) -> str | None:
    """Return a URL of the only server that receives the token: the server of the first source that may need a token, as for the download."""
    return next(filter(None, (_server_url(source) for request in requests for source in request.sources())), None)


def resolve(action: Action, request: ModelRequest, options: LookupOptions, server: str | None = None) -> dict:
    """Return the result of the module ``model_info`` for one model.

    :param server: token_server_url of all models, if there are several.
    """
    resolver = _Resolver(action, request, options, server or token_server_url([request]))
    sources = {source.role: resolver.resolve_source(source) for source in request.sources()}
    resolved_model = sources.get(host_types.MODEL, ResolvedSource(()))
    return {
        "changed": False,
        **({"summary": resolved_model.summary} if resolved_model.summary else {}),
        "unreadable_path": resolved_model.unreadable_path,
        "files": [typed_json.dump(file) for source in sources.values() for file in source.files],
        "offered": typed_json.dump(list(resolved_model.quantisations)),
        "auxiliary": {
            role: source.summary for role, source in sources.items() if source.summary and role != host_types.MODEL
        },
    }


class _Resolver:
    def __init__(self, action: Action, request: ModelRequest, options: LookupOptions, token_server: str | None) -> None:
        self.action, self.request, self.options, self.token_server = action, request, options, token_server
        self.inventory_folder = action.variables.get("inventory_dir") or ""
        self.host_report = self._ask_host()

    def resolve_source(self, source: ModelSource) -> ResolvedSource:
        if source.path:
            return self._resolve_path(source, _report_section(self.host_report, "paths", source.path))
        if source.ollama:
            return self._resolve_ollama(source)
        host_source = self._find_on_host(source)
        if host_source and not self._is_on_controller(source):
            return host_source
        query = Query(source, self._token(source), self.inventory_folder)
        return lookup.look_up(query, self.options.timeout)

    def _is_on_controller(self, source: ModelSource) -> bool:
        path = Query(source, folder=self.inventory_folder).local_path
        return bool(source.copy and reading.run_disk_work(path, path.exists, self.options.timeout))

    def _token(self, source: ModelSource) -> str | None:
        """Return the token if the source's server may receive it."""
        server, token_server = _server_url(source), self.token_server
        if not self.request.token_file or not server or not token_server or not web.same_server(server, token_server):
            return None
        return hub.read_token(lookup.join_path(self.inventory_folder, self.request.token_file))

    # ------------------------------------------------------------------------------------------------------------- the host

    def _ask_host(self) -> Mapping[str, Any]:
        """Return the host's report on the sources; empty if no source needs it."""
        prefix, sources = self.options.prefix, self.request.sources()
        arguments = {
            "folders": [
                model_source.model_folder(prefix, source)
                for source in sources
                if prefix and model_source.is_fetched(source)
            ],
            "paths": [source.path for source in sources if source.path],
            "ollama": [source.ollama for source in sources if source.ollama],
        }
        if not any(arguments.values()):
            return {}
        account_argument = {"account": self.options.account} if self.options.account else {}
        result = self.action.run_module(MODULE_NAME, **arguments, timeout=self.options.timeout, **account_argument)
        if result.get("failed"):
            raise Refusal(failure_reason(result))
        return result

    def _resolve_path(self, source: ModelSource, report: Mapping[str, Any], name: str = "") -> ResolvedSource:
        """Return files on the host at their existing paths.

        :param name: name of a single file whose path does not end in that name.
        :raises Refusal: the files cannot be read, or the service cannot read a projector or a draft model.
        """
        subject, path, summary = (
            source.ollama or source.path,
            str(report.get("path", source.path)),
            _summary(source, report),
        )
        if report.get("error") or (source.role == host_types.MODEL and summary is None):
            reason = validation.printable(report.get("error") or header_summary.REFUSAL_BY_KIND["mmproj"])
            remedy = ". Use the path of a complete GGUF file on the head" if source.path else ""
            raise Refusal(f"{source.variable} is {subject}, which {reason}{remedy}")
        if report.get("unreadable_path") and source.role != host_types.MODEL:
            raise Refusal(
                f"{source.variable} is {subject}, but the service cannot read {validation.printable(report['unreadable_path'])}: run chmod o+rX on it"
            )
        named_files = typed_json.parse_report(self.action.host, str(subject), _Files, report.get("summary") or {}).files
        files = [
            ModelFilePlan(
                name or file.name,
                source.role,
                path if name else f"{posixpath.dirname(path)}/{file.name}",
                bytes=file.bytes,
            )
            for file in named_files
        ]
        return ResolvedSource(files, summary, report.get("unreadable_path"))

    def _resolve_ollama(self, source: ModelSource) -> ResolvedSource:
        """Return the blob of an Ollama model on the host."""
        name = str(source.ollama)
        file_report = _report_section(_report_section(self.host_report, "ollama", name), source.role)
        if not file_report:
            raise Refusal(
                f"{source.variable} is {name}, which no readable Ollama folder on {self.action.host} contains: run ollama pull on "
                "that host, make the folder readable for the connecting account, or set llama_model_huggingface to a repository with this model"
            )
        return self._resolve_path(source, file_report, ollama.file_name(name))

    def _find_on_host(self, source: ModelSource) -> ResolvedSource | None:
        """Return the complete files of a source on the host, which make a request to a server unnecessary; None if there are none."""
        folder_report, files = self._download_report(source), self._recorded_files(source)
        summary = _summary(source, folder_report)
        if not files or folder_report.get("whole") is not True or (source.role == host_types.MODEL and not summary):
            return None
        return ResolvedSource(files, summary, folder_report.get("unreadable_path"))

    def _download_report(self, source: ModelSource) -> Mapping[str, Any]:
        """Return the host's report on the download folder of a source."""
        return _report_section(self.host_report, "folders", model_source.model_folder(str(self.options.prefix), source))

    def _recorded_files(self, source: ModelSource) -> list[ModelFilePlan]:
        """Return the files in the record of a source; none if the record is invalid."""
        try:
            files = typed_json.parse(DownloadRecord, self._download_report(source)).files
        except typed_json.Mismatch:
            return []
        revision_pattern = hub.COMMIT_PATTERN if source.huggingface else ""
        if any(
            download_record.problem_of_name(file.name) or not re.fullmatch(revision_pattern, file.revision or "")
            for file in files
        ):
            return []
        return [
            ModelFilePlan(file.name, source.role, "", self._url(source, file), file.bytes, file.sha256, file.revision)
            for file in files
        ]

    def _url(self, source: ModelSource, file: StoredFile) -> str:
        """Return the URL of a recorded file. The host must not decide which server receives a token, or which file leaves the controller."""
        name = download_record.base_name(file.name)
        if source.huggingface:
            return hub.url_of(source.huggingface, str(file.revision), file.name)
        if source.copy:
            return Query(source, folder=self.inventory_folder).local_path.with_name(name).as_uri()
        return web.sibling_url(str(source.url), name)


def _server_url(source: ModelSource) -> str | None:
    """Return a URL of the server that may ask for a token."""
    return hub.endpoint() if source.huggingface else source.url


def _report_section(report: Mapping[str, Any], *keys: Any) -> Mapping[str, Any]:
    """Return a section of a host's report, which is unchecked."""
    for key in keys:
        value = report.get(key)
        report = value if isinstance(value, Mapping) else {}
    return report


def _summary(source: ModelSource, report: Mapping[str, Any]) -> Summary | None:
    """Return a host's summary, which planning checks; None if it describes a projector instead of a model, or a model instead of a projector."""
    summary = report.get("summary")
    if not isinstance(summary, Mapping):
        return None
    is_projector = summary.get("architecture") == projector.ARCHITECTURE
    return summary if is_projector == (source.role == host_types.MMPROJ) else None
