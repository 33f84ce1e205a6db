# Copyright (c) 2026 the llamacpp.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Models on a host: downloads with their record, files of an operator, and models of Ollama."""

from __future__ import annotations

import grp
import os
import pwd
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ansible_collections.llamacpp.cluster.plugins.module_utils.common import typed_json, validation
from ansible_collections.llamacpp.cluster.plugins.module_utils.llamacpp.model import gguf, header_summary, projector
from ansible_collections.llamacpp.cluster.plugins.module_utils.models import download_record, ollama


def report(
    folders: Sequence[str], paths: Sequence[str], ollama_names: Sequence[str], account: str | None
) -> dict[str, Any]:
    """Return the host's report on models.

    :param account: account that reads the models; None for the account of this process.
    :returns: folder → ``files`` of its record, ``whole``, and the entry of its first file; path → entry: ``bytes`` and ``summary``, or ``error``,
        and ``unreadable_path``; name of an Ollama model → role → ``path`` and its entry.
    """
    return {
        "folders": {folder: entry for folder in folders if (entry := _folder_entry(folder, account))},
        "paths": {path: _entry(path, account) for path in paths},
        "ollama": {
            name: {role: {"path": str(path), **_entry(str(path), account)} for role, path in ollama.blobs(name).items()}
            for name in ollama_names
        },
    }


def _folder_entry(folder: str, account: str | None) -> dict[str, Any] | None:
    """Return the record of a folder, whether its files are complete, and the entry of the first file; None without a record."""
    path = Path(folder)
    files = download_record.read_record(path).files
    if not files:
        return None
    entry = {"files": typed_json.dump(files), "whole": all(download_record.is_complete(path, file) for file in files)}
    return {**entry, **_entry(str(path / download_record.base_name(files[0].name)), account)}


def _entry(path: str, account: str | None) -> dict[str, Any]:
    """Return a file's ``bytes``, ``summary`` and ``unreadable_path``, or ``error``, the end of a sentence that begins with the path."""
    try:
        unreadable_path = find_unreadable_path(account, path) if account else None
        model = gguf.read_local_headers(path)
        summary = projector.summarize(model) if projector.is_projector(model) else header_summary.summarize(model)
        return {"bytes": summary["bytes"], "unreadable_path": unreadable_path, "summary": summary}
    except gguf.GGUFError as error:
        return {"error": str(error), "unreadable_path": unreadable_path}
    except FileNotFoundError:
        return {"error": "does not exist"}
    except OSError as error:
        return {"error": f"cannot be read ({validation.printable(error.strerror or error)})"}


def find_unreadable_path(account: str, path: str) -> str | None:
    """Return the first folder or file on a path that an account cannot enter or read, or None. A missing account has the permissions of others."""
    try:
        user = pwd.getpwnam(account)
        groups = {user.pw_gid, *(group.gr_gid for group in grp.getgrall() if account in group.gr_mem)}
    except KeyError:
        user, groups = None, set()
    real_path = Path(os.path.realpath(path))
    for component in [*reversed(Path(path).parents), *reversed(real_path.parents), real_path]:
        status = component.stat()
        is_owner = user is not None and status.st_uid == user.pw_uid
        shift = 6 if is_owner else 3 if status.st_gid in groups else 0
        if not status.st_mode >> shift & (1 if stat.S_ISDIR(status.st_mode) else 4):
            return str(component)
    return None
