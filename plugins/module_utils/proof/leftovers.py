# Copyright (c) 2026 the llamacpp.cluster contributors
# SPDX-License-Identifier: GPL-3.0-or-later
"""Folder and socket of a proof, and the removal of files of a killed proof."""

from __future__ import annotations

import shutil
from contextlib import suppress
from pathlib import Path

from ansible_collections.llamacpp.cluster.plugins.module_utils.common import locks, names

PROOF_FOLDER, PROOF_SOCKET_FILE = "proof", "proof.sock"


def remove_leftovers(prefix: Path) -> None:
    """Remove the files of a killed proof, up to 8 GiB, unless a proof is running."""
    folder = prefix / "state" / PROOF_FOLDER
    with suppress(locks.BusyError, OSError):
        if folder.exists():
            with locks.hold(prefix / names.PROOF_LOCK_FILE):
                shutil.rmtree(folder, ignore_errors=True)
