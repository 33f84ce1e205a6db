# Copyright (c) 2026 the llamacpp.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Conversion of the variables ``llama_model_…`` into a ModelRequest."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from ansible_collections.llamacpp.cluster.plugins.module_utils.common import typed_json, validation
from ansible_collections.llamacpp.cluster.plugins.module_utils.common.errors import Refusal
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp.model import (
    header_summary,
    known_answer,
    split_files,
)
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp.model.summary import ModelSummary
from ansible_collections.llamacpp.cluster.plugins.module_utils.models import download_record
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan import host_types
from ansible_collections.llamacpp.cluster.plugins.module_utils.plan.host_types import KnownAnswerPlan
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.inputs import turns
from ansible_collections.llamacpp.cluster.plugins.module_utils.planner.types import (
    HuggingFace,
    ModelRequest,
    ModelSource,
)

SOURCE_KINDS = ("path", "huggingface", "url", "ollama", "copy")
"""Kinds of sources; each has a variable ``llama_model_KIND``."""
KNOWN_ANSWER_VARIABLE = "llama_model_known_answer"
REPOSITORY_PATTERN = r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}/[A-Za-z0-9][A-Za-z0-9._-]{0,95}"
REVISION_PATTERN = r"[A-Za-z0-9][A-Za-z0-9._/-]{0,254}"
QUANTISATION_PATTERN = r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}"
AUXILIARY_PATTERN = re.compile(
    r"(?P<path>/.*)|(?P<url>https?://.*)|file:(?P<copy>.+)|ollama:(?P<ollama>.+)"
    r"|(?P<huggingface>[^/:]+/[^/:]+)(?::(?P<quantisation>[^/:]+)|/(?P<file>.+))?"
)
"""Form of llama_model_mmproj and llama_model_draft."""
OLLAMA_NAME_PATTERN = re.compile(
    r"(?:(?:(?P<host>[A-Za-z0-9][A-Za-z0-9.-]*(?::\d{1,5})?)/)?(?P<namespace>\w[\w.-]*)/)?(?P<name>\w[\w.-]*)"
    r"(?::(?P<tag>\w[\w.-]*))?",
    re.ASCII,
)
OLLAMA_REGISTRY = "registry.ollama.ai"
HUGGING_FACE_HOSTS = ("hf.co", "huggingface.co")


def request_of(variables: Mapping[str, Any]) -> ModelRequest:
    """:raises Refusal: the variables set no source or several sources, or a value is invalid."""
    values = variables[KNOWN_ANSWER_VARIABLE]
    source_variables = [f"llama_model_{kind}" for kind in SOURCE_KINDS if _is_set(variables[f"llama_model_{kind}"])]
    source_variables += [KNOWN_ANSWER_VARIABLE] * (values is not None)
    if len(source_variables) != 1:
        raise Refusal(
            f"{' and '.join(source_variables)} are set: keep only the variable of the model to serve"
            if source_variables
            else f"no model is set: set one of {', '.join(f'llama_model_{kind}' for kind in SOURCE_KINDS)} or {KNOWN_ANSWER_VARIABLE}, "
            "for example llama_model_huggingface: unsloth/gpt-oss-20b-GGUF:Q4_K_M, or add entries to llama_models"
        )
    header = variables["llama_model_gguf_summary"]
    known_answer_plan = None if values is None else KnownAnswerPlan(values["layers"], values["width"], values["type"])
    summary = None if header is None else summary_of("llama_model_gguf_summary", header)
    return ModelRequest(
        source=None if known_answer_plan else _model_source(variables),
        known_answer=known_answer_plan,
        summary=_known_answer_summary(known_answer_plan) if known_answer_plan else summary,
        mmproj=_auxiliary_source(host_types.MMPROJ, variables["llama_model_mmproj"]),
        draft=_auxiliary_source(host_types.DRAFT, variables["llama_model_draft"]),
        token_file=variables["llama_model_token_file"],
        alias=_checked_alias(variables[turns.ALIAS_VARIABLE]),
    )


def _checked_alias(alias: str | None) -> str | None:
    if alias and not re.fullmatch(turns.ALIAS_PATTERN, alias, re.ASCII):
        raise Refusal(
            f"{turns.ALIAS_VARIABLE} is {validation.quote(alias)}: use at most 128 letters, digits and . _ / - : @ +, with a letter or digit first"
        )
    return alias


def summary_of(place: str, header: Any) -> ModelSummary:
    """:raises Refusal: the header does not match the format that model_info returns."""
    try:
        return header_summary.parse(header)
    except typed_json.Mismatch as error:
        raise Refusal(f"{place}{error.path} {error.reason}: set {place} to a summary from model_info") from None


@functools.lru_cache(maxsize=16)
def _known_answer_summary(plan: KnownAnswerPlan) -> ModelSummary | None:
    """Return the summary of the known-answer model; None if there is no such model."""
    return None if known_answer.problem(*plan) else header_summary.parse(known_answer.summary(*plan))


def _is_set(value: Any) -> bool:
    return value is not None and value != []


def _model_source(variables: Mapping[str, Any]) -> ModelSource:
    kind = next(kind for kind in SOURCE_KINDS if _is_set(variables[f"llama_model_{kind}"]))
    checksums = variables["llama_model_checksum"] or ()
    if checksums and kind not in ("url", "copy"):
        raise Refusal(
            "llama_model_checksum is set, but applies only to llama_model_url and llama_model_copy: remove llama_model_checksum"
        )
    return _source(host_types.MODEL, f"llama_model_{kind}", kind, variables[f"llama_model_{kind}"], checksums)


def _auxiliary_source(role: str, text: str | None) -> ModelSource | None:
    if text is None:
        return None
    variable, match = f"llama_model_{role}", AUXILIARY_PATTERN.fullmatch(text)
    if not match:
        raise Refusal(
            f"{variable} is {validation.quote(text)}: use /PATH on the head, http://… or https://…, file:/PATH on the controller, ollama:NAME:TAG, or "
            "OWNER/NAME, OWNER/NAME:QUANTISATION or OWNER/NAME/FILE on Hugging Face"
        )
    kind = next(kind for kind in SOURCE_KINDS if match[kind])
    value: Any = match[kind]
    if kind == "huggingface":
        files = [match["file"]] * bool(match["file"])
        value = {"repo": value, "quantisation": match["quantisation"], "files": files}
    return _source(role, variable, kind, value)


def _source(role: str, variable: str, kind: str, value: Any, checksums: Sequence[str] = ()) -> ModelSource:
    """:param checksums: checksums of the parts of ``url`` or ``copy``."""
    if kind == "huggingface":
        return ModelSource(role, variable, huggingface=_huggingface(variable, value))
    if kind == "url":
        return ModelSource(role, variable, url=_checked_url(variable, value), checksum=_checksum_digits(checksums))
    if kind == "ollama":
        return ModelSource(role, variable, ollama=_full_ollama_name(variable, value))
    if kind == "path" and not str(value).startswith("/"):
        raise Refusal(f"{variable} is {value!r}: use the absolute path of a file on the head")
    if kind == "copy" and not str(value):
        raise Refusal(f"{variable} is {value!r}: use the path of a file on the controller")
    if download_record.problem_of_name(download_record.base_name(str(value))):
        raise Refusal(
            f"{variable} is {value!r}, whose file name is not allowed: rename the file using only ASCII letters, digits, "
            "spaces and ._+@=,()-, with a letter or digit first"
        )
    if kind == "copy":
        return ModelSource(role, variable, copy=str(value), checksum=_checksum_digits(checksums))
    return ModelSource(role, variable, path=str(value))


def _huggingface(variable: str, settings: Mapping[str, Any]) -> HuggingFace:
    repo, files = str(settings["repo"]), tuple(settings.get("files") or ())
    if not re.fullmatch(REPOSITORY_PATTERN, repo):
        raise Refusal(
            f"{variable} sets repo to {validation.quote(repo)}: use OWNER/NAME, as in the address of its Hugging Face page"
        )
    if settings.get("quantisation") and files:
        raise Refusal(f"{variable} has both quantisation and files: remove one of them")
    revision = settings.get("revision") or "main"
    for key, value, pattern, remedy in (
        ("quantisation", settings.get("quantisation"), QUANTISATION_PATTERN, "a quantisation like Q4_K_M"),
        ("revision", revision, REVISION_PATTERN, "a branch, tag or commit"),
    ):
        if value is not None and not re.fullmatch(pattern, str(value)):
            raise Refusal(f"{variable} sets {key} to {validation.quote(value)}: use {remedy} in the repository")
    for name in files:
        if download_record.problem_of_name(name):
            raise Refusal(f"{variable} has {validation.quote(name)} in files: use file names from the repository")
    return HuggingFace(repo, settings.get("quantisation") or None, _file_names(variable, files), revision)


def _file_names(variable: str, names: Sequence[str]) -> tuple[str, ...]:
    """Return the names of all parts of the model that these files belong to, in order.

    :raises Refusal: the files belong to several models.
    """
    part_names = split_files.part_names(names[0]) if names else []
    if not set(names) <= set(part_names):
        raise Refusal(
            f"{variable} has {' and '.join(names[:3])}, which are not parts of the same model: name one file of the model"
        )
    return tuple(part_names)


def _checked_url(variable: str, url: str) -> str:
    try:
        parsed_url = urlsplit(url)
        is_valid = parsed_url.scheme in ("http", "https") and parsed_url.hostname and parsed_url.port != 0
    except ValueError:
        is_valid = None
    if not is_valid or download_record.problem_of_name(download_record.name_of_url(url)):
        raise Refusal(f"{variable} is {validation.quote(url)}: use the http:// or https:// address of a GGUF file")
    return url


def _checksum_digits(checksums: Sequence[str]) -> tuple[str, ...]:
    """Return the digits of each checksum; a split model has one for each part."""
    values = []
    for checksum in checksums:
        match = re.fullmatch(rf"sha256:({download_record.SHA256_PATTERN})", str(checksum).lower())
        if not match:
            raise Refusal(
                f"llama_model_checksum has {validation.quote(checksum)}: use sha256: followed by 64 hexadecimal digits, as printed by sha256sum"
            )
        values.append(match[1])
    return tuple(values)


def _full_ollama_name(variable: str, name: str) -> str:
    """Return the full name of a model, completed as by Ollama itself."""
    match = OLLAMA_NAME_PATTERN.fullmatch(name)
    if not match:
        raise Refusal(
            f"{variable} is {validation.quote(name)}: use [HOST/NAMESPACE/]NAME:TAG as in ollama pull, like gemma3:4b"
        )
    registry = match["host"] or OLLAMA_REGISTRY
    if registry in HUGGING_FACE_HOSTS:
        raise Refusal(
            f"{variable} is {name!r}, a repository on Hugging Face: use OWNER/NAME:QUANTISATION (for the main model, in llama_model_huggingface)"
        )
    return f"{registry}/{match['namespace'] or 'library'}/{match['name']}:{match['tag'] or 'latest'}"
