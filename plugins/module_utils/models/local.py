# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What a host has of models: files that were fetched, with their record, files of an operator, and models of Ollama."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ansible_collections.llamacpp.cluster.plugins.module_utils.common import reading, validation
from ansible_collections.llamacpp.cluster.plugins.module_utils.facts import host
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp.model import gguf, projector
from ansible_collections.llamacpp.cluster.plugins.module_utils.models import download_record, ollama

OLLAMA_FOLDERS = ("/usr/share/ollama/.ollama/models", "/var/lib/ollama/.ollama/models", "/var/lib/ollama/models")
"""Of its service, as Ollama's installer and packages of distributions set it up."""


def had(folders: Sequence[str], paths: Sequence[str], wanted: Sequence[str], account: str | None) -> dict[str, Any]:
    """What this host has.

    :param folders: that may have a record.
    :param paths: of files.
    :param wanted: models of Ollama.
    :param account: that is to read them; None for that of this process.
    :returns: folder → ``record`` and ``summary`` of those whose files are whole; path → ``bytes``, ``summary`` and ``closed``, or ``error``; name of a model of
        Ollama → ``manifest``, ``folder``, and ``blobs``: role → the same as of a path.
    """
    return {
        "folders": {folder: found for folder in folders if (found := fetched(folder, account))},
        "paths": {path: {**file(path, account), "summary": _summary(path, whole=False)["summary"]} for path in paths},
        "ollama": {name: found for name in wanted if (found := of_ollama(name, account))},
    }


def fetched(folder: str, account: str | None) -> dict[str, Any] | None:
    """The record of a folder, and whether its files are whole; then the summary of the model, too. None where there is no record."""
    kept = download_record.read_record(folder)
    if kept is None:
        return None
    record = {key: kept.record.get(key) for key in download_record.SHAPE}
    if kept.missing:
        return {"record": record, "whole": False}
    first = Path(folder) / download_record.base_name(kept.record["resolved"][0]["name"])
    whole = kept.record["asked"].get("role") != download_record.DRAFT
    return {
        "record": record,
        "whole": True,
        **_summary(str(first), whole),
        "closed": file(str(first), account).get("closed"),
    }


def file(path: str, account: str | None) -> dict[str, Any]:
    try:
        return {"bytes": os.stat(path).st_size, "closed": host.closed_to(account, path) if account else None}
    except OSError as error:
        return {"error": validation.printable(error.strerror or error)}


def _summary(path: str, whole: bool = True) -> dict[str, Any]:
    """Of a model, or of a projector beside one; null where its header cannot be read, or is of neither. ``whole`` as of gguf.summarize."""
    try:
        model = gguf.read_path(path)
        return {"summary": projector.summarize(model) if projector.is_one(model) else gguf.summarize(model, whole)}
    except (gguf.GGUFError, OSError) as error:
        return {"summary": None, "error": validation.printable(error)}


def of_ollama(name: str, account: str | None) -> dict[str, Any] | None:
    """The manifest of a model that Ollama has on this host, and the folder where its blobs are; None where it has none that can be read."""
    homes = [os.environ.get("OLLAMA_MODELS"), os.path.expanduser("~/.ollama/models"), *OLLAMA_FOLDERS]
    for folder in filter(None, homes):
        path = Path(folder) / ollama.name_of(name).manifest_path
        try:
            manifest = reading.read_object(path, ollama.MANIFEST_BYTES)
        except (OSError, ValueError):
            continue
        if not ollama.problem(manifest):
            return {
                "manifest": {"layers": manifest["layers"]},
                "folder": folder,
                "blobs": {role: _blob(Path(folder), manifest, role, account) for role in download_record.ROLES},
            }
    return None


def _blob(folder: Path, manifest: Mapping[str, Any], role: str, account: str | None) -> dict[str, Any]:
    """What the host has of the first blob with this role that a manifest names."""
    for blob in ollama.blobs(manifest, role):
        path = str(folder / ollama.blob_path(blob.sha256))
        return {**file(path, account), "summary": _summary(path, role == download_record.MODEL)["summary"]}
    return {}
