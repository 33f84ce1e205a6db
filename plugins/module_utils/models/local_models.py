# Copyright (c) 2026 the llamacpp.cluster contributors
# GNU General Public License v3.0+ (see LICENSE or https://www.gnu.org/licenses/gpl-3.0.txt)
# SPDX-License-Identifier: GPL-3.0-or-later
"""What a host has of models: downloads with their record, files of an operator, and models of Ollama."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ansible_collections.llamacpp.cluster.plugins.module_utils.common import validation
from ansible_collections.llamacpp.cluster.plugins.module_utils.facts import host
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp.model import gguf, header_summary, projector
from ansible_collections.llamacpp.cluster.plugins.module_utils.models import download_record, ollama


def report(
    folders: Sequence[str], paths: Sequence[str], ollama_names: Sequence[str], account: str | None
) -> dict[str, Any]:
    """
    :param folders: that may have a record.
    :param paths: of files.
    :param account: that is to read them; None for that of this process.
    :returns: folder → ``record``, ``whole``, and ``summary`` and ``closed`` of those whose files are whole; path → ``bytes``, ``summary`` and ``closed``,
        or ``error``; name of a model of Ollama → role → ``path`` and the same.
    """
    return {
        "folders": {folder: entry for folder in folders if (entry := _download(folder, account))},
        "paths": {path: _file(path, account, whole=False) for path in paths},
        "ollama": {
            name: {
                role: {"path": str(path), **_file(str(path), account, whole=role == download_record.MODEL)}
                for role, path in ollama.blobs(name).items()
            }
            for name in ollama_names
        },
    }


def _download(folder: str, account: str | None) -> dict[str, Any] | None:
    """The record of a folder, and whether its files are whole; then the summary of the model, too. None where there is no record."""
    stored = download_record.read_record(folder)
    if stored is None:
        return None
    record = {key: stored.record.get(key) for key in download_record.SHAPE}
    if stored.missing:
        return {"record": record, "whole": False}
    first = Path(folder) / download_record.base_name(stored.record["resolved"][0]["name"])
    file = _file(str(first), account, whole=stored.record["asked"].get("role") != download_record.DRAFT)
    return {"record": record, "whole": True, "summary": file["summary"], "closed": file.get("closed")}


def _file(path: str, account: str | None, whole: bool) -> dict[str, Any]:
    """Size and header. The summary is null where the header cannot be read, or is neither of a model nor of a projector.

    :param whole: as of header_summary.summarize.
    """
    try:
        entry = {"bytes": os.stat(path).st_size, "closed": host.closed_to(account, path) if account else None}
    except OSError as error:
        return {"error": validation.printable(error.strerror or error), "summary": None}
    try:
        model = gguf.read_path(path)
        summary = projector.summarize(model) if projector.is_one(model) else header_summary.summarize(model, whole)
        return {**entry, "summary": summary}
    except (gguf.GGUFError, OSError):
        return {**entry, "summary": None}
